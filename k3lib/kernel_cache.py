"""1.2 Kernels: compiled once, never stale

Made from book/01_mxfp4/02_kernel_cache.py: edit that, then run `make export`.
"""

import contextlib
import functools
import hashlib
import os
import pickle
import re
import shutil
import sys
import tempfile
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

    def save_overload(self, sig: Any, data: CompileResult) -> None:
        "Write the compiled kernel to the first folder that can be written. If none can, say so on stderr."
        name, kept = self._file_name(sig, data.codegen), False
        movable = not data.library.has_dynamic_globals  # the code contains no addresses of this process
        if movable and all(map(python_runs, inlined_sources(self._module) or ())):
            kept = _write_anywhere(name, dumps((sig, data._reduce())))
        self.used.add(name if kept else None)


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


ENTRIES_BYTES = 8_000_000  # more than all entries take
_apart_failed = False


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


def compile_apart(program: str) -> bool:
    """Unless all kernels are kept, let a new process run `program`, which compiles them and ends with write_list().

    `program` is Python that imports from k3lib. It finds a folder for its files in sys.argv[1]. Returns whether a
    process was started; all_kept() tells whether it has succeeded.
    """
    global _apart_failed
    if all_kept() or (folder := _folder_to_compile_in()) is None:
        return False
    import subprocess  # here, because it takes memory and only a first run needs it

    with contextlib.suppress(OSError, ValueError, AttributeError):
        if sys.stderr.isatty():
            _say_once("k3: compiling all kernels, once for this installation and this CPU")
    code = f"import sys; sys.path[:] = {ascii([path for path in sys.path if isinstance(path, str)])}\n{program}"
    with contextlib.suppress(OSError), _temporary_folder(folder) as scratch:
        subprocess.run([sys.executable, "-c", code, scratch], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)
    _apart_failed = not all_kept()
    return True


def _temporary_folder(other):
    "A temporary folder where the system wants such folders to be, or else in the folder `other`."
    try:
        return tempfile.TemporaryDirectory(prefix="k3-", ignore_cleanup_errors=True)
    except OSError:
        return tempfile.TemporaryDirectory(prefix="k3-", dir=other, ignore_cleanup_errors=True)


__all__ = [
    "HERE", "SOURCES", "source", "loaded_code", "python_runs", "inlined_sources", "source_digest", "cache_folders",
    "say_uncached", "MAX_ENTRIES", "KernelCache", "kernel", "inner", "all_kept", "write_list", "compile_for",
    "ENTRIES_BYTES", "compiles_here", "compile_apart",
]
