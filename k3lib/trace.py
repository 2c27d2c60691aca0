"""5.14 Which experts a run requested

Made from book/05_streaming/14_trace.py: edit that, then run `make export`.
"""

from os import PathLike
from pathlib import Path

import numpy as np

from k3lib.fileio import MissingFile, UsageError


Pass = list[tuple[int, list[int]]]  # (layer, experts) for each MoE layer, in the order of the requests

MAX_EXPERTS = 1 << 16  # the most that a layer may have; a larger number of an expert is damage
MAX_TRACE_BYTES = 1 << 28  # of a file that is read whole: as Python's lists it takes fifteen times the memory


class TraceError(UsageError):
    "A trace that cannot be replayed. One line: the file, the place, what was found, what was expected."


def packed_trace(requests: list[tuple[int, int]]) -> bytes:
    "The bytes of a trace file for `requests`, (layer, expert) pairs in order: two little-endian uint32 each."
    return np.array(requests, "<u4").reshape(-1, 2).tobytes()


def read_trace(path: str | PathLike) -> list[Pass]:
    """The passes of a trace file, each a list of (layer, experts), in the order of the requests.

    Raises MissingFile if there is no such file. Raises TraceError if the file ends too early or is too long, if an
    expert's number is too large, or if a pass has other layers than the first.
    """
    if not Path(path).is_file():
        raise MissingFile(f"{path}: {'is a folder' if Path(path).is_dir() else 'no such file'}")
    if (size := Path(path).stat().st_size) > MAX_TRACE_BYTES:
        raise TraceError(f"{path}: {size:,} bytes, expected {MAX_TRACE_BYTES:,} at most: replay the first passes alone")
    data = Path(path).read_bytes()
    if not data or len(data) % 8:
        raise TraceError(f"{path}: ends at byte {len(data)}, but a trace is whole requests of 8 bytes, at least one")
    layers, experts = np.frombuffer(data, "<u4").reshape(-1, 2).T.astype(np.int64)
    largest = int(experts.argmax())
    if experts[largest] >= MAX_EXPERTS:
        raise TraceError(f"{path}: request {largest}, at byte {8 * largest}, is for expert {experts[largest]}: "
                         f"no layer has more than {MAX_EXPERTS} experts")
    ends = [*(np.flatnonzero(np.diff(layers)) + 1).tolist(), len(layers)]
    groups = [(begin, int(layers[begin]), experts[begin:end].tolist()) for begin, end in zip([0, *ends], ends)]
    return _passes(path, groups, len(data))


def _passes(path, groups, nbytes):
    "Divide `groups`, (number of its first request, layer, experts) each, into passes. Raises TraceError."
    n = next((i for i in range(1, len(groups)) if groups[i][1] < groups[i - 1][1]), len(groups))  # layers of a pass
    if n == 1:
        raise TraceError(f"{path}: every request is for layer {groups[0][1]}, "
                         "but only two layers or more show where a pass ends")
    for i, (begin, layer, _) in enumerate(groups):
        if layer != groups[i % n][1]:
            raise TraceError(f"{path}: request {begin}, at byte {8 * begin}, is for layer {layer}: "
                             f"layer {groups[i % n][1]} is next, as in the first pass")
    if len(groups) % n:
        raise TraceError(f"{path}: ends at byte {nbytes}, inside a pass: layer {groups[len(groups) % n][1]} is next")
    return [[(layer, chosen) for _, layer, chosen in groups[i:i + n]] for i in range(0, len(groups), n)]


def steps_of(passes: list[Pass]) -> tuple[list[Pass], int]:
    """What a cache is asked for: (steps, number of passes that repeat the one before).

    A step is a list of (layer, its experts, each once, ascending). A pass repeats the one before if in every layer it
    begins with all of that pass's requests and then has more. Only the new requests of such a pass are in the step.
    """
    steps, repeated = [], 0
    for before, now in zip([[], *passes], passes):
        repeats = before != [] and all(len(b) > len(a) and b[:len(a)] == a for (_, a), (_, b) in zip(before, now))
        skipped = [len(chosen) for _, chosen in before] if repeats else [0] * len(now)
        steps.append([(layer, sorted(set(chosen[skip:]))) for (layer, chosen), skip in zip(now, skipped)])
        repeated += repeats
    return steps, repeated


__all__ = [
    "Pass", "MAX_EXPERTS", "MAX_TRACE_BYTES", "TraceError", "packed_trace", "read_trace", "steps_of",
]
