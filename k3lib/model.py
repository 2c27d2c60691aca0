"""5.8 Ninety-three layers, walked once a token

Made from book/05_streaming/08_model.py: edit that, then run `make export`.
"""

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


class Weights:
    "One part of one layer as a mapping from short names to matrices and vectors, taken as they are asked for: take(full name)."

    def __init__(self, take, L, part):
        self.take, self.L, self.part = take, L, part

    def __getitem__(self, short):
        return self.take(tensor_name(self.L, self.part, short))


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


LATENT_EPS = 1e-6  # of the two MLA latent norms: the reference class's default, not rms_norm_eps


__all__ = [
    "Weights", "not_finite_in", "StateError", "STATE_VERSION", "ABOUT", "STATE_READ_BYTES", "about_bytes",
    "file_pieces", "check_range", "Model", "LATENT_EPS",
]
