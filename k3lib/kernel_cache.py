"""1.2 Kernels: compiled once, never stale

Made from book/01_mxfp4/02_kernel_cache.py: edit that, then run `make export`.
"""

import contextlib
import functools
import hashlib
import os
import pickle
import re
import sys
import uuid
from collections.abc import Callable, Iterator
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
from numba.core.serialize import dumps
from numba.extending import is_jitted


SOURCES = {path.name[:-3]: hashlib.sha256(path.read_bytes()).digest()
           for path in files("k3lib").iterdir() if path.name.endswith(".py")}  # digests when this module was imported


def source(name: str) -> bytes | None:
    "The source of k3lib.`name`; None if there is none, or if it has changed since `kernel_cache` was imported."
    path = files("k3lib") / f"{name}.py"
    text = path.read_bytes() if path.is_file() else b""
    return text if hashlib.sha256(text).digest() == SOURCES.get(name) else None


@functools.cache
def loaded_code(name: str) -> CodeType | None:
    "The code that Python has loaded for k3lib.`name` from a .pyc file, None without one. Called first at the import."
    path = str(files("k3lib") / f"{name}.py")
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


def cache_folders() -> Iterator[Path]:
    "Folders that may hold entries. All of them are searched; a new entry goes to the first that can be written."
    if numba.config.CACHE_DIR:
        yield Path(numba.config.CACHE_DIR)
        return
    yield Path(str(files("k3lib"))) / "__pycache__"
    for folder in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if os.path.isabs(folder):
            yield Path(folder) / "k3"


@functools.cache
def say_uncached(reasons: str) -> None:
    "Print one line to stderr: no folder can keep entries, for these `reasons`. The same reasons are printed once."
    print(f"k3: kernels are compiled anew in every process, because no folder can keep them ({reasons}). "
          "Set NUMBA_CACHE_DIR to a folder that can be written.", file=sys.stderr)


MAX_ENTRIES = 32  # of one kernel in one folder; the oldest are deleted
_NO_EFFECT = ("NUMBA_CACHE_DIR", "NUMBA_NUM_THREADS", "NUMBA_DEBUG_CACHE")  # settings that change no machine code


class KernelCache(NullCache):
    "Machine code of one kernel of k3lib on disk. Numba calls load_overload before it compiles, save_overload after."

    def __init__(self, function: Callable, digest: str):
        self._module = function.__module__.removeprefix("k3lib.")
        self._name = f"{self._module}.{function.__qualname__}"
        settings = sorted(f"{name}={value}" for name, value in os.environ.items()
                          if name.startswith("NUMBA_") and name not in _NO_EFFECT)
        self._made_by = digest, sys.version, numba.__version__, llvmlite.__version__, settings

    def _file_name(self, signature, codegen):
        made_from = repr((self._made_by, self._name, str(signature), codegen.magic_tuple()))
        return f"{self._name}-{hashlib.sha256(made_from.encode()).hexdigest()[:24]}.kernel"

    def load_overload(self, sig: Any, target_context: Any) -> CompileResult | None:
        "The compiled kernel, or None if no folder holds a valid entry."
        target_context.refresh()
        name = self._file_name(sig, target_context.codegen())
        for folder in cache_folders():
            try:
                data = (folder / name).read_bytes()
                if hashlib.sha256(data[32:]).digest() == data[:32]:
                    signature, payload = pickle.loads(data[32:])
                    if signature == sig:
                        return CompileResult._rebuild(target_context, *payload)
            except Exception:  # no entry, or a damaged one, which may raise anything; numba then compiles
                continue
        return None

    def save_overload(self, sig: Any, data: CompileResult) -> None:
        "Write the compiled kernel to the first folder that can be written. If none can, say so on stderr."
        if data.library.has_dynamic_globals:  # the code contains addresses of this process
            return
        if not all(map(python_runs, inlined_sources(self._module) or ())):
            return
        payload = dumps((sig, data._reduce()))
        name, reasons = self._file_name(sig, data.codegen), []
        for folder in cache_folders():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._write(folder / name, hashlib.sha256(payload).digest() + payload)
                return
            except OSError as error:
                reasons.append(f"{folder}: {error.strerror}")
        say_uncached("; ".join(reasons))

    def _write(self, path, data):
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        try:
            temporary.write_bytes(data)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another process may delete the same files
            entries = sorted(path.parent.glob(f"{self._name}-*.kernel"), key=os.path.getmtime)
            for old in entries[:-MAX_ENTRIES]:
                old.unlink(missing_ok=True)


_F = TypeVar("_F", bound=Callable[..., Any])
_KERNEL = {"nogil": True, "error_model": "numpy"}
_INNER = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False}


def _compiled(function, options):
    compiled = numba.njit(**options)(function)
    module = function.__module__
    if module.startswith("k3lib.") and function.__qualname__ == function.__name__ and is_jitted(compiled):
        if digest := source_digest(module.removeprefix("k3lib.")):
            compiled._cache = KernelCache(function, digest)
    return compiled


def kernel(function: _F) -> _F:
    "Compile a function that Python calls. It releases the GIL. Machine code of k3lib's functions is kept on disk."
    return _compiled(function, _KERNEL)


def inner(function: _F) -> _F:
    "Compile a function that only kernels call. It counts no references to arrays. Kept on disk like a `kernel`."
    return _compiled(function, _KERNEL | _INNER)


__all__ = [
    "SOURCES", "source", "loaded_code", "python_runs", "inlined_sources", "source_digest", "cache_folders",
    "say_uncached", "MAX_ENTRIES", "KernelCache", "kernel", "inner",
]
