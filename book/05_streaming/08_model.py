# %% [markdown]
# # 5.8 Ninety-three layers, walked once a token
#
# Kimi K3's text stack is one loop over 93 layers. Each layer mixes the residual blocks, attends (KDA or MLA), mixes again and
# feeds forward. This chapter writes that loop twice, once in float64 for the eye and once on the book's kernels, and holds
# both against logits, hidden states and routing that another implementation computed. At the end you can follow a token
# from its id to its logits and name every tensor it meets, in order.
#
# [5.6 Where every weight lies](06_checkpoint.ipynb) · [contents](../README.md) · [5.9 Past the page cache](09_disk.ipynb)
#
# | symbol | meaning | shape | in code |
# |---|---|---|---|
# | $x_t$ | id of token $t$ | | `ids` |
# | $p$ | running sum since the last block began | $[T, H]$ | `sources[n]` |
# | $b_0 \ldots b_{n-1}$ | finished blocks, the embedding first | $[n, T, H]$ | `sources[:n]` |
# | $h$ | what a half-layer reads: a mix of blocks and $p$ | $[T, H]$ | `h` |
# | $B$ | layers in a block, `attn_res_block_size` | 12 in K3, 3 here | |

# %%
import functools
from pathlib import Path

import matplotlib.pyplot as plt
from safetensors.numpy import load_file

from k3lib.checkpoint import Checkpoint
from k3lib.config import read_config
from k3lib.mxfp4 import decode

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")
FOLDER = ROOT / "fixtures" / "oracle13" / "model"
EXPECTED = load_file(FOLDER.parent / "expected.safetensors")
config, checkpoint = read_config(FOLDER), Checkpoint(FOLDER)


# %% [markdown]
# ## 5.8.1 The whole model in float64
#
# Slow, dense and close to the equations: each expert is decoded, each matrix is widened, all positions are computed at once
# with the full attention matrix. `wrong` switches on one mistake at a time; the traps that live in single layers had their
# turn in their chapters, these are the ones only the walk can make.

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
    "KDA over all positions from an empty state (chapter 2.1)."
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
    shared = situ64(x @ W("shared_experts.gate_proj").T, x @ W("shared_experts.up_proj").T) @ W("shared_experts.down_proj").T
    return rms(u, W("routed_expert_norm"), c.rms_norm_eps) @ W("routed_expert_up_proj").T + shared


# %%
@functools.cache
def tensor64(name):
    return checkpoint.tensor(name).astype(np.float64)


@functools.cache
def expert64(L, e, which):
    extents = f"language_model.model.layers.{L}.block_sparse_moe.experts.{e}.{which}.weight_"
    return decode(checkpoint.raw(extents + "packed"), checkpoint.raw(extents + "scale")).astype(np.float64)


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
# The fixture was computed in float32 by mlx-lm; its README puts float64 within 7.2e-4 of it and allows 4e-3. The 32 positions
# are the twelve of the prompt and the twenty generated ids.

# %%
ids = np.concatenate([EXPECTED["prompt_ids"], EXPECTED["generated_ids"]])
LOGIT_TOLERANCE = 4e-3
logits64, hidden64 = forward64(ids)
difference = np.abs(logits64 - EXPECTED["logits_full"]).max()
print(f"float64 against mlx: largest logit difference {difference:.1e}")
assert difference < LOGIT_TOLERANCE
assert logits64[11:31].argmax(1).tolist() == EXPECTED["generated_ids"].tolist()

# %% [markdown]
# ## 5.8.2 Four walks that still print fluent text
#
# None of these fails a shape check. All but the last layer's kind are one line away from right; each moves some logit by
# more than a thousand tolerances. (A layer list read from zero and not from one is refused before it gets this far: chapter 5.3.)

# %%
for wrong in ("boundary does not clear p", "plain residual", "no final mix", "last layer taken for KDA"):
    bad, _ = forward64(ids, wrong)
    moved = np.abs(bad - EXPECTED["logits_full"]).max()
    same = int((bad[11:31].argmax(1) == EXPECTED["generated_ids"]).sum())
    print(f"{wrong:<28} largest logit difference {moved:5.1f}, {same:2d} of 20 ids still right")
    assert moved > 1000 * LOGIT_TOLERANCE

# %% [markdown]
# The last row stands for what a reader of `full_attn_layers` meets in K3: layers 92 and 93 are both MLA, and a map that
# alternates by rule calls the last one KDA. Its tensors are not there; an engine that treats the missing attention as zero
# goes on talking.
#
# ## 5.8.3 The walk on the book's kernels
#
# A layer function sees its weights as a mapping from short names. Asking for a name takes the next tensor of the walk: from
# memory if it is pinned, else from the ring, and only in this order.

# %% tags=["export"]
import contextlib
import dataclasses
import hashlib
import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
import numpy as np
from k3lib.matmul import NotFinite, bf16_to_float32, check_product, linear
from k3lib.functions import rms_norm
from k3lib.kda import kda_layer, kda_state
from k3lib.mla import mla_layer
from k3lib.residual import mix
from k3lib.moe import Expert, dense_mlp, moe_layer
from k3lib.fileio import CheckpointError, UsageError, open_shard, read_exactly, whole_file
from k3lib.tensors import EMBED, EXPERT_NAME, FINAL, HEAD, NORMS, layer_parts, tensor_name
from k3lib.header import header_bytes


# %% tags=["export"]
class Weights:
    "One part of one layer as a mapping from short names to matrices and vectors, taken as they are asked for: take(full name)."

    def __init__(self, take, L, part):
        self.take, self.L, self.part = take, L, part

    def __getitem__(self, short):
        return self.take(tensor_name(self.L, self.part, short))


# %% [markdown]
# The layers only know arrays, so a product that comes out infinite or NaN (1.4.4) reaches the walk as "output row 17". The walk knows which tensor it
# took last. It reads the row again and says what is wrong: a damaged number in the file, or a sum that float32 could not hold.

# %% tags=["export"]
def not_finite_in(files, extent, name, begin, end):
    "What is wrong in rows begin..end of a tensor, one line, or None: its first infinity, NaN or E8M0 scale of 255."
    rows = files.array(extent, "other", begin, end - begin)
    bad = rows == 255 if extent.dtype == "U8" else ~np.isfinite(bf16_to_float32(rows) if extent.dtype == "BF16" else rows)
    if not bad.any():
        return None
    row, *columns = np.argwhere(bad)[0].tolist()
    value, kind = rows[row, *columns], {"U8": "E8M0 scale", "BF16": "bfloat16", "F32": "float32"}[extent.dtype]
    found = f"{kind} 0x{value:04x}" if extent.dtype == "BF16" else f"{kind} {value}"
    place = ", ".join([f"row {begin + row}", *(f"column {i}" for i in columns)])
    return f"{extent.file}: {name}, {place}: {found}, expected a finite number: damaged"


# %% [markdown]
# A state is also saved: half a gigabyte for K3, and computing it again takes as long as it took. It is written under another name first, so
# that a full disk or a cut wire leaves the old file or none; and it says of which model it is. The layout follows from the model and the position, so a
# file is read by comparing it with the only header it can have. It is a safetensors file, whose library would want all of it in memory twice: hence a
# stream. The last 512 bytes are the description, a tensor like the others, because the checksum is known last.

# %% tags=["export"]
class StateError(CheckpointError):
    "A saved state that is damaged, or of another model or version."


STATE_VERSION, ABOUT = 1, 512  # bytes of the description


STATE_READ_BYTES = 1 << 20  # bytes read at a time


def about_bytes(about):
    "The description of a state as its last bytes: JSON, padded."
    return json.dumps(about).encode().ljust(ABOUT)


def file_pieces(file, begin, end, where):
    "Bytes begin..end of an open file, a piece at a time."
    for at in range(begin, end, STATE_READ_BYTES):
        piece = bytearray(min(STATE_READ_BYTES, end - at))
        read_exactly(file, piece, at, where)
        yield piece


# %% [markdown]
# The class below owns what a sequence carries: per KDA layer a state and three inputs of history, per MLA layer the latent
# cache, and one number, the position. `sources` holds the finished blocks and, at index `n`, the running sum; a block boundary
# is `n += 1`, so the snapshot and the fresh sum are two rows of one array and nothing is copied.

# %% tags=["export"]
def check_range(ids, config):
    "UsageError for an id that the vocabulary has not."
    for i in ids:
        if not 0 <= i < config.vocab_size:
            raise UsageError(f"token id {i} is out of range: the vocabulary has ids 0..{config.vocab_size - 1}")


class Model:
    """The decoder: walks all layers once a pass, for one token or a chunk, and carries the sequence's state.

    Made by k3lib.load. `trunk`, `experts`: where weights come from; `context`: positions there is room for; `chunk`: the
    most tokens a pass takes. One call at a time, in the process that made it: a second thread and a forked child are refused
    with a RuntimeError. So is, until reset() or load_state(), what would go on after a pass that was broken off.
    """

    def __init__(self, config, trunk, experts, context, chunk):
        self.config, self.trunk, self.experts = config, trunk, experts
        self.context, self.chunk = context, chunk
        self.on_layer = lambda L: None  # called after every layer of every pass: a token takes seconds
        for name, value in trunk.resident.items():  # matrices show in their products, but a vector may meet a zero or a tanh
            used = config.kda_num_heads if name.endswith("A_log") else None  # the rest of it is padding
            if isinstance(value, np.ndarray) and not np.isfinite(value[:used]).all():
                extent = trunk.extents[name]
                raise CheckpointError(not_finite_in(trunk.files, extent, name, 0, extent.shape[0]))
        self.turn = 0  # grows with whatever moves the sequence
        self._closed = False
        self._process, self._call, self._identity = os.getpid(), threading.Lock(), None
        self.reset()

    @contextlib.contextmanager
    def _alone(self):
        "A call that moves or reads the sequence. Raises RuntimeError in a forked process and while another call is under way."
        if os.getpid() != self._process:
            raise RuntimeError(f"this model belongs to process {self._process}, whose readers this one, forked from it, has not: load one here")
        if self._closed:
            raise RuntimeError("this model is closed: load one")
        if not self._call.acquire(blocking=False):
            raise RuntimeError("another call of this model is under way: one at a time, so load a model for each thread")
        try:
            self.turn += 1
            yield
        finally:
            self._call.release()

    def reset(self):
        "Forget the sequence: zero KDA state, empty latent cache, position 0."
        c = self.config
        with self._alone():
            self.position, self._whole = 0, False
            width = c.kv_lora_rank + c.qk_rope_head_dim
            self.state = None  # gone before the new one comes: there is room for one
            self.state = [kda_state(c.kda_num_heads, c.kda_head_dim, c.kda_conv_kernel) if c.layer_kind(L) == "kda"
                          else np.zeros((self.context, width), np.float32) for L in range(c.num_hidden_layers)]
            self._whole = True

    def prefill(self, ids):
        "Read `ids` (1 or more) after what came before; logits float32 [vocab] of the last. Raises UsageError on a bad id."
        return self.forward(ids, last_only=True)[-1]

    def step(self, token):
        "Read one id; logits float32 [vocab]."
        return self.prefill([token])

    def forward(self, ids, last_only=False, watch=None):
        """Read `ids`; logits float32 [T, vocab], or [1, vocab] of the last one. The bits do not depend on `chunk`.

        `watch(name, layer, array)` is shown "hidden" (the running sum, [T, H]) and "router" (ids and weights, [T, k]) of
        every layer, then "blocks", "mix" and "norm"; a chunk at a time.
        """
        with self._alone():
            ids = self._checked(ids)
            rows = []
            for first in range(0, len(ids), self.chunk):
                part = ids[first:first + self.chunk]
                final = first + len(part) == len(ids)
                self._whole = False
                try:
                    x = self._layers(part, watch or (lambda *_: None))
                    rows.append(self._head(x[-1:] if last_only else x, wanted=final or not last_only))
                except NotFinite as error:
                    raise CheckpointError(self._cause(error)) from None
                self.position += len(part)
                self._whole = True
            return rows[-1] if last_only else np.concatenate(rows)

    def _check_whole(self):
        if not self._whole:
            raise RuntimeError("a pass was broken off, so some layers have read a token that others have not: reset() or load_state() first")

    def _checked(self, ids):
        self._check_whole()
        ids = list(ids) if isinstance(ids, Iterable) and not isinstance(ids, (str, bytes)) else [ids]
        if not ids:
            raise UsageError("the prompt is empty: at least one token id is needed")
        for i in ids:
            if not isinstance(i, (int, np.integer)) or isinstance(i, bool):
                raise UsageError(f"{i!r} is not a token id: whole numbers are needed")
        check_range(ids, self.config)
        if self.position + len(ids) > self.context:
            raise UsageError(f"{self.position} + {len(ids)} positions do not fit the context of {self.context} this model was loaded for")
        return [int(i) for i in ids]

    def _take(self, name):
        self._taken = name
        return self.trunk.take(name)

    def _cause(self, error):
        "What to say of a NotFinite: the damaged number in the rows it names, else the tensor at which an activation overflowed."
        name, extent = self._taken, self.trunk.checkpoint.extent(self._taken)
        L = name.split(".layers.")[1].split(".")[0] if ".layers." in name else None
        weights = name, extent
        if error.matrix:
            e, matrix = error.matrix
            extents = Expert(*self.experts.extents(int(L), e))
            name, extent = EXPERT_NAME.format(L, e, matrix, "packed"), getattr(extents, matrix)
            weights = EXPERT_NAME.format(L, e, matrix, "scale"), getattr(extents, matrix + "_scale")
        damage = error.rows and not_finite_in(self.trunk.files, weights[1], weights[0], *error.rows)
        where = "after the last layer" if L is None else f"layer {L}"
        return damage or f"{extent.file}: {where}, {name}: {error}; what the file holds there is finite: an activation overflows"

    def _layers(self, ids, watch):
        "The normed output of the last layer, float32 [T, H]."
        c, take = self.config, self._take
        eps, T, H = c.rms_norm_eps, len(ids), c.hidden_size
        blocks = -(-c.num_hidden_layers // c.attn_res_block_size)
        sources = np.empty((blocks + 1, T, H), np.float32)  # finished blocks, then the running sum at index n
        h = np.empty((T, H), np.float32)
        self.trunk.begin()
        for t, i in enumerate(ids):
            sources[0, t] = self.trunk.row(EMBED, i)
            self._taken = EMBED
            check_product(sources[:1, t], sources[:1, t], lambda _: (i, i + 1))
        n = 0
        for L in range(c.num_hidden_layers):
            attention, ffn = layer_parts(c, L)
            norm, proj, layernorm = (take(tensor_name(L, "norms", short)) for short in NORMS[:3])
            if n:
                mix(sources, n + 1, norm, proj, eps, h)
            else:
                h[:] = sources[0]
            y = self._attention(L, attention, rms_norm(h, layernorm, eps))
            if L % c.attn_res_block_size == 0:
                n += 1
                sources[n] = y
            else:
                sources[n] += y
            norm, proj, layernorm = (take(tensor_name(L, "norms", short)) for short in NORMS[3:])
            mix(sources, n + 1, norm, proj, eps, h)
            sources[n] += self._ffn(L, ffn, rms_norm(h, layernorm, eps), watch)
            watch("hidden", L, sources[n])
            self.on_layer(L)
        norm, proj, layernorm = (take(name) for name in FINAL)
        mix(sources, n + 1, norm, proj, eps, h)
        watch("blocks", None, sources[:n])
        watch("mix", None, h)
        x = rms_norm(h, layernorm, eps)
        watch("norm", None, x)
        return x

    def _attention(self, L, kind, x):
        c, W = self.config, Weights(self._take, L, kind)
        if kind == "kda":
            return kda_layer(W, x, self.state[L], c.rms_norm_eps, c.kda_gate_lower_bound)
        return mla_layer(W, x, self.state[L], self.position, c.num_attention_heads, c.qk_nope_head_dim,
                         c.qk_rope_head_dim, c.v_head_dim, LATENT_EPS)

    def _ffn(self, L, kind, x, watch):
        c, W = self.config, Weights(self._take, L, kind)
        beta, linear_beta = c.activation_situ_beta, c.activation_situ_linear_beta
        if kind == "dense":
            return dense_mlp(W, x, beta, linear_beta)
        return moe_layer(W, self.experts.layer(L), x, c.num_experts_per_token, c.routed_scaling_factor, beta, linear_beta,
                         c.rms_norm_eps, on_route=lambda ids, weights: watch("router", L, (ids, weights)))

    def _head(self, x, wanted):
        "Logits float32 [T, vocab], or None: a pass whose logits nobody wants ends before the head, and the next begins anew."
        return linear(self._take(HEAD), x) if wanted else None

    def identity(self):
        """What a state belongs to, in hex: sha256 of the config, and of all vectors and the first row of every matrix of the walk.

        The same at any budget and for a packed trunk. It does not see other rows, the embedding and the experts: `k3 verify` does.
        """
        if self._identity is None:
            config = {k: sorted(v) if isinstance(v, frozenset) else v for k, v in dataclasses.asdict(self.config).items()}
            digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
            for name, extent in self.trunk.extents.items():
                value = self.trunk.resident.get(name)
                first_row = value if isinstance(value, np.ndarray) else self.trunk.files.array(extent, "other", 0, 1)
                digest.update(f"{name} {extent.dtype} {extent.shape}\n".encode())
                digest.update(np.ascontiguousarray(first_row))
            self._identity = digest.hexdigest()
        return self._identity

    def _saved(self, position):
        "[(name, array)] of what a sequence of `position` tokens carries: the arrays of the state, of a latent cache the rows in use."
        saved = []
        for L, state in enumerate(self.state):
            parts = {"latent": state[:position]} if isinstance(state, np.ndarray) else state._asdict()
            saved += [(f"layers.{L}.{part}", array) for part, array in parts.items()]
        return saved

    def _state_header(self, saved):
        return header_bytes([*((name, "F32", array.shape) for name, array in saved), ("about", "U8", (ABOUT,))])

    def _about(self, position, sha256=""):
        return {"format": "k3lib state", "version": STATE_VERSION, "model": self.identity(), "position": position, "sha256": sha256}

    def save_state(self, file):
        "Write what this sequence carries to `file`, whole or not at all: a safetensors file. Raises OSError."
        with self._alone():
            self._check_whole()
            saved = self._saved(self.position)
            digest = hashlib.sha256(about_bytes(self._about(self.position)))
            with whole_file(file) as out:
                for data in (self._state_header(saved), *(array.reshape(-1) for _, array in saved)):
                    digest.update(data)
                    out.write(data)
                out.write(about_bytes(self._about(self.position, digest.hexdigest())))

    def load_state(self, file):
        """Go on with the sequence that save_state has written to `file`, at whatever budget, number of threads and context it was.

        Raises FileNotFoundError, StateError for a file that is damaged or of another model or version, UsageError if the context is too
        small; the model has not changed then. A file that changes or fails during the second reading leaves a model to be reset.
        """
        path = Path(file)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}, expected a saved state")
        with self._alone(), open_shard(path) as source:
            try:
                position = self._check_state(source, path)
                saved = self._saved(position)
                at = len(self._state_header(saved))
                self._whole = False
                for _, array in saved:
                    read_exactly(source, array.reshape(-1).view(np.uint8), at, path)
                    at += array.nbytes
                self._check_state(source, path)
            except CheckpointError as error:
                raise StateError(str(error)) from None
            self.position, self._whole = position, True

    def _check_state(self, source, path):
        "The position of the state in the open file `source`. Raises StateError and UsageError."
        size = os.fstat(source.fileno()).st_size
        last = b"".join(file_pieces(source, max(0, size - ABOUT), size, path))
        try:
            about = json.loads(last)
            position, sha256 = about["position"], about["sha256"]
            wrong = not (about["format"] == "k3lib state" and type(position) is int and 0 <= position < 1 << 40)
        except (ValueError, KeyError, TypeError, RecursionError):
            wrong = True
        if wrong:
            raise StateError(f"{path}: the last {ABOUT} of {size:,} bytes are not the description of a saved state: truncated, damaged, or something else")
        if about["version"] != STATE_VERSION:
            raise StateError(f"{path}: a state of version {about['version']!r:.40}, expected {STATE_VERSION}")
        if about["model"] != self.identity():
            raise StateError(f"{path}: the state of another model, {about['model']!r:.20}, expected {self.identity():.16}")
        if position > self.context:
            raise UsageError(f"{path}: a state of {position} positions does not fit the context of {self.context} this model was loaded for")
        saved = self._saved(position)
        head = self._state_header(saved)
        expected = len(head) + sum(array.nbytes for _, array in saved) + ABOUT
        if size != expected:
            raise StateError(f"{path}: {size:,} bytes, expected {expected:,} for {position} positions")
        digest = hashlib.sha256(about_bytes(self._about(position)))
        for piece in file_pieces(source, 0, size - ABOUT, path):
            digest.update(piece)
        if last != about_bytes(self._about(position, digest.hexdigest())):
            raise StateError(f"{path}: sha256 {digest.hexdigest():.16}..., expected {sha256!r:.16}...: damaged")
        return position

    def close(self):
        "End the readers, close the shards and give the weights' memory back; `with` does it too. A forked process has nothing to close."
        if os.getpid() != self._process:
            return
        self._closed = True
        self.experts.close()
        self.trunk.close()
        self.trunk.files.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


# %% [markdown]
# ## 5.8.4 The gate
#
# Logits of all 32 positions, the running sum after each of the 13 layers, and every routing decision, within the fixture's
# tolerances.

# %%
from k3lib.experts import Experts, expert_slot_bytes
from k3lib.trunk import Files, Trunk


def small_model(chunk, pinned):
    "A Model with a ring of four slots and four expert slots; everything in `pinned` stays in memory."
    files = Files()
    trunk = Trunk(checkpoint, names, pinned, row_multiples(config), files, lambda name: "trunk", 4, 40_000, 2)
    six = lambda L, e: list(checkpoint.expert(L, e).values())
    return Model(config, trunk, Experts(six, files, 4, expert_slot_bytes(six(1, 0)), 2, range(1, config.num_hidden_layers)), context=64, chunk=chunk)


# %%
hidden, routed = {}, {}


def watch(name, L, value):
    if name == "hidden":
        hidden[L] = value.copy()
    if name == "router":
        routed[L] = np.sort(value[0], 1)


model = small_model(chunk=12, pinned=frozenset())
rows = [model.forward(EXPECTED["prompt_ids"], watch=watch)]
rows += [model.step(i)[None] for i in EXPECTED["generated_ids"]]
model.close()
logits = np.concatenate(rows)
assert np.abs(logits - EXPECTED["logits_full"]).max() < LOGIT_TOLERANCE
assert all((routed[L] == EXPECTED["router_ids"][L - 1]).all() for L in routed)
assert logits[11:31].argmax(1).tolist() == EXPECTED["generated_ids"].tolist()
print("logits of 32 positions within", LOGIT_TOLERANCE, "- routing equal in", len(routed), "layers - 20 of 20 ids")


# %% [markdown]
# Rounding grows with depth, and grows alike in two float32 implementations that share no code. A mistake would be a step in
# this picture, at the layer that makes it.

# %% tags=["nbval-ignore-output"]
def relative(found, wanted):
    return [np.abs(found[L] - wanted[L]).max() / np.abs(wanted[L]).max() for L in range(13)]


fig, ax = plt.subplots()
ax.semilogy(relative(hidden, hidden64[:, :12]), "o-", label="this book, float32")
ax.semilogy(relative(EXPECTED["hidden_after_layer"], hidden64[:, :12]), "s--", label="mlx, float32")
ax.axhline(4e-4, color="0.6", lw=1)
ax.text(0, 4.4e-4, "tolerance", fontsize=8, color="0.4")
ax.set(xlabel="layer", ylabel="largest difference from float64,\nover the layer's largest", title="Two float32 walks drift from float64 by as much")
ax.legend()
plt.show()


# %% [markdown]
# ## 5.8.5 One answer
#
# Chunks of any size, weights streamed or pinned: the logits are the same bytes, because each output is one row's dot product
# in a fixed order and each sum over positions, keys, ranks and sources is taken in the order of its index.

# %%
def run(chunk, pinned):
    model = small_model(chunk, pinned)
    rows = [model.forward(ids[:12])] + [model.step(i)[None] for i in ids[12:16]]
    model.close()
    return np.concatenate(rows).tobytes()


reference = logits[:16].tobytes()
for chunk in (1, 2, 3, 5, 12):
    assert run(chunk, frozenset()) == reference
assert run(12, frozenset(names)) == run(4, frozenset(names[::2])) == reference
print("7 ways to cut and hold, one answer: True")

# %% [markdown]
# ## Summary
#
# - A pass takes its tensors in an order that is known before it starts; only experts depend on the data.
# - The residual stream is a handful of block sums and one running sum; the boundary is `n += 1`.
# - Equal bytes across chunks, budgets and threads is a property of sums with fixed order, tested here by comparing bytes.
#
# ## Exercises
#
# 1. In `forward64`, store the running sum after the boundary mix and show which of the 13 layers see more than two sources.
# 2. Swap `self_attention_res_*` and `mlp_res_*` in one layer. Which layer moves the logits most? Does any keep all twenty ids?
# 3. Count the bytes one pass over K3's walk reads, from shapes alone, and compare with the 108.8 GB of chapter 5.6.
#
# Next: [5.6 The dial](06_decode.ipynb) spends a budget.

# %% tags=["export"]
LATENT_EPS = 1e-6  # of the two MLA latent norms: the reference class's default, not rms_norm_eps
