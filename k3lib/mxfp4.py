"""1.1 Four bits a weight

Made from book/01_mxfp4/01_mxfp4.py: edit that, then run `make export`.
"""

import numpy as np


E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # value of each code
SCALE = np.array([1 << 22, *(e << 23 for e in range(1, 255)), 0x7fc00000], np.uint32).view(np.float32)  # of each byte
GROUP = 32  # elements that share one scale byte


def decode(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Weights float32 [..., k] from `packed` uint8 [..., k/2], low nibble first, and `scale` uint8 [..., k/32].

    OCP Microscaling v1.0: value = E2M1[nibble] * 2^(scale - 127); scale byte 255 is NaN.
    """
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    return E2M1[codes] * np.repeat(SCALE[scale], GROUP, -1)


__all__ = [
    "E2M1", "SCALE", "GROUP", "decode",
]
