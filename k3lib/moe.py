"""4.2 Latent experts: sixteen in half the width, two that always speak

Made from book/04_moe_router/02_moe.py: edit that, then run `make export`.
"""

# built on mxfp4 ada01661af2a
# built on simd 82ba8ef1cec4
# built on matmul da409453befe
# built on functions 81a78568089f
# built on router 829dc8f4bf95
from typing import NamedTuple
import numpy as np
from numba import get_num_threads, njit
from k3lib.mxfp4 import GROUP
from k3lib.simd import KERNEL, fma
from k3lib.matmul import NotFinite, check_fit, check_product, deinterleaved, linear, mxfp4_rows
from k3lib.functions import rms_norm, sigmoid, tanh
from k3lib.router import route


_ZERO = np.float32(0)


@njit(**KERNEL)
def _situ_glu(gate, up, beta, linear_beta, out):
    for i in range(out.size):
        g = gate[i]
        out[i] = beta * tanh(g / beta) * sigmoid(g) * (linear_beta * tanh(up[i] / linear_beta))


def situ_glu(gate, up, beta, linear_beta, out=None):
    "beta tanh(gate/beta) * sigmoid(gate) * linear_beta tanh(up/linear_beta), float32 [...]; the sigmoid sees the uncapped gate."
    if out is None:
        out = np.empty(gate.shape, np.float32)
    if gate.shape != up.shape or out.shape != gate.shape or not out.flags.c_contiguous:
        raise ValueError(f"situ_glu: gate {gate.shape}, up {up.shape} and out {out.shape} (contiguous) do not fit")
    _situ_glu(gate.reshape(-1), up.reshape(-1), np.float32(beta), np.float32(linear_beta), out.reshape(-1))
    return out


DENSE_ORDER = ("gate_proj", "up_proj", "down_proj")


def dense_mlp(W, x, beta, linear_beta, prefix=""):
    "down SiTU(gate x, up x), float32 [T, H]. Takes W[prefix + name] once for each name of DENSE_ORDER, in that order."
    gate, up = linear(W[prefix + "gate_proj"], x), linear(W[prefix + "up_proj"], x)
    return linear(W[prefix + "down_proj"], situ_glu(gate, up, beta, linear_beta))


class Expert(NamedTuple):
    "One routed expert's packed matrices, uint8: w1 gate and w3 up [I, L/2], w2 down [L, I/2]; scales [I, L/32], [L, I/32]."

    w1: np.ndarray
    w1_scale: np.ndarray
    w2: np.ndarray
    w2_scale: np.ndarray
    w3: np.ndarray
    w3_scale: np.ndarray

    @property
    def width(self):
        "The number of rows of w1, and of w3."
        return len(self.w1)

    def multiply(self, name, halves, out):
        "out float32 [m, n] = x W^T for W one of w1, w2 and w3, on the calling thread; `halves` is mxfp4.halved(x)."
        packed, scale = getattr(self, name), getattr(self, name + "_scale")
        check_fit(packed, scale, (len(halves), GROUP * halves.shape[1]), out)
        mxfp4_rows(packed, scale, halves, out, 0)


def expert_mlp(expert, z, beta, linear_beta, out):
    """out = w2 SiTU(w1 z, w3 z), float32 [m, L], for `z` float32 [m, L], on the calling thread.

    `expert`: an Expert, or what has its .width and .multiply. No weight is unpacked in memory. Raises NotFinite naming w1, w2 or w3.
    """
    gate, up, hidden = np.empty((3, len(z), expert.width), np.float32)
    halves = deinterleaved(z)
    expert.multiply("w1", halves, gate)
    check_product(gate, z, matrix="w1")  # before the nonlinearity: tanh makes an innocent 1 of infinity
    expert.multiply("w3", halves, up)
    check_product(up, z, matrix="w3")
    expert.multiply("w2", deinterleaved(situ_glu(gate, up, beta, linear_beta, hidden)), out)
    check_product(out, hidden, matrix="w2")
    return out


@njit(**KERNEL)
def _weighted_sum(rows, place, weights, out):
    for t in range(out.shape[0]):
        for i in range(out.shape[1]):
            out[t, i] = _ZERO
        for r in range(place.shape[1]):
            w, row = weights[t, r], rows[place[t, r]]
            for i in range(out.shape[1]):
                out[t, i] = fma(w, row[i], out[t, i])


def routed_sum(experts, z, ids, weights, beta, linear_beta):
    """u[t] = sum over ranks r of weights[t, r] * expert ids[t, r] (z[t]), float32 [T, L], in rank order.

    experts.each calls back with every expert once; it works on the tokens that chose it, whatever the order of arrival. Raises
    RuntimeError when one arrives that is not due, or one that is due does not arrive, NotFinite with (expert, "w1", "w2" or "w3") as its matrix.
    """
    T, k = ids.shape
    pairs = np.argsort(ids, axis=None, kind="stable")  # (token, rank) pairs, those of one expert side by side
    place = np.empty(T * k, np.int64)
    place[pairs] = np.arange(T * k)
    chosen, counts = np.unique(ids, return_counts=True)
    due = {int(e): slice(end - n, end) for e, n, end in zip(chosen, counts, np.cumsum(counts))}
    rows = np.empty((T * k, z.shape[1]), np.float32)

    def use(e, expert):
        if e not in due:
            raise RuntimeError(f"expert {e} arrived, but those still due are {sorted(due)}")
        mine = due.pop(e)
        try:
            expert_mlp(expert, z[pairs[mine] // k], beta, linear_beta, rows[mine])
        except NotFinite as error:
            error.matrix = e, error.matrix
            raise

    experts.each(use, get_num_threads())
    if due:
        raise RuntimeError(f"experts {sorted(due)} were requested and did not arrive")
    u = np.empty_like(z)
    _weighted_sum(rows, place.reshape(T, k), weights, u)
    return u


MOE_ORDER = ("gate", "e_score_correction_bias", "routed_expert_down_proj", "shared_experts.gate_proj",
             "shared_experts.up_proj", "shared_experts.down_proj", "routed_expert_norm", "routed_expert_up_proj")


def moe_layer(W, experts, x, top_k, scale, beta, linear_beta, eps, on_route=None):
    """One layer's feed-forward part, float32 [T, H], for normed input `x` float32 [T, H]: latent experts plus the shared path.

    `W` maps each name of MOE_ORDER to a matrix or a float32 vector; each is taken once, in that order. `experts` has
    .request(sorted ids), called as soon as the router has spoken, and .each(work, threads), which calls work(id, expert) once each,
    in any order. `on_route(ids, weights)` is shown the routing. Order of arrival and cut of the tokens change no bit.
    """
    ids, weights = route(linear(W["gate"], x), W["e_score_correction_bias"], top_k, scale)
    experts.request(np.unique(ids).tolist())
    if on_route is not None:
        on_route(ids, weights)
    z = linear(W["routed_expert_down_proj"], x)
    shared = dense_mlp(W, x, beta, linear_beta, "shared_experts.")
    u = routed_sum(experts, z, ids, weights, beta, linear_beta)
    normed = rms_norm(u, W["routed_expert_norm"], eps)
    return linear(W["routed_expert_up_proj"], normed) + shared


__all__ = [
    "situ_glu", "DENSE_ORDER", "dense_mlp", "Expert", "expert_mlp", "routed_sum", "MOE_ORDER", "moe_layer",
]
