"k3lib.moe: SiTU, one expert, the layer by fixture, the same bytes in any order and cut, which mistakes fail."
import numpy as np
import pytest
from common import FIXTURES, TOLERANCE, close
from safetensors.numpy import load_file

from k3lib import moe
from k3lib.matmul import NotFinite, PackedMatrix, ResidentMatrix
from k3lib.moe import Expert, MoEShape, Situ, dense_mlp, expert_mlp, moe_layer, routed_sum, situ_glu
from k3lib.mxfp4 import decode
from k3lib.parallel import CORES
from k3lib.router import route
from k3lib.tensors import TABLE

SITU, LAYER = (load_file(FIXTURES / "ops" / f"{name}.safetensors") for name in ("situ_glu", "latent_moe"))
CEILINGS = Situ(4.0, 25.0)
DENSE_NAMES, MOE_NAMES = ([row.short for row in TABLE[part]] for part in ("dense", "moe"))
CASES = {"plain": ("", 1.0), "quiet": ("_quiet", 2.5)}


class Streamed:
    "A matrix that is multiplied in blocks of `size` rows."

    def __init__(self, array, size):
        self.array, self.shape, self.size = array, array.shape, size

    def multiply(self, x, out, threads):
        for first in range(0, len(self.array), self.size):
            rows = ResidentMatrix(self.array[first:first + self.size])
            product = np.empty((len(x), rows.shape[0]), np.float32)
            rows.multiply(x, product, threads)
            out[:, first:first + self.size] = product


class Once(dict):
    "A mapping that writes down what is taken from it."

    def __init__(self, items, events):
        super().__init__(items)
        self.events = events

    def __getitem__(self, name):
        self.events.append(name)
        return super().__getitem__(name)


class Source:
    "Experts that arrive in the order that arrange(requested ids) says."

    def __init__(self, experts, arrange=lambda ids: ids, events=None):
        self.experts, self.arrange, self.events, self.sent = experts, arrange, [] if events is None else events, []

    def request(self, ids):
        self.events.append("request")
        self.ids = ids

    def map(self, work, threads):
        for e in self.arrange(self.ids):
            self.sent.append(int(e))
            work(int(e), self.experts[int(e)])


def fixture_weights(matrix=ResidentMatrix):
    W = {n: LAYER[n] for n in MOE_NAMES[:3] + MOE_NAMES[6:]}
    W |= {f"shared_experts.{n}": LAYER[f"shared_{n}"] for n in DENSE_NAMES}
    return {n: matrix(a) if a.ndim == 2 else a for n, a in W.items()}


def fixture_experts(suffix=""):
    names = ("w1_packed", "w1_scale", "w2_packed", "w2_scale" + suffix, "w3_packed", "w3_scale")
    return [Expert.packed([np.ascontiguousarray(LAYER[n][e]) for n in names]) for e in range(8)]


def fixture_layer(case, experts=None, W=None, on_route=None, **changes):
    suffix, scale = CASES[case]
    experts = experts if experts is not None else Source(fixture_experts(suffix))
    shape = MoEShape(3, scale, CEILINGS, 1e-5)._replace(**changes)
    return moe_layer(W or fixture_weights(), experts, LAYER["x"], shape, CORES, on_route)[0]


def situ64(gate, up):
    return 4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * 25 * np.tanh(up / 25)


def random_expert(rng, L, I):
    def matrix(n, k):
        return rng.integers(0, 256, (n, k // 2), np.uint8), rng.integers(118, 125, (n, k // 32), np.uint8)
    return Expert.packed([*matrix(I, L), *matrix(L, I), *matrix(I, L)])


def decoded(expert):
    "w1, w2, w3 in float64."
    return [decode(*matrix).astype(np.float64) for matrix in expert]


def random_layer(H=40, L=64, I=96, E=12, shared=50, T=11):
    "Weights, experts and tokens of a layer whose widths are no multiples of sixteen where the format allows it."
    rng = np.random.default_rng(7)

    def matrix(n, k):
        return (rng.normal(size=(n, k)) / np.sqrt(k)).astype(np.float32)
    arrays = dict(zip(MOE_NAMES, (
        matrix(E, H), rng.normal(size=E).astype(np.float32) / np.float32(4), matrix(L, H), matrix(shared, H),
        matrix(shared, H), matrix(H, shared), rng.normal(size=L).astype(np.float32), matrix(H, L))))
    return arrays, [random_expert(rng, L, I) for _ in range(E)], rng.normal(size=(T, H)).astype(np.float32)


RANDOM_SHAPE = MoEShape(4, 1.5, CEILINGS, 1e-5)


def run(arrays, source, x, matrix=ResidentMatrix, threads=CORES):
    W = {n: matrix(a) if a.ndim == 2 else a for n, a in arrays.items()}
    return moe_layer(W, source, x, RANDOM_SHAPE, threads)


def test_situ_by_hand():
    "tanh(artanh ½) twice: 4·½ · sigmoid(2 ln 3) · 25·½ = 2 · 0.9 · 12.5."
    y = situ_glu(np.float32([2 * np.log(3), 0, 7]), np.float32([25 * np.arctanh(.5), 9, 0]), CEILINGS)
    close("situ", y, [22.5, 0, 0], 1e-6)
    assert y.dtype == np.float32


def test_situ_fixture():
    y = situ_glu(SITU["gate"], SITU["up"], CEILINGS)
    allowed = 1e-5 * np.abs(SITU["y"]) + 1e-12
    worst = (np.abs(y - SITU["y"]) - allowed).argmax()
    assert (np.abs(y - SITU["y"]) <= allowed).all(), f"pair {worst}: {y[worst]} for {SITU['y'][worst]}"


def test_situ_is_bounded():
    x = np.float32([3e38, -3e38, 1e4, -1e4, 0])
    gate, up = (a.ravel().copy() for a in np.meshgrid(x, x))
    y = situ_glu(gate, up, CEILINGS)
    assert np.isfinite(y).all() and np.abs(y).max() == 100


def test_situ_any_shape_and_over_its_input():
    rng = np.random.default_rng(1)
    gate, up = rng.normal(size=(2, 3, 5, 37)).astype(np.float32) * np.float32(5)
    y = situ_glu(gate, up, Situ(3.0, 11.0))
    close("situ", y, 3 * np.tanh(gate / 3.) / (1 + np.exp(-gate.astype(np.float64))) * 11 * np.tanh(up / 11.))
    assert situ_glu(gate, up, Situ(3.0, 11.0), out=gate) is gate and gate.tobytes() == y.tobytes()


def test_situ_refuses_what_does_not_fit():
    a = np.zeros((2, 6), np.float32)
    for up, out in ((a[:1], None), (a, np.zeros((2, 5), np.float32)), (a, np.zeros((6, 2), np.float32).T)):
        with pytest.raises(ValueError, match="situ_glu.*do not fit"):
            situ_glu(a, up, CEILINGS, out)


def test_dense_mlp():
    events = []
    W = Once({n: ResidentMatrix(LAYER[f"shared_{n}"]) for n in DENSE_NAMES}, events)
    gate, up, down = (LAYER[f"shared_{n}"].astype(np.float64) for n in DENSE_NAMES)
    x = np.random.default_rng(2).normal(size=(6, 48)).astype(np.float32)
    close("dense", dense_mlp(W, x, CEILINGS, CORES), situ64(x @ gate.T, x @ up.T) @ down.T)
    assert events == DENSE_NAMES


@pytest.mark.parametrize("L, I, m", [(64, 32, 1), (32, 96, 5), (160, 64, 4)])
def test_expert_mlp(L, I, m):
    rng = np.random.default_rng(3)
    expert, z = random_expert(rng, L, I), rng.normal(size=(m, L)).astype(np.float32)
    w1, w2, w3 = decoded(expert)
    close("expert", expert_mlp(expert, z, CEILINGS, np.empty_like(z)), situ64(z @ w1.T, z @ w3.T) @ w2.T)


@pytest.mark.parametrize("case", CASES)
def test_routed_sum_is_the_fixtures_aggregate(case):
    suffix, _ = CASES[case]
    source = Source(fixture_experts(suffix))
    source.request(LAYER["ids" + suffix].tolist())
    z = (LAYER["routed_expert_down_proj"].astype(np.float64) @ LAYER["x"][0]).astype(np.float32)[None]
    u = routed_sum(source, z, LAYER["ids" + suffix][None], LAYER["weights" + suffix][None], CEILINGS, CORES)
    close("aggregate", u[0], LAYER["aggregate" + suffix])


@pytest.mark.parametrize("case", CASES)
def test_layer_fixture(case):
    seen = []
    y = fixture_layer(case, on_route=lambda ids, weights: seen.append((ids, weights)))
    close("y", y, LAYER["y" + CASES[case][0]])
    (ids, weights), = seen
    order = np.argsort(ids[0])
    assert np.array_equal(ids[0][order], LAYER["ids" + CASES[case][0]])
    close("weights", weights[0][order], LAYER["weights" + CASES[case][0]])


def test_layer_of_odd_widths_against_float64():
    arrays, experts, x = random_layer()
    a = {n: v.astype(np.float64) for n, v in arrays.items()}
    ids, weights = route((x @ a["gate"].T).astype(np.float32), arrays["e_score_correction_bias"], 4, 1.5)
    z, u = x @ a["routed_expert_down_proj"].T, np.zeros((len(x), 64))
    for t, r in np.ndindex(ids.shape):
        w1, w2, w3 = decoded(experts[ids[t, r]])
        u[t] += weights[t, r] * (w2 @ situ64(w1 @ z[t], w3 @ z[t]))
    normed = u / np.sqrt((u * u).mean(1, keepdims=True) + 1e-5) * a["routed_expert_norm"]
    gate, up, down = (a[f"shared_experts.{n}"] for n in DENSE_NAMES)
    shared = situ64(x @ gate.T, x @ up.T) @ down.T
    close("y", run(arrays, Source(experts), x), normed @ a["routed_expert_up_proj"].T + shared)


def test_order_of_arrival_changes_no_byte():
    arrays, experts, x = random_layer()
    rng = np.random.default_rng(5)
    whole = run(arrays, Source(experts), x).tobytes()
    for _ in range(12):
        assert run(arrays, Source(experts, rng.permutation), x).tobytes() == whole
    assert run(arrays, Source(experts, lambda ids: ids[::-1]), x).tobytes() == whole


@pytest.mark.parametrize("size", [1, 2, 4, 10])
def test_cut_of_the_tokens_changes_no_byte(size):
    arrays, experts, x = random_layer()
    parts = [run(arrays, Source(experts), x[t:t + size]) for t in range(0, len(x), size)]
    assert np.concatenate(parts).tobytes() == run(arrays, Source(experts), x).tobytes()


def test_cut_of_the_rows_and_threads_change_no_byte(all_threads):
    arrays, experts, x = random_layer()
    whole = run(arrays, Source(experts), x).tobytes()
    for size in (1, 7, 16):
        assert run(arrays, Source(experts), x, lambda a: Streamed(a, size)).tobytes() == whole, f"rows cut into {size}"
    assert run(arrays, Source(experts), x, threads=1).tobytes() == whole, "one thread"


def test_everything_is_taken_once_and_experts_are_asked_for_early():
    arrays, experts, x = random_layer()
    events, routed = [], []
    source = Source(experts, events=events)
    W = Once({n: ResidentMatrix(a) if a.ndim == 2 else a for n, a in arrays.items()}, events)
    moe_layer(W, source, x, RANDOM_SHAPE, CORES, on_route=lambda ids, weights: routed.append(ids))
    assert events == [*MOE_NAMES[:2], "request", *MOE_NAMES[2:]]
    assert source.ids == sorted(set(routed[0].ravel().tolist())) and all(type(e) is int for e in source.ids)
    assert sorted(source.sent) == source.ids and len(source.sent) < routed[0].size


def test_an_expert_that_does_not_arrive_is_an_error():
    arrays, experts, x = random_layer()
    source = Source(experts, lambda ids: ids[:-2])
    with pytest.raises(RuntimeError, match=r"experts \[\d+, \d+\] were requested and did not arrive"):
        run(arrays, source, x)
    with pytest.raises(RuntimeError, match="did not arrive"):
        run(arrays, Source(experts, lambda ids: []), x)


def test_an_expert_that_is_not_due_is_an_error():
    arrays, experts, x = random_layer()
    twice = Source(experts, lambda ids: ids[:1] + ids)
    with pytest.raises(RuntimeError, match=r"expert \d+ arrived, expected one of \[.*\], each once"):
        run(arrays, twice, x)
    stranger = Source(experts, lambda ids: [min(set(range(12)) - set(ids))] + ids)
    with pytest.raises(RuntimeError, match=r"expert \d+ arrived, expected one of \[.*\], each once"):
        run(arrays, stranger, x[:1])


def test_an_expert_of_the_wrong_width_is_an_error():
    arrays, experts, x = random_layer()
    wide = [random_expert(np.random.default_rng(0), 96, 96)] * len(experts)
    with pytest.raises(ValueError, match="do not fit"):
        run(arrays, Source(wide), x)


def test_a_token_that_is_not_finite_is_an_error():
    arrays, experts, x = random_layer()
    x[4, 3] = np.nan
    with pytest.raises(NotFinite, match="for token 4"):
        run(arrays, Source(experts), x)


# Mistakes: the layer as built with one part replaced, on the case that must see it.


def with_weights(change):
    "A route whose weights are `change(scores, bias, scale)` of the chosen."
    def wrong(logits, bias, k, scale):
        ids, _ = route(logits, bias, k, scale)
        s = np.take_along_axis(1 / (1 + np.exp(-logits)), ids, 1)
        return ids, change(s, bias[ids], scale).astype(np.float32)
    return wrong


def normed_expert(expert, z, situ, out):
    expert_mlp(expert, z, situ, out)
    out /= np.sqrt((out * out).mean(1, keepdims=True) + np.float32(1e-5))
    return out


def capped(gate, up, situ, out=None):
    beta, linear_beta = situ
    cap = beta * np.tanh(gate / beta)
    y = (cap / (1 + np.exp(-cap)) * linear_beta * np.tanh(up / linear_beta)).astype(np.float32)
    if out is not None:
        out[:] = y
    return y


def swapped(matrix):
    "The packed matrix with the two nibbles of each byte swapped."
    return PackedMatrix(matrix.packed << 4 | matrix.packed >> 4, matrix.scale)


REPLACED = {
    "bias left in the weights": (
        "plain", dict(route=with_weights(lambda s, b, scale: (s + b) / (s + b).sum(1, keepdims=True) * scale))),
    "not renormalised": ("quiet", dict(route=with_weights(lambda s, b, scale: s * scale))),
    "norm per expert": ("plain", dict(expert_mlp=normed_expert, rms_norm=lambda x, weight, eps: x * weight)),
    "no norm": ("plain", dict(rms_norm=lambda x, weight, eps: x)),
    "norm weight left out": (
        "plain", dict(rms_norm=lambda x, weight, eps: x / np.sqrt((x * x).mean() + np.float32(eps)))),
    "sigmoid of the capped gate": ("plain", dict(situ_glu=capped)),
    "shared experts dropped": ("plain", dict(dense_mlp=lambda W, x, *rest: np.zeros_like(x))),
    "shared experts scaled too": ("quiet", dict(dense_mlp=lambda *a: np.float32(2.5) * dense_mlp(*a))),
}


@pytest.mark.parametrize("name", REPLACED)
def test_the_fixture_rejects_a_replaced_part(name, monkeypatch):
    case, parts = REPLACED[name]
    for part, wrong in parts.items():
        monkeypatch.setattr(moe, part, wrong)
    with pytest.raises(AssertionError, match="largest difference"):
        close("y", fixture_layer(case), LAYER["y" + CASES[case][0]], 100 * TOLERANCE)


def changed(case, expert=lambda e: e, bias=1):
    W = fixture_weights()
    W["e_score_correction_bias"] = W["e_score_correction_bias"] * np.float32(bias)
    return dict(case=case, W=W, experts=Source([expert(e) for e in fixture_experts(CASES[case][0])]))


GIVEN = {
    "scaling factor dropped": dict(case="quiet", scale=1.0),
    "norm with eps 1e-6": dict(case="quiet", eps=1e-6),
    "betas swapped": dict(case="plain", situ=Situ(25.0, 4.0)),
    "bias ignored": changed("plain", bias=0),
    "w1 and w3 swapped": changed("plain", lambda e: Expert(e.w3, e.w2, e.w1)),
    "nibbles swapped": changed("plain", lambda e: Expert(*map(swapped, e))),
}


@pytest.mark.parametrize("name", GIVEN)
def test_the_fixture_rejects_a_wrong_input(name):
    case = GIVEN[name]["case"]
    with pytest.raises(AssertionError, match="largest difference"):
        close("y", fixture_layer(**GIVEN[name]), LAYER["y" + CASES[case][0]], 100 * TOLERANCE)


def test_only_the_quiet_case_sees_a_common_factor(monkeypatch):
    "The norm on the aggregate cancels it, up to eps: the plain case passes what the quiet one rejects."
    monkeypatch.setattr(moe, "route", with_weights(lambda s, b, scale: s))
    close("y", fixture_layer("plain"), LAYER["y"])
