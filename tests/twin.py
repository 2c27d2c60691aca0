"Numbers with all bits in use, and the product in NumPy whose bits the kernels owe: for the tests of kernels."
import numpy as np


def numbers(shape, seed=0):
    "float32 with all 24 bits in use."
    return (np.random.default_rng(seed).integers(-2**24, 2**24, shape) / 2**21).astype(np.float32)


def fma_twin(a, b, c):
    """float32 a*b + c rounded once.

    The product is exact in float64, and the sum is rounded to odd before it is rounded to float32.
    """
    p, c = a.astype(np.float64) * b, c.astype(np.float64)
    s = p + c
    z = s - p
    lost = (p - (s - z)) + (c - z)
    away = np.where((lost > 0) == (s > 0), 1, -1)
    bits = s.view(np.int64)
    bits += np.where((lost != 0) & (bits % 2 == 0), away, 0)
    return bits.view(np.float64).astype(np.float32)


def twin(a, b, lanes=16, fma=fma_twin):
    "The bits owed for a . b along the last axis: element m in lane m % 16, lanes added by halves."
    pad = [(0, 0)] * (np.ndim(a) - 1) + [(0, -a.shape[-1] % lanes)]
    a, b = np.pad(a, pad), np.pad(b, pad)
    acc = np.zeros((*np.broadcast_shapes(a.shape, b.shape)[:-1], lanes), np.float32)
    for m in range(0, a.shape[-1], lanes):
        acc = fma(a[..., m:m + lanes], b[..., m:m + lanes], acc)
    while acc.shape[-1] > 1:
        half = acc.shape[-1] // 2
        acc = acc[..., :half] + acc[..., half:]
    return acc[..., 0]


def case(n, k, tokens):
    "A bf16 matrix, tokens and a norm's weight from whole numbers alone: every machine starts from the same bytes."
    i = np.arange(n * k + tokens * k + k, dtype=np.int64) * 2654435761 % 33554393 - 16777196
    every = (i / 2**21).astype(np.float32)
    return ((every[:n * k].view(np.uint32) >> np.uint32(16)).astype(np.uint16).reshape(n, k),
            every[n * k:n * k + tokens * k].reshape(tokens, k), every[n * k + tokens * k:])
