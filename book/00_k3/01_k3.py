# %% [markdown]
# # 0.1 K3 on one page
#
# Kimi K3 is a language model with 2.78 trillion parameters. Its weights take 1.56 TB, more than the memory of almost
# any machine. This book derives every part of the model, and it builds an engine that runs the model in a few GB of
# memory, because the engine reads the weights from disk while it computes.
#
# This page shows the whole model before its parts. At the end you know what each part is for, you have read a complete
# forward pass, and you can say how many bytes one token needs.
#
# > **Without this book's engine:** a machine needs 1,560 GB<!--claim all--> of memory for the weights.
# >
# > **With it:** about 1 GB is enough. A token then reads 137 GB,<!--claim token--> in 19.6 s<!--claim seconds--> from a
# > disk of 7 GB/s. More memory saves reading.
#
# You need Python with NumPy, matrix products, and the idea that a neural network is a chain of them. You need not know
# attention. The page runs in less than half a minute. Every symbol of the book is in [Notation](../notation.md), every
# word of the trade in the [Glossary](../glossary.md).
#
# [contents](../README.md) ·
# [1.1 Four bits a weight](../01_mxfp4/01_mxfp4.ipynb)

# %%
import sys
from pathlib import Path

from k3lib.config import read_config

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
sys.path.insert(0, str(ROOT / "book"))
import schematics

k3 = read_config(ROOT / "fixtures/k3")  # the numbers of the released model, without its weights

# %% [markdown]
# ## 0.1.1 The picture
#
# Text enters the model as a list of ids, one for each token: a token is a word or a piece of a word. For every position
# the model computes one number for each id that could come next. These numbers are called logits. The id with the
# largest logit is the most likely next token. To write text, a program appends one id and runs the model again.
#
# The number at the right of a box is the chapter that derives it. The bytes are those in the released files.

# %%
schematics.architecture(k3)

# %% [markdown]
# ## 0.1.2 What each box is for
#
# **Embedding.** A matrix with one row for each id. The row of a token's id is the vector with which the token begins.
#
# **Residual stream.** All layers communicate through it. A layer reads vectors from the stream and adds its result to
# the stream, so no layer has to repeat what an earlier layer has already found.
#
# **Mix** ([chapter 3.2](../03_mla/02_residual.ipynb)). In most models a layer reads the sum of everything before it. In
# K3 the stream keeps up to nine vectors: the embedding, the sum of each finished block of twelve layers, and the sum of
# the present block. A mix is a weighted average of these vectors. The weights are computed anew for every token.
#
# **Attention.** The only place where a token sees other tokens. Each token makes three vectors: a *query* that says
# what the token looks for, a *key* that says what it offers, and a *value* that is handed over when a later query
# matches the key. K3 has two kinds of attention, and each layer has one of them.
#
# **MLA** ([chapter 3.1](../03_mla/01_mla.ipynb)). The exact kind: every query is compared with the keys of all earlier
# tokens. Therefore something must be kept of each token. Instead of the keys and values of 96 heads, MLA keeps 576
# numbers, from which all these keys and values can be computed.
#
# **KDA** ([chapter 2.2](../02_kda/02_kda.ipynb)). The kind that needs constant memory. Each head keeps one 128 × 128
# matrix, which maps keys to values. A new pair is written in three steps: the rows of the matrix fade, each at its own
# speed; the matrix is asked what it holds under the new key; only the difference from the new value is added. A query
# is answered by one product with the matrix.
#
# **Feed-forward: experts** (chapters [4.1](../04_moe_router/01_router.ipynb) and
# [4.2](../04_moe_router/02_moe.ipynb)). What attention has collected is now worked on, for each token by itself. A
# layer has 896 small networks, the experts. A router gives each expert a score, and only the 16 with the highest scores
# work on the token. So a token uses a small part of the weights. Two more experts, the shared ones, work on every
# token. The first layer has one dense network in place of the experts.
#
# **MXFP4** ([chapter 1.1](../01_mxfp4/01_mxfp4.ipynb)). The format of the experts' weights: four bits a weight, and
# eight more bits that 32 neighbours share. All other weights have 16 or 32 bits.
#
# **Head.** A matrix that turns the last vector into one logit for each id.
#
# The numbers in these paragraphs are those of the released config:

# %%
assert (k3.num_experts, k3.num_experts_per_token, k3.num_shared_experts) == (896, 16, 2)
assert (k3.num_attention_heads, k3.kda_num_heads, k3.kda_head_dim) == (96, 96, 128)
assert (k3.kv_lora_rank + k3.qk_rope_head_dim, k3.first_k_dense_replace) == (576, 1)
assert (k3.attn_res_block_size, schematics.sources_of(k3)) == (12, 9)

# %% [markdown]
# ## 0.1.3 The whole forward pass
#
# The two cells after the next two are the complete model, in float64 and without any care for speed. They follow the
# equations of the chapters. `x` has one row for each token, `T` is the number of tokens, and `H` is the width of the
# stream. `W` holds the weights of one layer. The comments give shapes. The numbers come from the config of a small
# model that has every part of K3. It was trained to read very short stories and to answer questions about them
# (`fixtures/stories`).

# %% tags=["parameters"]
model = "stories"  # the small model to run: a folder of fixtures/

# %%
import numpy as np
from safetensors.numpy import load_file

from k3lib.checkpoint import Checkpoint
from k3lib.mxfp4 import decode
from k3lib.tensors import EMBED, FINAL, HEAD, TABLE, expert_name, layer_parts, tensor_name
from k3lib.tokenizer import Tokenizer

folder = ROOT / "fixtures" / model / "model"
config, checkpoint = read_config(folder), Checkpoint(folder)
c, heads, d = config, config.kda_num_heads, config.kda_head_dim
print(f"{model}: {c.num_hidden_layers} layers of width {c.hidden_size}, {heads} KDA heads of {d}, "
      f"{c.num_experts_per_token} of {c.num_experts} experts")


# %%
def rms(x, w, eps=c.rms_norm_eps):  # x [..., n], w [n]: scaled so that the mean square is 1
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w

def sigmoid(x):
    return 1 / (1 + np.exp(-x))

def softmax(x, axis):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)

def mlp(gate, up, down, x):
    a, b = c.activation_situ_beta, c.activation_situ_linear_beta
    g, u = x @ gate.T, x @ up.T
    return (a * np.tanh(g / a) * sigmoid(g) * b * np.tanh(u / b)) @ down.T

def mix(sources, norm, proj):
    s = np.stack(sources)  # [n, T, H]
    a = softmax(rms(s, norm) @ proj, axis=0)  # [n, T]: a weight for each source and token
    return (a[..., None] * s).sum(0)  # [T, H]

def kda(W, x):
    q, k, v = (convolution(x @ W[n + "_proj"].T, W[n + "_conv1d"]) for n in "qkv")  # [T, heads, d]
    q, k = (u / np.sqrt((u * u).sum(-1, keepdims=True) + 1e-6) for u in (q, k))  # length 1
    z = (x @ W["f_a_proj"].T @ W["f_b_proj"].T + W["dt_bias"]).reshape(q.shape)
    alpha = np.exp(c.kda_gate_lower_bound * sigmoid(np.exp(W["A_log"][:heads, None]) * z))  # [T, heads, d]
    beta = sigmoid(x @ W["b_proj"].T)  # [T, heads]
    S, o = np.zeros((heads, d, d)), np.empty_like(q)
    for t in range(len(x)):
        S = alpha[t][:, :, None] * S  # every key channel fades at its own speed
        recalled = np.einsum("hkv,hk->hv", S, k[t])  # what S holds under this key
        S = S + np.einsum("h,hk,hv->hkv", beta[t], k[t], v[t] - recalled)  # write the difference
        o[t] = np.einsum("hkv,hk->hv", S, q[t]) / np.sqrt(d)  # what S answers to the query
    return (rms(o, W["o_norm"]).reshape(len(x), -1) * sigmoid(x @ W["g_proj"].T)) @ W["o_proj"].T

def convolution(u, taps):  # u [T, heads * d]: each channel sees its own last inputs
    past = np.concatenate([np.zeros((taps.shape[1] - 1, u.shape[1])), u])
    y = sum(past[j:j + len(u)] * taps[:, j] for j in range(taps.shape[1]))
    return (y * sigmoid(y)).reshape(len(u), heads, d)


# %%
def mla(W, x):
    T, n, rank, by_head = len(x), c.qk_nope_head_dim, c.kv_lora_rank, (len(x), c.num_attention_heads, -1)
    q = (rms(x @ W["q_a_proj"].T, W["q_a_layernorm"], 1e-6) @ W["q_b_proj"].T).reshape(by_head)
    kept = x @ W["kv_a_proj_with_mqa"].T  # [T, rank + extra]: all that must be kept of a token
    kv = (rms(kept[:, :rank], W["kv_a_layernorm"], 1e-6) @ W["kv_b_proj"].T).reshape(by_head)
    extra = np.repeat(kept[:, None, rank:], c.num_attention_heads, axis=1)  # the same for all heads
    k, v = np.concatenate([kv[:, :, :n], extra], axis=2), kv[:, :, n:]
    score = np.einsum("thd,phd->htp", q, k) / np.sqrt(q.shape[2])  # [heads, T, T]: t asks, p answers
    score[:, np.triu(np.ones((T, T), bool), 1)] = -np.inf  # no token sees a later one
    o = np.einsum("htp,phv->thv", softmax(score, axis=2), v).reshape(T, -1)
    return (o * sigmoid(x @ W["g_proj"].T)) @ W["o_proj"].T

def experts(W, x, L):
    score = sigmoid(x @ W["gate"].T)  # [T, experts]
    best = np.argsort(-(score + W["e_score_correction_bias"]), kind="stable")
    z, u = x @ W["routed_expert_down_proj"].T, np.zeros((len(x), c.routed_expert_hidden_size))
    for t, chosen in enumerate(best[:, :c.num_experts_per_token]):
        for e in chosen:
            weight = score[t, e] / score[t, chosen].sum() * c.routed_scaling_factor
            u[t] += weight * mlp(*expert_weights(L, e), z[t])
    shared = mlp(*(W[f"shared_experts.{n}_proj"] for n in ("gate", "up", "down")), x)
    return rms(u, W["routed_expert_norm"]) @ W["routed_expert_up_proj"].T + shared

def forward(ids):
    p, blocks = embedding[ids], []  # the running sum [T, H], and the finished sums
    for L, W in enumerate(layers):
        h = mix([*blocks, p], W["self_attention_res_norm"], W["self_attention_res_proj"])
        if L % c.attn_res_block_size == 0:
            blocks, p = [*blocks, p], 0  # a block begins: the sum so far is finished
        attention = kda if L in c.kda_layers else mla
        p = p + attention(W, rms(h, W["input_layernorm"]))
        x = rms(mix([*blocks, p], W["mlp_res_norm"], W["mlp_res_proj"]), W["post_attention_layernorm"])
        dense = c.is_dense(L)
        p = p + (mlp(W["gate_proj"], W["up_proj"], W["down_proj"], x) if dense else experts(W, x, L))
    return rms(mix([*blocks, p], *last_mix), last_norm) @ head.T  # [T, vocabulary]


# %% [markdown]
# The weights come from a small checkpoint in the layout of the release. The experts are unpacked from four bits;
# everything else is read as it is.

# %%
def weights(name):
    return checkpoint.tensor(name).astype(np.float64).squeeze()


def expert_weights(L, e):
    "An expert's matrices for gate, up and down, in the order in which mlp takes them."
    stored = [[checkpoint.raw(expert_name(L, e, name + end)) for end in ("", "_scale")] for name in ("w1", "w3", "w2")]
    return [decode(packed, scale).astype(np.float64) for packed, scale in stored]


def layer_weights(L):
    parts = ("attention_norms", "ffn_norms", *layer_parts(config, L))
    return {row.short: weights(tensor_name(L, part, row.short)) for part in parts for row in TABLE[part]}


embedding, head = weights(EMBED), weights(HEAD)
*last_mix, last_norm = (weights(name) for name in FINAL)
layers = [layer_weights(L) for L in range(config.num_hidden_layers)]

# %% [markdown]
# The fixture holds the logits that another implementation computed for a prompt and for the tokens after it: the JAX
# code that trained this model. Ours must agree within the tolerance that the fixture's README gives. (`oracle13`, the
# other small model, has random weights; its logits are mlx-lm's.)

# %%
expected = load_file(folder.parent / "expected.safetensors")
prompt, answer = expected["prompt_ids"].tolist(), expected["generated_ids"].tolist()
logits = forward(prompt + answer)
difference = np.abs(logits - expected["logits_full"]).max()
print(f"{logits.shape[0]} positions, {logits.shape[1]} logits each")
print(f"largest difference from the fixture: {difference:.1e}")
assert difference < {"stories": 3e-4, "oracle13": 4e-3}[model]

# %% [markdown]
# Now the model writes. It gets the prompt, and every new id is the one with the largest logit. The tokens become text
# again through the model's vocabulary; `[EOS]` ends an answer. No story of its training had Tom with a cup, Tom in the
# hall, or a white cup. So the answer comes from the story, not from memory.

# %%
ids = list(prompt)
while len(ids) < len(prompt) + len(answer):
    ids.append(int(forward(ids)[-1].argmax()))
tokenizer = Tokenizer(folder)
print("prompt:", ascii(tokenizer.decode(prompt).decode(errors="replace")))
print("answer:", ascii(tokenizer.decode(ids[len(prompt):]).decode(errors="replace")))
assert ids[len(prompt):] == answer

# %% [markdown]
# The released model runs through the same lines: only the numbers of its config are larger. What makes it hard to run
# is the size of its weights.
#
# ## 0.1.4 Where 1.56 TB lie, and what one token needs
#
# The shapes of all tensors follow from the config. So the bytes of the files can be counted without the files.

# %%
schematics.where_bytes_lie(k3)

# %% [markdown]
# Most of the bytes are experts, and a token needs few of them. It needs all of the trunk. The trunk is used again for
# the next token, but the memory of a small machine cannot hold it until then. Without weights kept in memory, every
# token reads all these bytes from the disk. The time for this depends on the disk.

# %%
token = sum(schematics.token_bytes(k3).values())
print(f"without weights in memory a token reads {token / 1e9:.0f} GB")  # claim token
for rate in (1, 3, 7, 14):
    print(f"a disk of {rate:2} GB/s: {token / (rate * 1e9):5.1f} s")  # claim seconds

# %% [markdown]
# This is the reason for the engine's design. Memory that is not needed for anything else keeps weights of the trunk,
# because each byte kept there saves a byte of reading for every token.
#
# Between two tokens the model must remember what it has read. KDA and MLA keep different amounts:

# %%
from k3lib.plan import position_bytes, state_bytes

print(f"KDA, {len(k3.kda_layers)} layers: {state_bytes(k3) / 1e6:.0f} MB, at any length")
print(f"MLA, {len(k3.mla_layers)} layers: {position_bytes(k3) / 1e3:.1f} kB for each token")

# %% [markdown]
# The count of the weights can be checked. The released index states 1,560,860,324,864 bytes for all tensors. Of these,
# 92,289,024 and 802,428,928 bytes belong to the image side, which this engine does not run.

# %%
from math import prod

from k3lib.header import ITEMSIZE
from k3lib.tensors import families

tensors = [(f, prod(f.shape) * len(f.layers) * len(f.experts)) for f in families(k3)]  # and their numbers
counted = sum(n * ITEMSIZE[f.dtype] for f, n in tensors)
published = 1_560_860_324_864 - 92_289_024 - 802_428_928
parameters = sum(0 if f.pattern.endswith("_scale") else 2 * n if f.dtype == "U8" else n for f, n in tensors)
print(f"weights of the text: {counted / 1e9:,.0f} GB")  # claim all
print(f"counted {counted:,} bytes; published without the image side {published:,}")
print(f"{parameters / 1e12:.2f} trillion parameters: a byte of an expert holds two")
assert counted == published and f"{parameters / 1e12:.2f}" == "2.78"

# %% [markdown]
# ## 0.1.5 What to read next
#
# | if you ask | read |
# |---|---|
# | how four bits hold a weight | [1.1 Four bits a weight](../01_mxfp4/01_mxfp4.ipynb) |
# | why a memory that corrects itself | [2.1 From softmax attention](../02_kda/01_delta_rule.ipynb) |
# | how attention can remember in constant space | [2.2 Kimi Delta Attention](../02_kda/02_kda.ipynb) |
# | how 96 heads share 576 numbers | [3.1 Gated MLA](../03_mla/01_mla.ipynb) |
# | why a layer reads a mix and not a sum | [3.2 Block attention residuals](../03_mla/02_residual.ipynb) |
# | which 16 of 896 experts work, and how they are chosen | [4.1 The router](../04_moe_router/01_router.ipynb) |
# | what an expert computes | [4.2 Latent experts](../04_moe_router/02_moe.ipynb) |
# | how the forward pass runs fast, in float32, with the same bits everywhere | [5.8 Ninety-three layers](../05_streaming/08_model.ipynb) |
# | how the weights come from a disk | [5.9 Past the page cache](../05_streaming/09_disk.ipynb) and the chapters after it |
# | what a gigabyte of memory buys | [5.34 The dial](../05_streaming/34_decode.ipynb) |
#
# The chapters can be read in this order. Each one can also be opened and run alone.
#
# ## Exercises
#
# Answers: [exercises of part 0](../answers/00_k3.ipynb).
#
# 1. In `forward`, put `pass` in place of the line that finishes a block. Which assertion fails, and how many of the
#    answer's ids are still right, each after the right ones before it?
# 2. In `kda`, replace `v[t] - recalled` by `v[t]`. The matrix then adds values instead of correcting them. What happens
#    to the logits?
# 3. A machine keeps half of the trunk in memory. How long does a token take with a disk of 3 GB/s, if arithmetic takes
#    no time?
