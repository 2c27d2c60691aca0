"""Kimi K3 under a RAM budget: the package made from the book's chapters. See `k3lib.load`, or run `k3 --help`.

The names in `__all__` are the public surface. Importing k3lib imports none of its modules: a name's module is
imported when the name is first used.
"""

import sys

TYPE_CHECKING = False  # True to a type checker; importing it from typing takes longer than everything else here

__version__ = "0.2.0"
__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "EngineError",
    "K3Error",
    "MissingFile",
    "PlanError",
    "Report",
    "StateError",
    "Tokenizer",
    "TokenizerError",
    "UsageError",
    "load",
]

if TYPE_CHECKING:
    from k3lib.checkpoint import Checkpoint
    from k3lib.config import ConfigError
    from k3lib.engine import EngineError, load
    from k3lib.fileio import CheckpointError, K3Error, MissingFile, UsageError
    from k3lib.plan import PlanError
    from k3lib.report import Report
    from k3lib.state import StateError
    from k3lib.tokenizer import Tokenizer, TokenizerError

if sys.byteorder != "little" or sys.maxsize < 2**32:
    raise ImportError(
        f"k3lib needs a 64-bit little-endian Python, because weights are used as they lie in the files; "
        f"this one is {sys.byteorder}-endian with {sys.maxsize.bit_length() + 1} bits"
    )

_HOME = {
    "load": "engine",
    "EngineError": "engine",
    "Report": "report",
    "Checkpoint": "checkpoint",
    "Tokenizer": "tokenizer",
    "CheckpointError": "fileio",
    "K3Error": "fileio",
    "MissingFile": "fileio",
    "UsageError": "fileio",
    "ConfigError": "config",
    "PlanError": "plan",
    "StateError": "state",
    "TokenizerError": "tokenizer",
}


def __getattr__(name: str) -> object:  # PEP 562: importing k3lib must not cost the import of numba and tokenizers
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(f"k3lib.{_HOME[name]}"), name)
    raise AttributeError(f"module 'k3lib' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
