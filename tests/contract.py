"""The digests of the floating-point contract, computed by one process for the CPU that numba was told to compile for.

    NUMBA_CPU_NAME=generic python tests/contract.py test_mla test_residual model

Each name is a test module with a function `contract()`, or `model`: the whole model. Prints one JSON object for each number of threads, a
dictionary {name: {what: digest}}. numba fixes the CPU when it starts, so test_contract.py starts one process for each CPU.
"""
import importlib
import json
import sys

import numpy as np
from common import MODEL, digest

import k3lib

IDS = [304, 206, 32, 407, 493, 375, 224, 286, 48, 367]


def model(threads):
    "Digests of the logits of IDS, for every way to cut the prompt: they are all one."
    found, loaded = {}, k3lib.load(MODEL, threads=threads)
    for chunk in (1, 2, 3, 7, 10):
        loaded.reset()
        loaded.chunk = chunk
        found[f"chunks of {chunk}"] = digest(loaded.forward(IDS))
    loaded.reset()
    first = loaded.forward(IDS[:4])
    found["4, then steps"] = digest(np.concatenate([first] + [loaded.step(i)[None] for i in IDS[4:]]))
    rows = []
    for n in range(1, len(IDS) + 1):
        loaded.reset()
        rows.append(loaded.prefill(IDS[:n]))
    found["each prefix anew"] = digest(np.stack(rows))
    loaded.close()
    return found


def main(names):
    import numba

    from k3lib import parallel
    parallel.MIN_PARALLEL_MACS = 0  # all threads work, however little there is to do
    for threads in 1, 2:
        numba.set_num_threads(threads)
        found = {name: model(threads) if name == "model" else importlib.import_module(name).contract() for name in names}
        print(json.dumps({"threads": threads, "found": found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
