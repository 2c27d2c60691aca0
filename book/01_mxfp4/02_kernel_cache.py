# %% [markdown]
# # 1.2 Kernels: compiled once, never stale
#
# The arithmetic of this book is written in Python, and numba compiles it to machine code. Compiling takes about a
# minute for the whole package. So the machine code is kept on disk, and the next process loads it. Kept machine code is
# wrong as soon as one of the sources it was made from changes, and then it must not be used. At the end of this chapter
# you can say which changes make machine code invalid, and show an edit after which numba's own cache gives a wrong
# answer. You need this chapter when you change a kernel. Skip it on a first reading.
#
# > **Without it:** after an edit, numba's cache answers 20 where 1010 is right,<!--claim stale--> without a message.
# >
# > **With it:** every edit is seen,<!--claim seen--> and kernels that no edit concerns are not compiled again.
#
# Needs only Python. Runs in a minute. Makes `k3lib.kernel_cache`.
#
# [1.1 Four bits a weight](01_mxfp4.ipynb) ·
# [contents](../README.md) ·
# [1.3 Sixteen lanes as one value](03_simd.ipynb)

# %%
import subprocess
import sys
from pathlib import Path

import numpy as np

from k3lib.config import read_config

BOOK = next(p / "book" for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
sys.path.insert(0, str(BOOK))
import schematics

schematics.where(read_config(BOOK.parent / "fixtures/k3"), "kernels")

# %% tags=["export"]
import contextlib
import functools
import hashlib
import os
import pickle
import re
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from importlib.resources import files
from importlib.util import cache_from_source
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

import llvmlite
import numba
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target
from numba.core.serialize import dumps
from numba.extending import is_jitted


# %% [markdown]
# | word | meaning |
# |---|---|
# | kernel | a Python function that numba compiles to machine code |
# | signature | the types a kernel is called with; each signature is compiled for itself |
# | to inline | to copy the machine code of a called function into its caller |
# | entry | a file with the machine code of one kernel for one signature and one CPU |
# | digest | SHA-256 of a text; texts with equal digests are equal |
#
# ## 1.2.1 What compiling costs
#
# A kernel is compiled when it is called for the first time. The kernel below has three lines. The larger kernels of the
# book have about thirty, and each takes about a second to compile.

# %%
@numba.njit
def dot(a, b):
    total = np.float32(0)
    for i in range(len(a)):
        total += a[i] * b[i]
    return total


# %% tags=["nbval-ignore-output"]
a = np.ones(1000, np.float32)
for call in ("first call", "second call"):
    start = time.perf_counter()
    dot(a, a)
    print(f"{call}: {(time.perf_counter() - start) * 1e3:.3f} ms")

# %% [markdown]
# ## 1.2.2 A stale entry
#
# Numba has a cache of its own: `njit(cache=True)`. It uses an entry as long as the file that contains the kernel is
# unchanged. But the machine code of a kernel also contains the functions that were inlined into it, and these may come
# from another file. The experiment has two small modules. `root` calls `leaf`. Then `leaf` is changed: it adds 100
# instead of 1.

# %%
LEAF = "from numba import njit\n\n@njit(cache=True)\ndef leaf(x):\n    return x + 1\n"
ROOT = "from leaf import leaf\nfrom numba import njit\n\n@njit(cache=True)\ndef root(x):\n    return 10 * leaf(x)\n"


def run(folder, code, errors=None):
    """What Python prints, in a new process that finds its modules in the folder and keeps machine code there.

    `errors`: where its stderr goes, as subprocess takes it.
    """
    env = {**os.environ, "PYTHONPATH": str(folder), "NUMBA_CACHE_DIR": str(folder / "cache")}
    return subprocess.check_output([sys.executable, "-c", code], env=env, text=True, stderr=errors).strip()


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    (folder / "root.py").write_text(ROOT)
    answers = []
    for text in (LEAF, LEAF.replace("+ 1", "+ 100")):
        (folder / "leaf.py").write_text(text)
        answers.append(run(folder, "from root import root; print(root(1))"))
answers

# %% [markdown]
# After the edit the answer should be 1010. The cache has used the old entry: nothing failed, and no message was
# printed. In an early version of this book, a recurrence was replaced by `out[j] = out[j]` by mistake. All assertions
# of its chapter passed until the cache folder was deleted.

# %%
assert answers == ["20", "20"]  # claim stale

# %% tags=["raises-exception"]
assert answers == ["20", "1010"], f"after the edit the answer is {answers[1]}, expected 1010"

# %% [markdown]
# ## 1.2.3 The digest that decides
#
# Which sources can be in the machine code of a kernel? A kernel can inline only functions that its module can name: its
# own functions and those that it imports. So the digest of a module is taken over its source *and the sources of all
# modules that it imports from `k3lib`*, directly or through other modules. An edit of a table in `mxfp4` then makes the
# product's kernels compile again, and an edit of the command line changes no kernel.
#
# **A source that changes during a process.** The process of a notebook may run for days. If a source file changes
# meanwhile, the process still has the old text, but the file has the new one. So this module computes the digests of
# all sources when it is imported. If a source has changed since then, its module gets no digest. Without a digest its
# machine code is neither stored nor loaded.
#
# **Bytecode that is older than its source.** Python itself keeps compiled code: bytecode, in `.pyc` files. A `.pyc`
# file names the size and the time of its source, in whole seconds. After two edits within a second, or after a copy
# that keeps times, Python may run the bytecode of an older text. The machine code that it then makes must not be stored
# under the digest of the new text. So this module remembers the bytecode that was loaded, and `python_runs` compares it
# with the source before an entry is stored. A process that finds all entries need not compare anything.

# %% tags=["export"]
HERE = Path(str(files("k3lib"))).absolute()  # also after the process has gone to another folder


def _digests():
    "{module of k3lib: digest of its source}. A file that cannot be read is left out: its kernels are not kept."
    with contextlib.suppress(OSError):
        for path in HERE.glob("*.py"):
            with contextlib.suppress(OSError):
                yield path.stem, hashlib.sha256(path.read_bytes()).digest()


SOURCES = dict(_digests())  # when this module was imported


def source(name: str) -> bytes | None:
    "The source of k3lib.`name`; None if there is none, or if it has changed since `kernel_cache` was imported."
    try:
        text = (HERE / f"{name}.py").read_bytes()
    except OSError:
        return None
    return text if hashlib.sha256(text).digest() == SOURCES.get(name) else None


@functools.cache
def loaded_code(name: str) -> CodeType | None:
    "The code that Python has loaded for k3lib.`name` from a .pyc file, None without one. Called first at the import."
    path = str(HERE / f"{name}.py")
    if not os.path.exists(cache_from_source(path)):
        return None
    return SourceFileLoader(f"k3lib.{name}", path).get_code(f"k3lib.{name}")


def python_runs(name: str) -> bool:
    "False if the source of k3lib.`name` has changed since the import, or if Python has loaded code of another text."
    text, code = source(name), loaded_code(name)
    return text is not None and (code is None or code == compile(text, name, "exec", dont_inherit=True))


# %% tags=["export"]
@functools.cache
def inlined_sources(module: str) -> tuple[str, ...] | None:
    "k3lib.`module` and all modules it imports from k3lib, directly or not. None if one of their files has changed."
    names = [module]
    for name in names:  # the loop adds to this list
        if (text := source(name)) is None:
            return None
        loaded_code(name)
        imports = re.findall(rb"^\s*from k3lib\.(\w+) import", text, re.M)
        names += sorted({other.decode() for other in imports} - {*names})
    return tuple(names)


def source_digest(module: str) -> str | None:
    """Digest, in hexadecimal, of the source of k3lib.`module` and of all modules it imports from k3lib.

    None if one of these files has changed since `kernel_cache` was imported.
    """
    names, total = inlined_sources(module), hashlib.sha256()
    for name in names or ():
        total.update(name.encode() + SOURCES[name])
    return total.hexdigest() if names else None


# %%
assert source_digest("kernel_cache") != source_digest("mxfp4")
assert source_digest("no_such_module") is None


# %% [markdown]
# ## 1.2.4 Where entries lie
#
# If the variable `NUMBA_CACHE_DIR` is set, entries are written to that folder. Otherwise they are written to
# `k3lib/__pycache__`, beside Python's own compiled files. If the package is installed where nothing can be written,
# they go to the user's cache folder. The folders are chosen once, when this module is imported. So a relative name
# means a folder of the directory in which the process began, even if the process changes its directory later.
#
# In a container it is possible that none of these folders can be written, or that the user has no home folder. No home
# folder is made then. Every process compiles its kernels again, which takes a minute, and one line on stderr says so.
# To print this line must not fail either: a process may have no stderr, or a closed one, or one that cannot show the
# characters of a folder's name.

# %% tags=["export"]
@functools.cache
def cache_folders() -> tuple[Path, ...]:
    "Folders that may hold entries. All of them are searched; a new entry goes to the first that can be written."
    if numba.config.CACHE_DIR:
        return (_from_here(numba.config.CACHE_DIR),)
    home = os.path.expanduser("~") if os.environ.get("HOME") != "" else ""
    users = [os.environ.get("XDG_CACHE_HOME", ""), *[os.path.join(home, ".cache")] * os.path.isdir(home)]
    return HERE / "__pycache__", *(Path(folder) / "k3" for folder in users if os.path.isabs(folder))


def _from_here(folder):
    try:
        return Path(folder).absolute()
    except OSError:  # the current directory was removed
        return Path(folder)


cache_folders()  # now, not when the process has gone to another directory


@functools.cache
def _say_once(text):
    "Print a line to stderr. What cannot be printed is dropped, and nothing stays in a buffer to fail later."
    with contextlib.suppress(OSError, ValueError, AttributeError):
        try:
            descriptor = sys.stderr.fileno()
        except (OSError, ValueError):  # a notebook's
            print(text, file=sys.stderr)
        else:
            os.write(descriptor, f"{text}\n".encode(sys.stderr.encoding, "backslashreplace"))


_reasons: list[str] = []  # why no folder could be written, the first time


def say_uncached(reasons: list[str]) -> None:
    "Print one line to stderr: no folder can keep entries, for these `reasons`. It is printed once in a process."
    _reasons.extend([] if _reasons else reasons)
    _say_once("k3: kernels are compiled anew in every process, because no folder can keep them "
              f"({'; '.join(_reasons)}). Set NUMBA_CACHE_DIR to a folder that can be written.")


# %% [markdown]
# ## 1.2.5 An entry
#
# The name of an entry contains a digest of everything that decides the machine code: the sources, the name of the
# kernel, the signature, the CPU, the versions of numba, LLVM and Python, and numba's settings. If one of these differs,
# the name differs. So an entry is never wrong for its name, and two processes that write the same entry write
# equivalent contents.
#
# The file begins with the digest of its contents. If a full disk or a power cut has cut the file short, the digest does
# not fit. Then the kernel is compiled again, and the file is replaced. The same happens if the file cannot be read for
# another reason.

# %% tags=["export"]
def _contents(path):
    "What _write has written to `path`; None if there is no such file or it is damaged."
    with contextlib.suppress(OSError):
        if path.is_file():  # to open a pipe would wait for ever
            data = path.read_bytes()
            return data[32:] if hashlib.sha256(data[32:]).digest() == data[:32] else None
    return None


def _write(path, data):
    "Write `data`, whole or not at all. Raises OSError."
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_bytes(hashlib.sha256(data).digest() + data)
        with contextlib.suppress(OSError):  # an empty folder in the file's place
            path.rmdir()
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# %% [markdown]
# An entry is written to a temporary file, which is then renamed. So another process reads either a whole entry or none.
# Every edit of a source leads to new file names. To keep the folder small, the oldest entries of the same kernel are
# deleted.

# %% tags=["export"]
MAX_ENTRIES = 32  # of one kernel in one folder; the oldest are deleted


def _write_anywhere(name, data):
    "Write a file to the first folder that can be written, and return True. If none can, say so on stderr."
    reasons = []
    for folder in cache_folders():
        try:
            _write(folder / name, data)
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
            continue
        with contextlib.suppress(OSError):  # another process may delete the same files
            entries = sorted(folder.glob(f"{name.rpartition('-')[0]}-*"), key=os.path.getmtime)
            for old in entries[:-MAX_ENTRIES]:
                old.unlink(missing_ok=True)
        return True
    say_uncached(reasons)
    return False


# %% tags=["export"]
_NO_EFFECT = ("NUMBA_CACHE_DIR", "NUMBA_NUM_THREADS", "NUMBA_DEBUG_CACHE")  # settings that change no machine code


class KernelCache(NullCache):
    "Machine code of one kernel of k3lib on disk. Numba calls load_overload before it compiles, save_overload after."

    def __init__(self, function: Callable, digest: str):
        self._module = function.__module__.removeprefix("k3lib.")
        self.name = f"{self._module}.{function.__qualname__}"
        settings = sorted(f"{name}={value}" for name, value in os.environ.items()
                          if name.startswith("NUMBA_") and name not in _NO_EFFECT)
        self.made_by = digest, sys.version, numba.__version__, llvmlite.__version__, settings
        self.used: set[str | None] = set()  # names of entries loaded or written; None: something could not be kept

    def _file_name(self, signature, codegen):
        made_from = repr((self.made_by, self.name, str(signature), codegen.magic_tuple()))
        return f"{self.name}-{hashlib.sha256(made_from.encode()).hexdigest()[:24]}.kernel"

    def load_overload(self, sig: Any, target_context: Any) -> CompileResult | None:
        "The compiled kernel, or None if no folder holds a valid entry."
        target_context.refresh()
        name = self._file_name(sig, target_context.codegen())
        for folder in cache_folders():
            try:
                signature, payload = pickle.loads(_contents(folder / name) or b"")
                if signature == sig:
                    found = CompileResult._rebuild(target_context, *payload)
                    self.used.add(name)
                    return found
            except MemoryError:
                raise
            except Exception:  # no entry, or a damaged one, which may raise anything; numba then compiles
                continue
        return None


# %% tags=["export"]
class KernelCache(KernelCache):
    def save_overload(self, sig: Any, data: CompileResult) -> None:
        "Write the compiled kernel to the first folder that can be written. If none can, say so on stderr."
        name, kept = self._file_name(sig, data.codegen), False
        movable = not data.library.has_dynamic_globals  # the code contains no addresses of this process
        if movable and all(map(python_runs, inlined_sources(self._module) or ())):
            kept = _write_anywhere(name, dumps((sig, data._reduce())))
        self.used.add(name if kept else None)


# %% [markdown]
# ## 1.2.6 Two decorators
#
# `@kernel` compiles a function that Python calls. While it runs, other Python threads can run, too (`nogil`), because
# readers must go on reading while a kernel computes. It divides as NumPy does (`error_model`): division by zero gives
# an infinity and no exception.
#
# `@inner` compiles a function that only kernels call. Numba counts how many functions use an array: a function that
# receives an array adds 1 to the array's counter, and subtracts 1 at its end. Both are atomic steps on a counter that
# all threads share. A matrix that is multiplied four rows at a time would take six such steps every microsecond. But
# the caller keeps its arrays alive anyway. So an inner function does not count (`_nrt=False`).
#
# The machine code of a function in a notebook cell is never kept. Such a function can inline functions of other cells.
# Which versions of them it inlines depends on the order in which you ran the cells, and no file records that order.

# %% tags=["export"]
_F = TypeVar("_F", bound=Callable[..., Any])
_KERNEL = {"nogil": True, "error_model": "numpy"}
_INNER = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False}


_kernels: dict[str, Any] = {}  # {name: compiled function} of the functions of k3lib that Python calls


def _compiled(function, options):
    compiled = numba.njit(**options)(function)
    module = function.__module__
    if module.startswith("k3lib.") and function.__qualname__ == function.__name__ and is_jitted(compiled):
        if digest := source_digest(module.removeprefix("k3lib.")):
            compiled._cache = KernelCache(function, digest)
        if options is _KERNEL:
            _kernels[f"{module}.{function.__name__}"] = compiled
    return compiled


def kernel(function: _F) -> _F:
    "Compile a function that Python calls. It releases the GIL. Machine code of k3lib's functions is kept on disk."
    return _compiled(function, _KERNEL)


def inner(function: _F) -> _F:
    "Compile a function that only kernels call. It counts no references to arrays. Kept on disk like a `kernel`."
    return _compiled(function, _KERNEL | _INNER)


# %% [markdown]
# ## 1.2.7 Compile in another process
#
# To compile all kernels takes about a hundred megabytes of memory, and the process that has compiled does not give this
# memory back. A plan (5.18) could then not be kept. So a separate process compiles the kernels that are not on disk
# yet. Its memory is free when it ends, and the first process loads the entries.
#
# The separate process runs a program that calls every kernel with every signature. At its end it writes a *list*: the
# names of all entries that it has loaded or written. If all entries of the list are valid, a run compiles nothing. So
# the engine knows before the first kernel is called whether something must be compiled.

# %% tags=["export"]
_were_kept = False


def _list_name():
    "The name of the list: it holds a digest of everything that decides the names of the entries."
    made_by = sorted((name, getattr(compiled._cache, "made_by", None)) for name, compiled in _kernels.items())
    made_from = repr((made_by, cpu_target.target_context.codegen().magic_tuple()))
    return f"compiled-{hashlib.sha256(made_from.encode()).hexdigest()[:24]}.list"


def all_kept() -> bool:
    "Are valid entries of all kernels on disk, as the list names them? Once they were, the answer stays."
    global _were_kept
    if not _were_kept:
        folders, name = cache_folders(), _list_name()
        entries = next(filter(None, (_contents(folder / name) for folder in folders)), b"").decode().split()
        _were_kept = bool(entries) and all(any(_contents(folder / entry) for folder in folders) for entry in entries)
    return _were_kept


def write_list() -> None:
    """Write the list, after this process has used every kernel with every signature.

    A kernel that only other kernels have called is part of their entries. Raises RuntimeError if one could not be kept.
    """
    used = {name: [*getattr(compiled._cache, "used", [None])] for name, compiled in _kernels.items()}
    if unkept := [name for name, entries in used.items() if None in entries]:
        raise RuntimeError(f"{', '.join(unkept)}: the machine code could not be kept")
    _write_anywhere(_list_name(), "\n".join(sorted(sum(used.values(), []))).encode())


def compile_for(name: str, *args: Any) -> None:
    "Compile the kernel `name` of k3lib ('matmul.dot') for the types of `args`, without a call."
    _kernels[f"k3lib.{name}"].compile(tuple(map(numba.typeof, args)))


# %% [markdown]
# The separate process needs a folder that can be written and has room for all entries, and a folder for the files of
# its program. It cannot be started if Python is embedded in another program, or if this process may not start others.
# Then the kernels are compiled in the process that uses them, and the plan has a part for it. A failure is remembered,
# so that the engine does not try again.

# %% tags=["export"]
ENTRIES_BYTES = 8_000_000  # more than all entries take
_apart_failed = False


# %% tags=["export"]
def _folder_to_compile_in():
    "A cache folder that can be written; None if there is none, or if no other process can compile."
    if _apart_failed or not re.match(r"(python|pypy)", os.path.basename(sys.executable or ""), re.I):
        return None
    for folder in cache_folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
            return folder if shutil.disk_usage(folder).free >= ENTRIES_BYTES else None
    return None


def compiles_here(apart: bool) -> bool:
    "Will this process compile kernels? Not if all are kept or compiled, nor, if `apart`, where another process can."
    if all(compiled.signatures for compiled in _kernels.values()) or all_kept():
        return False
    return not apart or _folder_to_compile_in() is None


# %% [markdown]
# The separate process searches for modules in the same folders as this one. Its output is discarded. If it fails for
# any reason, this process compiles the kernels itself when it first calls them.

# %% tags=["export"]
def compile_apart(program: str, say: Callable[[str], object] | None = None) -> bool:
    """Unless all kernels are kept, let a new process run `program`, which compiles them and ends with write_list().

    `program` is Python that imports from k3lib. It finds a folder for its files in sys.argv[1]. `say` is called with a
    line before and one after; None is standard error, if that is a terminal. Returns whether a process was started;
    all_kept() tells whether it has succeeded.
    """
    global _apart_failed
    if all_kept() or (folder := _folder_to_compile_in()) is None:
        return False
    import subprocess  # here, because it takes memory and only a first run needs it

    say, began = say or _say_on_terminal, time.perf_counter()
    say("compiling the kernels, once for this installation and this CPU: this takes 10 to 30 s")
    code = f"import sys; sys.path[:] = {ascii([path for path in sys.path if isinstance(path, str)])}\n{program}"
    with contextlib.suppress(OSError), _temporary_folder(folder) as scratch:
        subprocess.run([sys.executable, "-c", code, scratch], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)
    _apart_failed = not all_kept()
    say("the kernels could not be compiled in a process of their own: this one compiles them when it needs them"
        if _apart_failed else f"compiled in {time.perf_counter() - began:.1f} s")
    return True


def _say_on_terminal(text):
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if sys.stderr.isatty():
            _say_once(f"k3: {text}")


def _temporary_folder(other):
    "A temporary folder where the system wants such folders to be, or else in the folder `other`."
    try:
        return tempfile.TemporaryDirectory(prefix="k3-", ignore_cleanup_errors=True)
    except OSError:
        return tempfile.TemporaryDirectory(prefix="k3-", dir=other, ignore_cleanup_errors=True)


# %% [markdown]
# ## 1.2.8 Check: every edit is seen
#
# The experiment of [1.2.2] is repeated with the cache of this chapter. The two modules are now part of a small `k3lib`,
# which contains this chapter's module and nothing else of the book. `leaf` is unchanged, then edited, then restored.
#
# [1.2.2]: #1.2.2-A-stale-entry

# %%
LEAF = "from k3lib.kernel_cache import inner\n\n\n@inner\ndef leaf(x):\n    return x + 1\n"
ROOT = """from k3lib.kernel_cache import kernel
from k3lib.leaf import leaf


@kernel
def root(x):
    return 10 * leaf(x)
"""
CALL = "from k3lib.root import root; r = root(1); print(r, 'compiled' if root.stats.cache_misses else 'kept')"


def small_package(folder):
    "A k3lib of three modules in the folder."
    (folder / "k3lib").mkdir()
    (folder / "k3lib" / "__init__.py").write_text("")
    (folder / "k3lib" / "kernel_cache.py").write_bytes((HERE / "kernel_cache.py").read_bytes())
    (folder / "k3lib" / "leaf.py").write_text(LEAF)
    (folder / "k3lib" / "root.py").write_text(ROOT)


with tempfile.TemporaryDirectory() as name:
    folder, answers = Path(name), []
    small_package(folder)
    for text in (LEAF, LEAF, LEAF.replace("+ 1", "+ 100"), LEAF):
        (folder / "k3lib" / "leaf.py").write_text(text)
        answers.append(run(folder, CALL))
answers

# %% [markdown]
# The first process compiles. The second one finds the entry. After the edit the kernel is compiled again, and the
# answer is right. With the first text restored, the first entry is found again.

# %%
assert answers == ["20 compiled", "20 kept", "1010 compiled", "20 kept"]  # claim seen

# %% [markdown]
# Next, the entries are damaged in two ways: they are cut short, and they are overwritten. At last a file takes the
# place of the cache folder. Each answer must still be 20.

# %%
with tempfile.TemporaryDirectory() as name:
    folder, answers = Path(name), []
    small_package(folder)
    run(folder, CALL)
    for damage in (lambda data: data[:100], lambda data: b"\0" * len(data)):
        for entry in (folder / "cache").glob("*.kernel"):
            entry.write_bytes(damage(entry.read_bytes()))
        answers += [run(folder, CALL), run(folder, CALL)]
    for entry in (folder / "cache").iterdir():
        entry.unlink()
    (folder / "cache").rmdir()
    (folder / "cache").write_text("a file where the folder should be")
    said, answer = run(folder, CALL, errors=subprocess.STDOUT).splitlines()
assert answers == ["20 compiled", "20 kept", "20 compiled", "20 kept"] and answer == "20 compiled"
print(*answers, answer, sep=", ")
print(said.replace(name, "..."))

# %% [markdown]
# ## Summary
#
# - Machine code may be used if all sources that it was made from are unchanged, also those of inlined functions.
# - The name of an entry contains a digest of everything that decides the machine code. So an entry cannot be out of
#   date for its name, and two processes that write it do not disagree.
# - A damaged or missing cache costs time and causes no error, because every entry can be made again.
# - A separate process compiles, so that the memory for compiling is free again when the process ends.
#
# ## Exercise
#
# Answer: [exercises of part 1](../answers/01_mxfp4.ipynb).
#
# 1. Numba copies the values of global variables into a kernel when it compiles the kernel. Why does the digest of this
#    chapter see a change of `TILE = 8`, and why does it not see a change of `TILE = int(os.environ["TILE"])`?
#
# Next: [1.3](03_simd.ipynb) makes sixteen float32 lanes one value of the language, for sums with the same bits on any
# CPU.
