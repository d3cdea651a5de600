"""What Megatron-Core must know of a Hugging Face model: one plain record, refused with a message where we cannot train it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.megatron.layout import Layout

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
VOCABULARY_UNIT = 64
"""Each tensor rank's share of the vocabulary is padded to a multiple of this, as matrix products on GPUs like it."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes as the Hugging Face configuration has them. `windows`: of each layer's attention, None for all. `experts` 0: a dense model."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    feed_forward: int
    vocabulary: int
    tied: bool
    norm_epsilon: float
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    head_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    normalised_routing: bool = False

    def vocabulary_share(self, layout: Layout) -> int:
        """Rows of the embedding on one tensor rank, padding included."""
        unit = layout.tensor * VOCABULARY_UNIT
        return -(-self.vocabulary // unit) * VOCABULARY_UNIT

    def check(self, layout: Layout) -> None:
        """Raises ValueError, with the arithmetic, where the model does not divide into the layout."""
        divided = [
            ("attention heads", self.heads, "trainer.tensor_parallel", layout.tensor),
            ("key-value heads", self.kv_heads, "trainer.tensor_parallel", layout.tensor),
            ("layers", self.layers, "trainer.pipeline_parallel x trainer.pipeline_chunks", layout.pipeline * layout.chunks),
        ]
        if self.experts:
            divided.append(("experts", self.experts, "trainer.expert_parallel", layout.expert))
        else:
            divided.append(("feed-forward columns", self.feed_forward, "trainer.tensor_parallel", layout.tensor))
        if layout.expert > 1 and not self.experts:
            raise ValueError(f"trainer.expert_parallel = {layout.expert}, but the model ({self.family}) has no experts: leave it at 1")
        for what, number, option, parts in divided:
            if number % parts:
                raise ValueError(f"the model's {number} {what} do not divide by {option} = {parts}: {number} / {parts} = {number / parts:.2f}")


def architecture_of(config: Any) -> Architecture:
    """From a transformers configuration.

    Raises:
        ValueError: a family that has no names here, or an option that Megatron's layers would not honour; the message names it.
    """
    family = config.model_type
    if family not in FAMILIES:
        raise ValueError(f"trainer.backend = 'megatron' trains models of type {', '.join(FAMILIES)}; this one is {family!r}: use trainer.backend = 'fsdp'")
    for option, wanted in (("hidden_act", ("silu",)), ("mlp_bias", (False, None)), ("attention_dropout", (0, 0.0, None))):
        if getattr(config, option, wanted[0]) not in wanted:
            raise ValueError(f"{option} = {getattr(config, option)!r} in the model's configuration is not supported by trainer.backend = 'megatron'")
    bias = bool(getattr(config, "attention_bias", False))
    if bias:
        raise ValueError("attention_bias = true in the model's configuration is not supported by trainer.backend = 'megatron': use 'fsdp'")
    moe = family == "qwen3_moe"
    if moe and (config.mlp_only_layers or config.decoder_sparse_step != 1):
        raise ValueError("trainer.backend = 'megatron' wants experts in every layer of a qwen3_moe model (mlp_only_layers, decoder_sparse_step)")
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    return Architecture(
        family=family,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_width=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        feed_forward=config.intermediate_size,
        vocabulary=config.vocab_size,
        tied=bool(config.tie_word_embeddings),
        norm_epsilon=config.rms_norm_eps,
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        qkv_bias=family == "qwen2",
        head_norm=family in ("qwen3", "qwen3_moe"),
        experts=config.num_experts if moe else 0,
        experts_per_token=config.num_experts_per_tok if moe else 0,
        expert_width=config.moe_intermediate_size if moe else 0,
        normalised_routing=bool(config.norm_topk_prob) if moe else False,
    )
