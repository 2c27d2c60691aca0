# %% [markdown]
# # 5.8 Ninety-three layers, one forward pass a token
#
# Kimi K3's text stack is one loop over 93 layers. Each layer mixes the residual sources, attends (KDA or MLA), mixes
# again and feeds forward. Every part has had its chapter. What can still go wrong is the loop itself: which layer has
# which part, what is added to what, and where a block ends. Such a mistake fails no check of shapes, and the model
# still writes text.
#
# This chapter writes the loop twice, once in float64, close to the equations, and once on the book's kernels. Both are
# compared with logits, hidden states and routing that another implementation computed. At the end you can follow a
# token from its id to its logits and name every tensor it meets, in order. All weights are in memory here. The chapters
# that follow take them from a disk, and no line of this loop changes.
#
# > **Without streaming:** the whole model takes 1,560 GB<!--claim whole--> of memory.
# >
# > **With it:** a token needs 137 GB<!--claim token--> of weights, one after another, and every one of them only once.
#
# Needs chapters [2.1] to [4.2] (the layers), [5.3] (the config), [5.4] (names) and [5.7] (the checkpoint). Runs in half
# a minute. Makes `k3lib.model`.
#
# [5.7 A checkpoint, opened](07_checkpoint.ipynb) ·
# [contents](../README.md) ·
# [5.9 Past the page cache](09_disk.ipynb)
#
# [2.1]: ../02_kda/01_delta_rule.ipynb
# [4.2]: ../04_moe_router/02_moe.ipynb
# [5.3]: 03_config.ipynb
# [5.4]: 04_tensors.ipynb
# [5.7]: 07_checkpoint.ipynb

# %%
import functools
import sys
from pathlib import Path

import matplotlib.pyplot as plt
from safetensors.numpy import load_file

from k3lib.checkpoint import Checkpoint
from k3lib.config import read_config
from k3lib.mla import LATENT_EPS
from k3lib.mxfp4 import decode
from k3lib.tensors import EMBED, expert_name

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")
sys.path.insert(0, str(ROOT / "book"))
import schematics

FOLDER = ROOT / "fixtures" / "oracle13" / "model"
EXPECTED = load_file(FOLDER.parent / "expected.safetensors")
config, checkpoint = read_config(FOLDER), Checkpoint(FOLDER)
K3 = read_config(ROOT / "fixtures/k3")  # the numbers of the released model
schematics.where(K3, "embedding", "mix", "kda", "mla", "router", "experts", "head")

# %% [markdown]
# | symbol | meaning | shape | in code |
# |---|---|---|---|
# | $T$, $H$ | tokens of a chunk; width of the residual stream | 7168 in K3, 128 here | `len(ids)`, `hidden_size` |
# | $L$ | number of a layer, from 0 | 0 to 92 in K3, to 12 here | `L` |
# | $p$ | running sum since the last block began | $[T, H]$ | `sources[n]` |
# | $B_0 \ldots B_{n-1}$ | finished block sums, the embedding first | $[n, T, H]$ | `sources[:n]` |
# | $m$ | what a half-layer reads: a mix of all $B_i$ and $p$ | $[T, H]$ | `h` |
#
# A block has 12 layers in K3 (`attn_res_block_size`) and 3 in the embedded model. The whole pass, with the numbers of
# K3:

# %%
schematics.architecture(K3)

# %%
total = 1_560_860_324_864 - 92_289_024 - 802_428_928  # bytes of all tensors but those of the image side
print(f"all weights of the text stack: {total / 1e9:,.0f} GB")  # claim whole
print(f"those that a token needs: {sum(schematics.token_bytes(K3).values()) / 1e9:.0f} GB")  # claim token

# %% tags=["export"]
from collections.abc import Callable, Sequence as Ids
from typing import Any, Protocol

import numpy as np

from k3lib.config import Config
from k3lib.functions import rms_norm
from k3lib.kda import KDAShape, kda_layer, kda_state
from k3lib.matmul import NotFinite, linear
from k3lib.mla import MLAShape, mla_cache, mla_layer
from k3lib.moe import LayerExperts, MoEShape, Situ, dense_mlp, moe_layer
from k3lib.residual import mix
from k3lib.tensors import ATTENTION_NORMS, FFN_NORMS, FINAL, HEAD, layer_parts, tensor_name


# %% [markdown]
# ## 5.8.1 The whole model in float64
#
# Slow and close to the equations: each expert is decoded, each matrix is converted to float64, and all positions are
# computed at once with the full attention matrix. `wrong` switches on one mistake at a time. The mistakes inside single
# layers are in the layers' chapters; these are the ones that only the loop can make.

# %%
def rms(x, w, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * w


def sigma(x):
    return 1 / (1 + np.exp(-x))


def softmax(x, axis):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def mix64(sources, w, proj):
    "The block attention residual: raw sources weighted by a softmax over their normed scores (chapter 3.2)."
    s = np.stack(sources)
    weights = softmax(rms(s, w, config.rms_norm_eps) @ proj, 0)
    return (weights[..., None] * s).sum(0)


# %%
def kda64(W, x):
    "KDA over all positions from an empty state (chapter 2.2)."
    c, T = config, len(x)
    heads, d = c.kda_num_heads, c.kda_head_dim

    def conv(u, taps):
        padded = np.concatenate([np.zeros((taps.shape[-1] - 1, u.shape[1])), u])
        y = sum(padded[j:j + T] * taps[:, 0, j] for j in range(taps.shape[-1]))
        return (y * sigma(y)).reshape(T, heads, d)

    q, k, v = (conv(x @ W(f"{n}_proj").T, W(f"{n}_conv1d")) for n in "qkv")
    q, k = (u / np.sqrt((u * u).sum(-1, keepdims=True) + 1e-6) for u in (q, k))
    beta = sigma(x @ W("b_proj").T)
    z = (x @ W("f_a_proj").T @ W("f_b_proj").T + W("dt_bias")).reshape(T, heads, d)
    alpha = np.exp(c.kda_gate_lower_bound * sigma(np.exp(W("A_log")[:heads, None]) * z))
    S, o = np.zeros((heads, d, d)), np.empty((T, heads, d))
    for t in range(T):
        S = alpha[t][..., None] * S
        delta = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", S, k[t]))
        S = S + k[t][..., None] * delta[:, None]
        o[t] = np.einsum("hkv,hk->hv", S, q[t]) * d ** -0.5
    gate = sigma(x @ W("g_proj").T).reshape(T, heads, d)
    return (rms(o, W("o_norm"), c.rms_norm_eps) * gate).reshape(T, -1) @ W("o_proj").T


# %%
def mla64(W, x):
    "Gated MLA with keys and values expanded per head (chapter 3.1)."
    c, T = config, len(x)
    heads, nope, rank = c.num_attention_heads, c.qk_nope_head_dim, c.kv_lora_rank
    q = (rms(x @ W("q_a_proj").T, W("q_a_layernorm"), LATENT_EPS) @ W("q_b_proj").T).reshape(T, heads, -1)
    a = x @ W("kv_a_proj_with_mqa").T
    kv = (rms(a[:, :rank], W("kv_a_layernorm"), LATENT_EPS) @ W("kv_b_proj").T).reshape(T, heads, -1)
    keys = np.concatenate([kv[..., :nope], np.repeat(a[:, None, rank:], heads, 1)], -1)
    score = np.einsum("thd,shd->hts", q, keys) * q.shape[-1] ** -0.5
    score = np.where(np.tril(np.ones((T, T), bool)), score, -np.inf)
    o = np.einsum("hts,shd->thd", softmax(score, -1), kv[..., nope:]).reshape(T, -1)
    return (o * sigma(x @ W("g_proj").T)) @ W("o_proj").T


# %%
def situ64(gate, up):
    a, b = config.activation_situ_beta, config.activation_situ_linear_beta
    return a * np.tanh(gate / a) * sigma(gate) * b * np.tanh(up / b)


def ffn64(W, x, L):
    "The dense MLP of layer 0, or latent experts plus the shared path (chapter 4.2)."
    c = config
    if c.is_dense(L):
        return situ64(x @ W("gate_proj").T, x @ W("up_proj").T) @ W("down_proj").T
    score = sigma(x @ W("gate").T)
    chosen = np.argsort(-(score + W("e_score_correction_bias")), 1, kind="stable")[:, :c.num_experts_per_token]
    weights = np.take_along_axis(score, chosen, 1)
    weights = weights / (weights.sum(1, keepdims=True) + 1e-20) * c.routed_scaling_factor
    z, u = x @ W("routed_expert_down_proj").T, np.zeros((len(x), c.routed_expert_hidden_size))
    for t in range(len(x)):
        for e, w in zip(chosen[t], weights[t]):
            w1, w2, w3 = (expert64(L, e, n) for n in ("w1", "w2", "w3"))
            u[t] += w * (w2 @ situ64(w1 @ z[t], w3 @ z[t]))
    shared = situ64(x @ W("shared_experts.gate_proj").T, x @ W("shared_experts.up_proj").T)
    routed = rms(u, W("routed_expert_norm"), c.rms_norm_eps) @ W("routed_expert_up_proj").T
    return routed + shared @ W("shared_experts.down_proj").T


# %%
@functools.cache
def tensor64(name):
    return checkpoint.tensor(name).astype(np.float64)


@functools.cache
def expert64(L, e, which):
    packed, scale = (checkpoint.raw(expert_name(L, e, short)) for short in (which, f"{which}_scale"))
    return decode(packed, scale).astype(np.float64)


def forward64(ids, wrong=None):
    "Logits [T, vocab] and the running sum after every layer, float64, all positions at once."
    c = config
    p, blocks, hidden = tensor64(EMBED)[ids], [], []
    for L in range(c.num_hidden_layers):
        def W(short, part="norms"):
            w = tensor64(tensor_name(L, part, short))
            return w[0] if short.endswith("res_proj") else w
        kind, ffn = layer_parts(c, L)
        if wrong == "last layer taken for KDA" and L == c.num_hidden_layers - 1:
            kind = None
        h = mix64(blocks + [p], W("self_attention_res_norm"), W("self_attention_res_proj")) if blocks else p
        if L % c.attn_res_block_size == 0:
            blocks.append(p)
            p = p if wrong == "boundary does not clear p" else 0
        x = rms(h, W("input_layernorm"), c.rms_norm_eps)
        attention = {"kda": kda64, "mla": mla64, None: lambda W, x: 0 * x}[kind]
        p = p + attention(functools.partial(W, part=kind), x)
        h = p if wrong == "plain residual" else mix64(blocks + [p], W("mlp_res_norm"), W("mlp_res_proj"))
        p = p + ffn64(functools.partial(W, part=ffn), rms(h, W("post_attention_layernorm"), c.rms_norm_eps), L)
        hidden.append(p)
    norm, proj, last = (tensor64(name) for name in FINAL)
    h = p if wrong == "no final mix" else mix64(blocks + [p], norm, proj[0])
    return rms(h, last, c.rms_norm_eps) @ tensor64(HEAD).T, np.stack(hidden)


# %% [markdown]
# The fixture was computed in float32 by mlx-lm; its README puts float64 within 7.2e-4 of it and allows 4e-3. The 32
# positions are the twelve of the prompt and the twenty generated ids.

# %%
ids = np.concatenate([EXPECTED["prompt_ids"], EXPECTED["generated_ids"]])
LOGIT_TOLERANCE = 4e-3
logits64, hidden64 = forward64(ids)


def gate(name, logits):
    "All logits of all positions, against the fixture."
    difference = np.abs(logits - EXPECTED["logits_full"]).max()
    assert difference < LOGIT_TOLERANCE, f"{name}: a logit is off by {difference:.1f}, allowed {LOGIT_TOLERANCE}"
    print(f"{name}: largest logit difference {difference:.1e}")


gate("float64 against mlx", logits64)
assert logits64[11:31].argmax(1).tolist() == EXPECTED["generated_ids"].tolist()

# %% [markdown]
# ## 5.8.2 Four wrong loops that fail no check of shapes
#
# All but the last are one line away from right, and each moves some logit by more than a thousand tolerances. (A layer
# list that is counted from zero instead of one is refused before it gets this far: chapter [5.3].)
#
# [5.3]: 03_config.ipynb

# %%
for wrong in ("boundary does not clear p", "plain residual", "no final mix", "last layer taken for KDA"):
    bad, _ = forward64(ids, wrong)
    moved = np.abs(bad - EXPECTED["logits_full"]).max()
    same = int((bad[11:31].argmax(1) == EXPECTED["generated_ids"]).sum())
    print(f"{wrong:<28} largest logit difference {moved:5.1f}, {same:2d} of 20 ids still right")
    assert moved > 1000 * LOGIT_TOLERANCE

# %% tags=["raises-exception"]
gate("boundary does not clear p", forward64(ids, "boundary does not clear p")[0])


# %% [markdown]
# The last row stands for what a reader of `full_attn_layers` meets in K3. The list counts from one, and its last two
# entries, 92 and 93, are both MLA. A program that alternates by rule takes the last layer for KDA. Its tensors are not
# in the checkpoint, and a program that treats the missing attention as zero still writes text.
#
# ## 5.8.3 The forward pass on the book's kernels
#
# A layer function of chapters 2 to 4 gets its sizes and constants as one tuple: heads, widths, ceilings, epsilons. The
# config holds them all, under the names of the released code. Three functions read them from the config; nothing else
# in the book does.

# %% tags=["export"]
def kda_shape(config: Config) -> KDAShape:
    "The KDAShape of all KDA layers of a model."
    c = config
    return KDAShape(c.kda_num_heads, c.kda_head_dim, c.kda_conv_kernel, c.kda_gate_lower_bound, c.rms_norm_eps)


def mla_shape(config: Config) -> MLAShape:
    "The MLAShape of all MLA layers of a model."
    c = config
    return MLAShape(c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim, c.kv_lora_rank)


def moe_shape(config: Config) -> MoEShape:
    "The MoEShape of all MoE layers of a model. Dense layers use its `situ`."
    c = config
    situ = Situ(c.activation_situ_beta, c.activation_situ_linear_beta)
    return MoEShape(c.num_experts_per_token, c.routed_scaling_factor, situ, c.rms_norm_eps)


# %% [markdown]
# Here are those of the embedded model. `latent_eps` is no field of any config ([3.1.6]): it is the default of
# `MLAShape`.
#
# [3.1.6]: ../03_mla/01_mla.ipynb#3.1.6-The-layer

# %%
for found in (kda_shape(config), mla_shape(config), moe_shape(config)):
    print(found)
assert mla_shape(config).latent_eps == LATENT_EPS != config.rms_norm_eps == kda_shape(config).eps


# %% [markdown]
# Between two forward passes a sequence keeps three things. Per KDA layer: a recurrent state and the last three inputs
# of the convolution, whose size never grows. Per MLA layer: the latent KV cache, one row a token. And one number, the
# position.
#
# A pass that Ctrl-C ends in layer 40 leaves a sequence in which 40 layers have read a token and 53 have not. Nothing
# can undo that, so the sequence remembers it: `complete` is False from the beginning of a pass to its end.

# %% tags=["export"]
class Sequence:
    """What one sequence of tokens carries from one forward pass to the next.

    `position`: tokens read so far. `context`: positions for which there is room. `layers[L]`: a KDAState, or of an MLA
    layer the latent KV cache, float32 [context, kv_lora_rank + qk_rope_head_dim], whose first `position` rows are in
    use. `complete`: False while a forward pass is under way, and after one that did not reach its end.
    """

    def __init__(self, config: Config, context: int) -> None:
        self.config, self.context = config, context
        self.reset()

    def reset(self) -> None:
        "Forget everything: zero KDA states, empty KV caches, position 0."
        self.complete, self.position = False, 0
        self.layers: list[Any] = []  # free the old arrays before allocating new ones: the budget has room for one set
        self.layers = [self._empty_state(L) for L in range(self.config.num_hidden_layers)]
        self.complete = True

    def _empty_state(self, L):
        if self.config.layer_kind(L) == "kda":
            return kda_state(kda_shape(self.config))
        return mla_cache(mla_shape(self.config), self.context)


# %% [markdown]
# The residual stream of chapter [3.2] in one array. `sources[:n]` are the finished blocks, the embedding first;
# `sources[n]` is the running sum. To end a block is to count: `n += 1` turns the running sum into a finished block, and
# nothing is copied.
#
# [3.2]: ../03_mla/02_residual.ipynb

# %% tags=["export"]
class ResidualStream:
    "The residual stream of one forward pass: `sources` float32 [blocks + 1, T, H], of which `n` are finished blocks."

    def __init__(self, tokens: int, config: Config) -> None:
        blocks = -(-config.num_hidden_layers // config.attn_res_block_size)
        self.sources = np.empty((blocks + 1, tokens, config.hidden_size), np.float32)
        self.n, self.eps = 0, config.rms_norm_eps
        self._mixed = np.empty(self.sources.shape[1:], np.float32)

    @property
    def running_sum(self) -> np.ndarray:
        "The running sum, float32 [T, H]: a view of `sources`."
        return self.sources[self.n]

    def end_block(self, y: np.ndarray) -> None:
        "The running sum becomes a finished block, and `y` float32 [T, H] begins the next sum."
        self.n += 1
        self.sources[self.n] = y

    def mixed(self, norm: np.ndarray, proj: np.ndarray) -> np.ndarray:
        "What a half-layer reads, float32 [T, H]: finished blocks and running sum mixed; valid until the next mix."
        if self.n == 0:
            return self.sources[0]  # the embedding alone: there is nothing to choose from
        return mix(self.sources, self.n + 1, norm, proj, self.eps, self._mixed)


# %% [markdown]
# A layer sees its weights as a mapping from short names, `W["q_proj"]`, and asks for each exactly once. Over a whole
# pass the names come in one fixed order, `forward_order` of chapter [5.4]; that is what lets a streamed matrix be read
# before it is asked for.
#
# Layers know arrays and no names. When a product comes out infinite ([1.5.6]), they can say "output row 17" and no
# more. The weights of the pass know which name was taken last, so the error leaves the model with that name.
#
# [5.4]: 04_tensors.ipynb
# [1.5.6]: ../01_mxfp4/05_matmul.ipynb#1.5.6-A-matrix-is-rows-that-arrive

# %% tags=["export"]
class PassWeights:
    "The weights of one forward pass. `last`: the name of the tensor that was taken last."

    def __init__(self, weight: Callable[[str], Any]) -> None:
        self._weight, self.last = weight, ""

    def take(self, name: str) -> Any:
        "A matrix or a float32 vector of the checkpoint, by its full name."
        self.last = name
        return self._weight(name)

    def part(self, L: int, part: str) -> "PartWeights":
        "The weights of a part of layer L: 'kda', 'mla', 'dense', 'moe' or 'norms'."
        return PartWeights(self, L, part)


class PartWeights:
    "The weights of one part of one layer: a mapping from short names to matrices and float32 vectors."

    def __init__(self, weights: PassWeights, L: int, part: str) -> None:
        self._weights, self._layer, self._part = weights, L, part

    def __getitem__(self, short: str, /) -> Any:
        return self._weights.take(tensor_name(self._layer, self._part, short))


# %% [markdown]
# Now the model. It knows equations and their order, and is given everything else: a row of the embedding, a weight by
# its name, the routed experts of a layer. It does not know whether a weight lies in memory or comes from a disk while
# it is multiplied.

# %% tags=["export"]
class RoutedExperts(Protocol):
    "The routed experts of all layers."

    def layer(self, L: int) -> LayerExperts:
        "The experts of layer L, as moe_layer takes them."


class Model:
    """Kimi K3's text stack: the equations of a forward pass and their order.

    `embedding(i)`: row i of the embedding, float32 [H]. `weight(name)`: a matrix or a float32 vector; a pass asks for
    every name of forward_order once, in that order. `experts.layer(L)`: the routed experts of a layer. `threads`:
    threads of arithmetic. A model has no state: what a sequence carries is in its Sequence.
    """

    def __init__(self, config: Config, embedding: Callable[[int], np.ndarray], weight: Callable[[str], Any],
                 experts: RoutedExperts, threads: int) -> None:
        self.config, self.threads = config, threads
        self._embedding, self._weight, self._experts = embedding, weight, experts
        self._kda, self._mla, self._moe = kda_shape(config), mla_shape(config), moe_shape(config)

    def forward(self, ids: Ids[int], sequence: Sequence, wanted: int,
                watch: Callable[[str, int | None, Any], object] | None = None) -> np.ndarray:
        """Read the chunk `ids` (T >= 1 of them); logits float32 [wanted, vocab] of its last `wanted` tokens.

        Advances `sequence` by T positions. Calls `watch(name, layer, value)` for every layer with "router" (MoE: ids,
        weights [T, k]) and "hidden" (running sum [T, H]), then with "blocks", "mix" and "norm", layer None. Raises
        NotFinite if a number is infinite or NaN; its `tensor` is the name of the weight that was taken last.
        """
        weights, watch = PassWeights(self._weight), watch or (lambda *_: None)
        sequence.complete = False
        try:
            x = self._layers(ids, sequence, weights, watch)
            logits = self._logits(x[len(ids) - wanted:], weights)
        except NotFinite as error:
            error.tensor = weights.last
            raise
        sequence.position += len(ids)
        sequence.complete = True
        return logits


# %% [markdown]
# The loop. Attention that closes a block does not add to the running sum: it begins the next one. This is the first of
# the four mistakes above, and here it is one `if`.

# %% tags=["export"]
class Model(Model):
    def _layers(self, ids, sequence, weights, watch):
        "The normed output of the last layer, float32 [T, H]."
        stream = ResidualStream(len(ids), self.config)
        for t, i in enumerate(ids):
            stream.sources[0, t] = self._embedding(i)
        for L in range(self.config.num_hidden_layers):
            attention, feed_forward = layer_parts(self.config, L)
            norms = weights.part(L, "norms")
            x = self._normed(stream, *(norms[short] for short in ATTENTION_NORMS))
            y = self._attention(L, attention, weights, x, sequence)
            if L % self.config.attn_res_block_size == 0:
                stream.end_block(y)
            else:
                stream.running_sum[:] += y
            x = self._normed(stream, *(norms[short] for short in FFN_NORMS))
            stream.running_sum[:] += self._feed_forward(L, feed_forward, weights, x, watch)
            watch("hidden", L, stream.running_sum)
        norm, proj, layernorm = (weights.take(name) for name in FINAL)
        watch("blocks", None, stream.sources[:stream.n])
        h = stream.mixed(norm, proj)
        watch("mix", None, h)
        x = rms_norm(h, layernorm, self.config.rms_norm_eps)
        watch("norm", None, x)
        return x

    def _normed(self, stream, norm, proj, layernorm):
        "What a half-layer's products read: the mixed residual stream, normed; float32 [T, H]."
        return rms_norm(stream.mixed(norm, proj), layernorm, self.config.rms_norm_eps)


# %% [markdown]
# A half-layer is a function of chapters 2 to 4 with its numbers filled in from the config.

# %% tags=["export"]
class Model(Model):
    def _attention(self, L, kind, weights, x, sequence):
        "KDA or MLA of layer L for normed input `x`, float32 [T, H]. Advances the layer's state."
        W, state = weights.part(L, kind), sequence.layers[L]
        if kind == "kda":
            return kda_layer(W, x, state, self._kda, self.threads)
        return mla_layer(W, x, state, sequence.position, self._mla, self.threads)

    def _feed_forward(self, L, kind, weights, x, watch):
        "The dense MLP or the experts of layer L for normed input `x`, float32 [T, H]."
        W = weights.part(L, kind)
        if kind == "dense":
            return dense_mlp(W, x, self._moe.situ, self.threads)
        return moe_layer(W, self._experts.layer(L), x, self._moe, self.threads,
                         on_route=lambda ids, weights: watch("router", L, (ids, weights)))

    def _logits(self, x, weights):
        "float32 [len(x), vocab]. A pass that is asked for no logits ends before the head, 2.3 GB in K3."
        if len(x) == 0:
            return np.empty((0, self.config.vocab_size), np.float32)
        return linear(weights.take(HEAD), x, self.threads)


# %% [markdown]
# ## 5.8.4 The gate
#
# The embedded model is small enough to hold in memory: every matrix is an array, every expert three packed matrices. So
# `weight` is a dictionary, and the experts of a layer are in a list.

# %%
from k3lib.matmul import ResidentMatrix, bf16_to_float32
from k3lib.moe import Expert
from k3lib.tensors import TABLE, forward_order, is_matrix


def in_memory(name):
    "A tensor of the checkpoint as `weight` must give it: a matrix, or a float32 vector."
    array = checkpoint.raw(name)
    if is_matrix(name, checkpoint.extent(name)):
        return ResidentMatrix(array)
    array = bf16_to_float32(array) if array.dtype == np.uint16 else array
    return array.reshape(-1) if array.ndim == 2 else array


class ExpertsInMemory:
    "All routed experts of the embedded model, read once."

    def __init__(self):
        moe_layers = range(config.first_k_dense_replace, config.num_hidden_layers)
        self.experts = {L: [self.read(L, e) for e in range(config.num_experts)] for L in moe_layers}

    def read(self, L, e):
        return Expert.packed([checkpoint.raw(expert_name(L, e, row.short)) for row in TABLE["expert"]])

    def layer(self, L):
        return LayerInMemory(self.experts[L])


class LayerInMemory:
    def __init__(self, experts):
        self.experts = experts

    def request(self, ids):
        self.requested = ids

    def map(self, work, threads):
        for e in self.requested:
            work(e, self.experts[e])


weights = {name: in_memory(name) for name in forward_order(config)}
embedding = bf16_to_float32(checkpoint.raw(EMBED))
model = Model(config, embedding.__getitem__, weights.__getitem__, ExpertsInMemory(), threads=1)

# %% [markdown]
# Logits of all 32 positions, the running sum after each of the 13 layers, and every routing decision, within the
# fixture's tolerances: the prompt in one chunk, then step by step.

# %%
hidden, routed = {}, {}


def watch(name, L, value):
    if name == "hidden":
        hidden[L] = value.copy()
    if name == "router":
        routed[L] = np.sort(value[0], 1)


sequence = Sequence(config, context=64)
rows = [model.forward(EXPECTED["prompt_ids"], sequence, wanted=12, watch=watch)]
rows += [model.forward([i], sequence, wanted=1) for i in EXPECTED["generated_ids"]]
logits = np.concatenate(rows)
assert sequence.position == 32
assert np.abs(logits - EXPECTED["logits_full"]).max() < LOGIT_TOLERANCE
assert all((routed[L] == EXPECTED["router_ids"][L - 1]).all() for L in routed)
assert logits[11:31].argmax(1).tolist() == EXPECTED["generated_ids"].tolist()
print("logits of 32 positions within", LOGIT_TOLERANCE, "- routing equal in", len(routed), "layers - 20 of 20 ids")


# %% [markdown]
# Rounding grows with depth, and it grows alike in two float32 implementations that share no code. A mistake would be a
# step in this picture, at the layer that makes it.

# %% tags=["nbval-ignore-output"]
def relative(found, wanted):
    return [np.abs(found[L] - wanted[L]).max() / np.abs(wanted[L]).max() for L in range(13)]


fig, ax = plt.subplots()
ax.semilogy(relative(hidden, hidden64[:, :12]), "o-", label="this book, float32")
ax.semilogy(relative(EXPECTED["hidden_after_layer"], hidden64[:, :12]), "s--", label="mlx, float32")
ax.axhline(4e-4, color="0.6", lw=1)
ax.text(0, 4.4e-4, "tolerance", fontsize=8, color="0.4")
ax.set(xlabel="layer", ylabel="largest difference from float64,\nover the layer's largest",
       title="Two float32 forward passes drift from float64 by as much")
ax.legend()
plt.show()


# %% [markdown]
# ## 5.8.5 One answer
#
# A prompt may be cut into chunks of any size: the logits are the same bytes, because each output is one row's dot
# product in a fixed order, and each sum over positions, keys, ranks and sources is taken in the order of its index.
# That the same holds for weights that come from a disk at any budget is for chapters [5.26] and [5.34] to show.
#
# [5.26]: 26_engine.ipynb
# [5.34]: 34_decode.ipynb

# %%
def in_chunks(size, ids=ids[:16]):
    sequence, chunks = Sequence(config, context=len(ids)), [ids[at:at + size] for at in range(0, len(ids), size)]
    return np.concatenate([model.forward(chunk, sequence, wanted=len(chunk)) for chunk in chunks]).tobytes()


for size in (1, 2, 3, 5, 12, 16):
    assert in_chunks(size) == logits[:16].tobytes()
print("6 chunk sizes, one answer: True")

# %% [markdown]
# ## Summary
#
# - A forward pass takes its tensors in an order that is known before it starts; only experts depend on the data.
# - The residual stream is a few block sums and one running sum; a block ends with `n += 1`.
# - Chunks of any size give equal bytes, because every sum has a fixed order. The chapter compares the bytes.
#
# ## Exercises
#
# Answers: [exercises of part 5](../answers/05_streaming.ipynb).
#
# 1. Count the sources of the first mix of each of the 13 layers. From which layer on are there more than two?
# 2. Swap `self_attention_res_*` and `mlp_res_*` in one layer. Which layer moves the logits most? Does any keep all
#    twenty ids?
# 3. Count the bytes that one forward pass of K3 reads, from shapes alone, and compare with the 108.8 GB of chapter
#    [5.6].
#
# Next: [5.9 Past the page cache](09_disk.ipynb) begins to read those bytes.
#
# [5.6]: 06_census.ipynb
