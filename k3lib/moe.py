"""4.2 Latent experts: sixteen in half the width, two that always speak

Made from book/04_moe_router/02_moe.py: edit that, then run `make export`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from k3lib.functions import rms_norm, sigmoid, tanh
from k3lib.kda import LayerWeights
from k3lib.kernel_cache import kernel
from k3lib.matmul import Matrix, NotFinite, PackedMatrix, check_product, linear
from k3lib.router import route
from k3lib.simd import fma

_ZERO = np.float32(0)


class Situ(NamedTuple):
    "The two ceilings of the activation. They are the same in all layers of a model."

    beta: float  # of the gate side, the config's activation_situ_beta: 4
    linear_beta: float  # of the up side, activation_situ_linear_beta: 25


@kernel
def _situ_glu(gate, up, beta, linear_beta, out):
    "SiTU of float32 [n]; `out` may be `gate` or `up`, which is slower."
    for i in range(out.size):
        g = gate[i]
        out[i] = beta * tanh(g / beta) * sigmoid(g) * (linear_beta * tanh(up[i] / linear_beta))


def situ_glu(gate: np.ndarray, up: np.ndarray, situ: Situ, out: np.ndarray | None = None) -> np.ndarray:
    """beta tanh(gate / beta) * sigmoid(gate) * linear_beta tanh(up / linear_beta), float32 [...].

    `gate` and `up`: float32 [...]. The sigmoid sees the uncapped gate. The result is written to `out` (C order) if it
    is given. Raises ValueError where shapes do not fit.
    """
    if out is None:
        out = np.empty(gate.shape, np.float32)
    if gate.shape != up.shape or out.shape != gate.shape or not out.flags.c_contiguous:
        raise ValueError(f"situ_glu: gate {gate.shape}, up {up.shape} and out {out.shape} (contiguous) do not fit")
    beta, linear_beta = map(np.float32, situ)
    _situ_glu(gate.reshape(-1), up.reshape(-1), beta, linear_beta, out.reshape(-1))
    return out


def dense_mlp(W: LayerWeights, x: np.ndarray, situ: Situ, threads: int, prefix: str = "") -> np.ndarray:
    """down SiTU(gate x, up x), float32 [T, H], for `x` float32 [T, H].

    Takes W[prefix + name] once for gate_proj, up_proj and down_proj, in that order. Any number of `threads` gives the
    same bits. Raises ValueError where shapes do not fit, NotFinite where a product is infinite or NaN.
    """
    gate, up = linear(W[prefix + "gate_proj"], x, threads), linear(W[prefix + "up_proj"], x, threads)
    return linear(W[prefix + "down_proj"], situ_glu(gate, up, situ), threads)


class Expert(NamedTuple):
    "One routed expert of width I in a latent of width L."

    w1: Matrix  # gate [I, L]
    w2: Matrix  # down [L, I]
    w3: Matrix  # up [I, L]

    @classmethod
    def packed(cls, arrays: Sequence[Any]) -> "Expert":
        "An Expert from six arrays or extents, in file order: packed weights and scales of w1, of w2, of w3."
        return cls(*(PackedMatrix(*arrays[i:i + 2]) for i in (0, 2, 4)))


def expert_mlp(expert: Expert, z: np.ndarray, situ: Situ, out: np.ndarray) -> np.ndarray:
    """out = w2 SiTU(w1 z, w3 z), float32 [m, L], for `z` float32 [m, L], on the calling thread.

    Raises NotFinite, whose .matrix is "w1", "w2" or "w3", where a product is infinite or NaN.
    """
    gate, up, hidden = np.empty((3, len(z), expert.w1.shape[0]), np.float32)
    expert.w1.multiply(z, gate, 1)
    check_product(gate, z, matrix="w1")  # before SiTU, because the tanh of infinity is an ordinary 1
    expert.w3.multiply(z, up, 1)
    check_product(up, z, matrix="w3")
    situ_glu(gate, up, situ, hidden)
    expert.w2.multiply(hidden, out, 1)
    check_product(out, hidden, matrix="w2")
    return out


class LayerExperts(Protocol):
    "The routed experts of one layer."

    def request(self, ids: list[int]) -> None:
        "Announce the experts of the next map(): each id once, in rising order. Reading may begin now."

    def map(self, work: Callable[[int, Expert], None], threads: int) -> None:
        "Call work(id, expert) once for each requested expert, in any order, on at most `threads` threads at once."


@kernel
def _weighted_sum(rows, place, weights, out):
    "out[t] = sum over ranks r of weights[t, r] * rows[place[t, r]], in rank order."
    for t in range(out.shape[0]):
        for i in range(out.shape[1]):
            out[t, i] = _ZERO
        for r in range(place.shape[1]):
            w, row = weights[t, r], rows[place[t, r]]
            for i in range(out.shape[1]):
                out[t, i] = fma(w, row[i], out[t, i])


def routed_sum(experts: LayerExperts, z: np.ndarray, ids: np.ndarray, weights: np.ndarray, situ: Situ,
               threads: int) -> np.ndarray:
    """u[t] = sum over ranks r of weights[t, r] * (expert ids[t, r] of z[t]), float32 [T, L], in rank order.

    `z` float32 [T, L]; `ids` int32 [T, k], already requested; `weights` float32 [T, k]. The order in which experts.map
    brings the experts does not change a bit. Raises RuntimeError if it brings an expert that was not chosen, brings one
    twice or leaves one out; NotFinite, whose .matrix is (expert id, "w1", "w2" or "w3"), where a product is not finite.
    """
    T, k = ids.shape
    pairs = np.argsort(ids, axis=None, kind="stable")  # (token, rank) pairs, those of one expert side by side
    place = np.empty(T * k, np.int64)
    place[pairs] = np.arange(T * k)
    chosen, counts = np.unique(ids, return_counts=True)
    rows_of = {int(e): slice(end - n, end) for e, n, end in zip(chosen, counts, np.cumsum(counts))}  # yet to compute
    rows = np.empty((T * k, z.shape[1]), np.float32)

    def work(e, expert):
        if e not in rows_of:
            raise RuntimeError(f"expert {e} arrived, expected one of {sorted(rows_of)}, each once")
        mine = rows_of.pop(e)
        try:
            expert_mlp(expert, z[pairs[mine] // k], situ, rows[mine])
        except NotFinite as error:
            error.matrix = e, error.matrix
            raise

    experts.map(work, threads)
    if rows_of:
        raise RuntimeError(f"experts {sorted(rows_of)} were requested and did not arrive")
    u = np.empty_like(z)
    _weighted_sum(rows, place.reshape(T, k), weights, u)
    return u


class MoEShape(NamedTuple):
    "Sizes and constants of an MoE layer, the same in all MoE layers of a model."

    top_k: int  # experts a token chooses, the config's num_experts_per_token: 16
    scale: float  # routed_scaling_factor: 1
    situ: Situ
    eps: float  # of the norm on the sum of the experts, rms_norm_eps: 1e-5


def moe_layer(W: LayerWeights, experts: LayerExperts, x: np.ndarray, shape: MoEShape, threads: int,
              on_route: Callable[[np.ndarray, np.ndarray], None] | None = None) -> np.ndarray:
    """The feed-forward part of one layer, latent experts plus the shared path, float32 [T, H].

    `x` float32 [T, H] is the normed input. `W` has the short names that `tensors` lists for "moe"; each is taken once,
    in that order. `experts` are requested as soon as they are known; on_route(ids, weights) is then called with the
    routing, int32 and float32 [T, top_k]. The bits depend neither on how the tokens are cut into calls nor on
    `threads` nor on the order of the experts. Raises ValueError where shapes do not fit, NotFinite where a number is
    infinite or NaN.
    """
    ids, weights = route(linear(W["gate"], x, threads), W["e_score_correction_bias"], shape.top_k, shape.scale)
    experts.request(np.unique(ids).tolist())
    if on_route is not None:
        on_route(ids, weights)
    z = linear(W["routed_expert_down_proj"], x, threads)
    shared = dense_mlp(W, x, shape.situ, threads, "shared_experts.")
    u = routed_sum(experts, z, ids, weights, shape.situ, threads)
    normed = rms_norm(u, W["routed_expert_norm"], shape.eps)
    return linear(W["routed_expert_up_proj"], normed, threads) + shared


__all__ = [
    "Situ", "situ_glu", "dense_mlp", "Expert", "expert_mlp", "LayerExperts", "routed_sum", "MoEShape", "moe_layer",
]
