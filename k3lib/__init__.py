"""Kimi K3 under a RAM budget: the package made from the book's chapters. See `k3lib.load`, or run `k3 --help`."""
_HOME = {"load": "engine", "Report": "engine", "Plan": "plan", "Checkpoint": "checkpoint", "Tokenizer": "tokenizer"}
__all__ = sorted(_HOME)


def __getattr__(name):  # PEP 562: importing k3lib must not cost the import of numba and tokenizers
    if name in _HOME:
        import importlib
        return getattr(importlib.import_module(f"k3lib.{_HOME[name]}"), name)
    raise AttributeError(f"module 'k3lib' has no attribute {name!r}")
