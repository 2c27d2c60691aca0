"k3lib.kda: every operation by hand and by fixture, the layer against a model that ran elsewhere, any cut to the same bytes."
import numba
import numpy as np
import pytest
from common import FIXTURES, TOLERANCE, close, same
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from k3lib.checkpoint import Checkpoint
from k3lib.functions import rms_norm
from k3lib.kda import KDA_ORDER, kda_decay, kda_layer, kda_recurrent, kda_state, l2norm, short_conv, squash
from k3lib.matmul import ResidentMatrix
from k3lib.moe import dense_mlp
from k3lib.residual import mix

CONV, L2, DECAY, RECURRENT = (load_file(FIXTURES / f"ops/{name}.safetensors") for name in ("short_conv", "l2norm", "kda_decay", "kda_recurrent"))
EPS, LOW = 1e-5, -5.0


def f32(*rows):
    return np.array(rows, np.float32)


# The layer in float64. Every step can be swapped for a wrong one.

def sigmoid64(x):
    return np.exp(-np.logaddexp(0, -x))


def silu64(x):
    return x * sigmoid64(x)


def conv64(x, weight, past=None, activation=silu64):
    past = np.zeros((weight.shape[2] - 1, x.shape[1])) if past is None else past
    line = np.concatenate([past, x]).astype(np.float64)
    return activation(sum(weight[:, 0, j] * line[j:j + len(x)] for j in range(weight.shape[2])))


def l2norm64(x):
    return x / np.sqrt((x.astype(np.float64) ** 2).sum(-1, keepdims=True) + 1e-6)


def mean_norm64(x):
    return x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)


def rms64(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def decay64(z, A_log, dt_bias):
    return LOW * sigmoid64(np.exp(A_log[:z.shape[1], None].astype(np.float64)) * (z + dt_bias.reshape(z.shape[1:])))


def per_channel64(z, A_log, dt_bias):
    return LOW * sigmoid64(np.exp(A_log[:z.shape[2]].astype(np.float64)) * (z + dt_bias.reshape(z.shape[1:])))


def softplus64(z, A_log, dt_bias):
    return -np.exp(A_log[:z.shape[1], None].astype(np.float64)) * np.logaddexp(0, z + dt_bias.reshape(z.shape[1:]))


def recall(S, k):
    return np.einsum("hkv,hk->hv", S, k)


def outer(k, e):
    return k[:, :, None] * e[:, None, :]


def delta_rule(S, k, v, alpha, beta):
    S = alpha[:, :, None] * S
    return S + outer(beta * k, v - recall(S, k))


def value_axis(S, k, v, alpha, beta):
    S = alpha[:, None, :] * S
    return S + outer(beta * k, v - recall(S, k))


WRONG_UPDATE = {
    "decay along the value axis": value_axis,
    "error of the undecayed state": lambda S, k, v, a, b: a[:, :, None] * S + outer(b * k, v - recall(S, k)),
    "beta on the value only": lambda S, k, v, a, b: a[:, :, None] * S + outer(k, b * v - recall(a[:, :, None] * S, k)),
    "plain sum": lambda S, k, v, a, b: a[:, :, None] * S + outer(b * k, v),
    "decay after the write": lambda S, k, v, a, b: a[:, :, None] * (S + outer(b * k, v - recall(S, k))),
}


def recurrent64(q, k, v, alpha, beta, S, update=delta_rule):
    S, out = S.astype(np.float64), []
    for t in range(len(v)):
        S = update(S, k[t], v[t], alpha[t], beta[t][:, None])
        out.append(recall(S, q[t]) / np.sqrt(v.shape[2]))
    return np.stack(out), S


STEPS = dict(conv=conv64, norm=l2norm64, value=lambda v: v, decay=decay64, update=delta_rule, scale=1.0,
             out=lambda o, gate, w: rms64(o, w) * sigmoid64(gate))
WRONG_STEPS = {
    "A_log per channel": dict(decay=per_channel64),
    "conv taps reversed": dict(conv=lambda x, w: conv64(x, w[:, :, ::-1])),
    "no silu": dict(conv=lambda x, w: conv64(x, w, activation=lambda y: y)),
    "v L2-normed": dict(value=l2norm64),
    "mean instead of sum in the L2 norm": dict(norm=mean_norm64),
    "gate before norm": dict(out=lambda o, gate, w: rms64(o * sigmoid64(gate), w)),
    "no gate": dict(out=lambda o, gate, w: rms64(o, w)),
    "softplus decay": dict(decay=softplus64),
    "query not scaled": dict(scale=np.sqrt(32)),
} | {name: dict(update=update) for name, update in WRONG_UPDATE.items()}


def layer64(W, x, heads, **swap):
    do = {**STEPS, **swap}
    W = {name: (w.array if isinstance(w, ResidentMatrix) else w).astype(np.float64) for name, w in W.items()}
    q, k, v = (do["conv"](x @ W[f"{n}_proj"].T, W[f"{n}_conv1d"]).reshape(len(x), heads, -1) for n in "qkv")
    alpha = np.exp(do["decay"]((x @ W["f_a_proj"].T @ W["f_b_proj"].T).reshape(q.shape), W["A_log"], W["dt_bias"]))
    S = np.zeros((heads, q.shape[2], q.shape[2]))
    o, _ = recurrent64(do["norm"](q) * do["scale"], do["norm"](k), do["value"](v), alpha, sigmoid64(x @ W["b_proj"].T), S, do["update"])
    return do["out"](o, (x @ W["g_proj"].T).reshape(q.shape), W["o_norm"]).reshape(len(x), -1) @ W["o_proj"].T


def some_layer(H, heads, d, kernel=4, rank=None, seed=0):
    "Random weights of a layer of any shape. A_log carries three entries of padding that must not be read."
    rng = np.random.default_rng(seed)
    P, rank = heads * d, rank or d

    def matrix(n, k):
        return ResidentMatrix((rng.standard_normal((n, k)) / np.sqrt(k)).astype(np.float32))

    W = {f"{n}_proj": matrix(P, H) for n in "qkvg"}
    W |= {f"{n}_conv1d": rng.standard_normal((P, 1, kernel)).astype(np.float32) for n in "qkv"}
    return W | dict(b_proj=matrix(heads, H), f_a_proj=matrix(rank, H), f_b_proj=matrix(P, rank), o_proj=matrix(H, P),
                    A_log=np.append(rng.uniform(-1, 1, heads), [np.nan] * 3).astype(np.float32),
                    dt_bias=rng.standard_normal(P).astype(np.float32), o_norm=rng.uniform(.5, 1.5, d).astype(np.float32))


def some_input(T, H, seed=1):
    return np.random.default_rng(seed).standard_normal((T, H)).astype(np.float32)


# Short convolution

def test_conv_by_hand():
    "One channel, taps 1 10 100 1000 on inputs 1 2 3: the newest input meets the last tap, and silu(u) = u to four digits from 12 on."
    weight, state = f32([[1, 10, 100, 1000]]), f32([7, 8, 9])
    y = short_conv(f32([1], [2], [3]), weight, state)
    close("y", y, [[1987.], [2198.], [3219.]], 1e-6)
    assert state.tolist() == [[1, 2, 3]]
    close("silu", short_conv(f32([-1]), f32([[0, 0, 0, 1]]), np.zeros((1, 3), np.float32)), [[-0.26894142]], 1e-6)


@pytest.mark.parametrize("start, y, final", [(None, "y", "final_state"), ("initial_state", "y_from_state", "final_state_from_state")])
def test_conv_fixture(start, y, final):
    state = np.ascontiguousarray(CONV[start].T) if start else np.zeros((24, 3), np.float32)
    close(y, short_conv(CONV["x"], CONV["weight"], state), CONV[y])
    same(final, state.T, CONV[final])


def test_conv_steps_and_a_prompt_of_two():
    state = np.zeros((24, 3), np.float32)
    for t in range(11):
        close(f"y_steps[{t}]", short_conv(CONV["x"][t:t + 1], CONV["weight"], state)[0], CONV["y_steps"][t])
        same(f"state_steps[{t}]", state.T, CONV["state_steps"][t])
    state[:] = 0
    close("y_first2", short_conv(CONV["x"][:2], CONV["weight"], state), CONV["y_first2"])
    same("state_first2", state.T, CONV["state_first2"])


@pytest.mark.parametrize("kernel", [2, 3, 4, 7])
@pytest.mark.parametrize("T", [1, 2, 3, 4, 5])
def test_conv_history_of_short_prompts(kernel, T):
    "Whatever the prompt's length, the state is the last kernel-1 of old history and new inputs."
    rng = np.random.default_rng(T)
    past, x = rng.standard_normal((kernel - 1, 5)).astype(np.float32), rng.standard_normal((T, 5)).astype(np.float32)
    weight, state = rng.standard_normal((5, 1, kernel)).astype(np.float32), past.T.copy()
    close("y", short_conv(x, weight, state), conv64(x, weight, past))
    same("state", state.T, np.concatenate([past, x])[-(kernel - 1):])


# L2 norm

def test_l2norm_by_hand():
    close("3 4", l2norm(f32([[3, 4]])), [[[.6, .8]]], 1e-6)
    assert not l2norm(np.zeros((1, 1, 5), np.float32)).any()
    close("eps on the sum", l2norm(f32([[1e-3] * 3])), np.full((1, 1, 3), .5), 1e-6)


def test_l2norm_fixture():
    close("y", l2norm(L2["x"]), L2["y"])


# Decay

def test_decay_by_hand():
    "z + dt_bias = 0 gives half the bound; far below keeps everything, far above keeps e^-5."
    alpha = kda_decay(f32([[-1, -90, 90]]), f32(.7).reshape(1), f32(1, 0, 0), LOW)
    close("alpha", alpha, [[[np.exp(-2.5), 1, np.exp(-5)]]], 1e-6)


def test_decay_follows_the_bound_it_is_given():
    close("alpha", kda_decay(f32([[0, 90]]), f32(.0).reshape(1), f32(0, 0), -2.0), [[[np.exp(-1), np.exp(-2)]]], 1e-6)


@pytest.mark.parametrize("padding", [7.7, 0, np.nan])
def test_decay_fixture_whatever_the_padding(padding):
    A_log = DECAY["A_log"].copy()
    A_log[3:] = padding
    alpha = kda_decay(DECAY["z"], A_log, DECAY["dt_bias"], LOW)
    close("alpha", alpha, DECAY["alpha"])
    close("g", np.log(alpha), DECAY["g"])
    same("no padding at all", kda_decay(DECAY["z"], A_log[:3].copy(), DECAY["dt_bias"], LOW), alpha)


# Recurrence

def test_recurrent_by_hand():
    "A second value under the same key replaces the first, half of which had faded; beta 1/2 goes half the way."
    key, values = f32([[1, 0]], [[1, 0]]), f32([[3, 4]], [[5, 6]])
    fade = f32([[1, 1]], [[.5, 1]])
    for beta, row in ((1, [5, 6]), (.5, [3.25, 4])):
        S = np.zeros((1, 2, 2), np.float32)
        out = kda_recurrent(key, key, values, fade, f32([1], [beta]), S)
        close("S", S, [[row, [0, 0]]], 1e-6)
        close("out", out, np.array([[[3, 4]], [row]]) / np.sqrt(2), 1e-6)


def fixture_tokens():
    return [RECURRENT[n] for n in ("q", "k", "v")] + [np.exp(RECURRENT["g"]), RECURRENT["beta"]]


@pytest.mark.parametrize("start, o, final", [(None, "o", "final_state"), ("initial_state", "o_s0", "final_state_s0")])
def test_recurrent_fixture(start, o, final):
    S = RECURRENT[start].copy() if start else np.zeros((3, 16, 16), np.float32)
    close(o, kda_recurrent(*fixture_tokens(), S), RECURRENT[o])
    close(final, S, RECURRENT[final])


def test_raw_queries_and_keys_through_our_own_norm():
    q, k, v, alpha, beta = fixture_tokens()
    S = np.zeros((3, 16, 16), np.float32)
    close("o", kda_recurrent(l2norm(RECURRENT["q_raw"]), l2norm(RECURRENT["k_raw"]), v, alpha, beta, S), RECURRENT["o"])


@pytest.mark.parametrize("heads, d", [(1, 1), (2, 2), (3, 3), (1, 5), (2, 17), (5, 24), (1, 33), (2, 128)])
def test_recurrent_of_any_width(heads, d):
    rng = np.random.default_rng(d)
    q, k, v = rng.standard_normal((3, 6, heads, d)).astype(np.float32)
    alpha, beta = rng.uniform(.3, 1, (6, heads, d)).astype(np.float32), rng.uniform(0, 1, (6, heads)).astype(np.float32)
    S = rng.standard_normal((heads, d, d)).astype(np.float32)
    o, final = recurrent64(l2norm(q), l2norm(k), v, alpha, beta, S)
    close("o", kda_recurrent(l2norm(q), l2norm(k), v, alpha, beta, S), o)
    close("S", S, final)


@pytest.mark.parametrize("name", WRONG_UPDATE)
def test_a_wrong_update_fails_the_fixture(name):
    with pytest.raises(AssertionError, match="largest difference"):
        close("o", recurrent64(*fixture_tokens(), np.zeros((3, 16, 16)), WRONG_UPDATE[name])[0], RECURRENT["o"], 100 * TOLERANCE)


def test_what_is_asked_of_a_fresh_key_comes_back():
    "alpha 1, beta 1: whatever came before, the key just written returns its value."
    rng = np.random.default_rng(5)
    k = l2norm(rng.standard_normal((9, 2, 12)).astype(np.float32))
    v, ones = rng.standard_normal((9, 2, 12)).astype(np.float32), np.ones((9, 2, 12), np.float32)
    out = kda_recurrent(k, k, v, ones, ones[:, :, 0].copy(), np.zeros((2, 12, 12), np.float32))
    close("value", out * np.sqrt(12), v)


# The layer

def test_squash_in_place():
    x = f32([0, 100, -100])
    assert squash(x) is x
    close("sigmoid", x, [[.5, 1, 0]], 1e-6)


@pytest.mark.parametrize("H, heads, d, kernel, rank", [
    (37, 3, 16, 4, 16), (40, 1, 5, 4, 5), (64, 5, 24, 3, 20), (33, 7, 33, 5, 33), (16, 2, 100, 2, 7)])
def test_layer_of_any_shape(H, heads, d, kernel, rank):
    W, x = some_layer(H, heads, d, kernel, rank), some_input(7, H)
    close("layer", kda_layer(W, x, kda_state(heads, d, kernel), EPS, LOW), layer64(W, x, heads))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([(24, 2, 16, 4), (21, 3, 5, 4), (19, 1, 33, 2), (18, 4, 8, 6)]), st.integers(0, 2**32 - 1),
       st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_any_cut_gives_the_same_bytes(shape, seed, cuts):
    H, heads, d, kernel = shape
    T, W = sum(cuts), some_layer(H, heads, d, kernel, seed=seed % 3)
    x = some_input(T, H, seed)

    def run(pieces):
        state, outputs, at = kda_state(heads, d, kernel), [], 0
        for n in pieces:
            outputs.append(kda_layer(W, x[at:at + n], state, EPS, LOW))
            at += n
        return np.concatenate(outputs), state

    y, state = run(cuts)
    for pieces in ([T], [1] * T):
        other, moved = run(pieces)
        same(f"output, {pieces} against {cuts}", other, y)
        same(f"S, {pieces} against {cuts}", moved.S, state.S)
        same(f"conv, {pieces} against {cuts}", moved.conv, state.conv)


def test_one_thread_and_all(all_threads):
    "Enough heads and tokens for threads to meet, should they share anything."
    rng, threads, runs = np.random.default_rng(3), numba.get_num_threads(), []
    q, k, v = rng.standard_normal((3, 64, 16, 64)).astype(np.float32)
    alpha, beta = rng.uniform(.5, 1, (64, 16, 64)).astype(np.float32), rng.uniform(0, 1, (64, 16)).astype(np.float32)
    for n in (1, threads, threads):
        numba.set_num_threads(n)
        S = np.zeros((16, 64, 64), np.float32)
        runs.append((kda_recurrent(l2norm(q), l2norm(k), v, alpha, beta, S), S))
    for out, S in runs[1:]:
        same("out", out, runs[0][0])
        same("S", S, runs[0][1])


def test_weights_are_taken_once_in_order():
    W, taken = some_layer(20, 2, 6), []

    class OnceOnly:
        def __getitem__(self, name):
            taken.append(name)
            return W[name]

    kda_layer(OnceOnly(), some_input(2, 20), kda_state(2, 6, 4), EPS, LOW)
    assert taken == list(KDA_ORDER)


def test_a_matrix_is_used_up_before_the_next_is_taken():
    "A streamed matrix is only valid until the next one is asked for."
    W, now = some_layer(20, 2, 6), [None]

    class Passing:
        def __init__(self, name):
            self.name, self.shape = name, W[name].shape

        def blocks(self, multiple=1):
            assert now[0] == self.name, f"{self.name} is read after {now[0]} was taken"
            rows = W[self.name].array
            for first in range(0, len(rows), 3):
                yield first, rows[first:first + 3]

    class Stream:
        def __getitem__(self, name):
            now[0] = name
            return Passing(name) if name.endswith("_proj") else W[name]

    x = some_input(3, 20)
    y = kda_layer(Stream(), x, kda_state(2, 6, 4), EPS, LOW)
    same("in blocks of three rows", y, kda_layer(W, x, kda_state(2, 6, 4), EPS, LOW))


def test_the_state_is_what_the_memory_plan_counts():
    state = kda_state(96, 128, 4)
    assert state.S.shape == (96, 128, 128) and state.conv.shape == (3, 96 * 128, 3)
    assert state.S.dtype == state.conv.dtype == np.float32 and not state.S.any() and not state.conv.any()
    assert (69 * state.S.nbytes, 69 * state.conv.nbytes) == (434_110_464, 30_523_392)


# A model that ran elsewhere: hidden state after layer 0 of fixtures/oracle13, computed by mlx-lm

LAYER = "language_model.model.layers.0."


@pytest.fixture(scope="module")
def oracle():
    model = Checkpoint(FIXTURES / "oracle13/model")
    expected = load_file(FIXTURES / "oracle13/expected.safetensors")
    names = {n: LAYER + "self_attn." + n + ("" if n in ("A_log", "dt_bias") else ".weight") for n in KDA_ORDER}
    W = {n: ResidentMatrix(model.tensor(name)) if n.endswith("_proj") else model.tensor(name) for n, name in names.items()}
    embedding = model.tensor("language_model.model.embed_tokens.weight")[expected["prompt_ids"]]
    x = rms_norm(embedding, model.tensor(LAYER + "input_layernorm.weight"), EPS)

    def after_layer0(y):
        "The hidden state layer 0 hands on if its attention said y: mix, then the MLP on top of y."
        y, h = y.astype(np.float32), np.empty_like(embedding)
        mix(np.stack([embedding, y]), 2, model.tensor(LAYER + "mlp_res_norm.weight"), model.tensor(LAYER + "mlp_res_proj.weight")[0], EPS, h)
        mlp = {n: ResidentMatrix(model.tensor(f"{LAYER}mlp.{n}.weight")) for n in ("gate_proj", "up_proj", "down_proj")}
        return y + dense_mlp(mlp, rms_norm(h, model.tensor(LAYER + "post_attention_layernorm.weight"), EPS), 4.0, 25.0)

    return W, x, after_layer0, expected["hidden_after_layer"][0]


@pytest.mark.parametrize("padding", [7.7, 0, np.nan])
def test_layer_0_of_the_oracle(oracle, padding):
    W, x, after_layer0, expected = oracle
    A_log = W["A_log"].copy()
    A_log[4:] = padding
    y = kda_layer(W | {"A_log": A_log}, x, kda_state(4, 32, 4), EPS, LOW)
    close("attention", y, layer64(W, x, 4))
    close("hidden_after_layer[0]", after_layer0(y), expected)


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_a_wrong_layer_fails_the_oracle(oracle, name):
    W, x, after_layer0, expected = oracle
    with pytest.raises(AssertionError, match="largest difference"):
        close("hidden_after_layer[0]", after_layer0(layer64(W, x, 4, **WRONG_STEPS[name])), expected, 100 * TOLERANCE)


# Bad input

def zeros(*shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize("call, message", [
    (lambda: short_conv(zeros(2, 5), zeros(4, 1, 4), zeros(4, 3)), r"short_conv: x has shape \(2, 5\), expected \(2, 4\)"),
    (lambda: short_conv(zeros(2, 4), zeros(4, 1, 4), zeros(3, 4)), r"short_conv: state has shape \(3, 4\), expected \(4, 3\)"),
    (lambda: kda_decay(zeros(1, 3, 4), zeros(2), zeros(12), LOW), "A_log has 2 entries, expected one for each of 3 heads"),
    (lambda: kda_decay(zeros(1, 3, 4), zeros(3), zeros(4), LOW), r"dt_bias has shape \(4,\), expected \(12,\)"),
    (lambda: kda_recurrent(zeros(2, 3, 4), zeros(2, 3, 5), zeros(2, 3, 4), zeros(2, 3, 4), zeros(2, 3), zeros(3, 4, 4)), r"k has shape \(2, 3, 5\)"),
    (lambda: kda_recurrent(*[zeros(2, 3, 4)] * 4, zeros(3, 2), zeros(3, 4, 4)), r"beta has shape \(3, 2\), expected \(2, 3\)"),
    (lambda: kda_recurrent(*[zeros(2, 3, 4)] * 4, zeros(2, 3), zeros(3, 5, 4)), r"S has shape \(3, 5, 4\), expected \(3, 4, 4\)"),
    (lambda: kda_layer(some_layer(8, 2, 4), zeros(1, 9), kda_state(2, 4, 4), EPS, LOW), "linear"),
    (lambda: kda_layer(some_layer(8, 2, 4), zeros(1, 8), kda_state(3, 4, 4), EPS, LOW), r"short_conv: state has shape \(12, 3\), expected \(8, 3\)"),
])
def test_shapes_that_do_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call()
