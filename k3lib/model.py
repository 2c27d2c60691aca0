"""5.8 Ninety-three layers, one forward pass a token

Made from book/05_streaming/08_model.py: edit that, then run `make export`.
"""

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


__all__ = [
    "kda_shape", "mla_shape", "moe_shape", "Sequence", "ResidualStream", "PassWeights", "PartWeights",
    "RoutedExperts", "Model",
]
