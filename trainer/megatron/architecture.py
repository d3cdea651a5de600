"""What Megatron-Core must know of a Hugging Face model: one plain record, refused with a message where we cannot train it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from miles.core.model.reward import is_reward_model
from trainer.megatron import deepseek
from trainer.megatron.deepseek import Latent
from trainer.megatron.layout import Layout

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")
VOCABULARY_UNIT = 64
"""Each tensor rank's share of the vocabulary is padded to a multiple of this, as matrix products on GPUs like it."""


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters on the linear layers named in `targets` by the last part of their names; on all but the head where it is empty."""

    rank: int
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes as the Hugging Face configuration has them.

    Attributes:
        windows: of each layer's attention, None for all. latent: multi-head latent attention, or None.
        experts: 0 for a dense model. dense_layers: so many layers at the beginning have none all the same.
        shared_width: feed-forward columns beside the experts that every token passes through, or 0.
        biased_routing: experts are chosen by sigmoid scores plus a bias that is never trained (DeepSeek-V3, arXiv 2412.19437, equation 16),
            out of the `groups_per_token` best of `expert_groups` groups, and weighed by the scores times `routing_scale`.
        values: a critic: its output head is one row, of zeros unless it has `trained_values`, as a reward model.
        adapters: with them this is not the model, but what is trained beside it: `names` knows these tensors alone.
    """

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
    latent: Latent | None = None
    dense_layers: int = 0
    shared_width: int = 0
    biased_routing: bool = False
    expert_groups: int = 1
    groups_per_token: int = 1
    routing_scale: float = 1.0
    values: bool = False
    trained_values: bool = False
    adapters: Adapters | None = None

    @property
    def uniform(self) -> bool:
        """Whether all layers have the same tensors."""
        return not self.dense_layers

    def dense(self, layer: int) -> bool:
        return not self.experts or layer < self.dense_layers

    def vocabulary_share(self, layout: Layout) -> int:
        """Rows of the embedding on one tensor rank, padding included."""
        unit = layout.tensor * VOCABULARY_UNIT
        return -(-self.vocabulary // unit) * VOCABULARY_UNIT

    def check(self, layout: Layout) -> None:
        """Raises ValueError, with the arithmetic, where the model does not divide into the layout."""
        divided = [
            ("attention heads", self.heads, "trainer.tensor_parallel", layout.tensor),
            *self._attention_sizes(layout),
            ("layers", self.layers, "trainer.pipeline_parallel x trainer.pipeline_chunks", layout.pipeline * layout.chunks),
        ]
        if self.experts:
            divided.append(("experts", self.experts, "trainer.expert_parallel", layout.expert))
            divided.append(("columns of shared experts", self.shared_width, "trainer.tensor_parallel", layout.tensor))
        if self.dense(0):
            divided.append(("feed-forward columns", self.feed_forward, "trainer.tensor_parallel", layout.tensor))
        if layout.expert > 1 and not self.experts:
            raise ValueError(f"trainer.expert_parallel = {layout.expert}, but the model ({self.family}) has no experts: leave it at 1")
        for what, number, option, parts in divided:
            if number % parts:
                raise ValueError(f"the model's {number} {what} do not divide by {option} = {parts}: {number} / {parts} = {number / parts:.2f}")

    def _attention_sizes(self, layout: Layout) -> list[tuple[str, int, str, int]]:
        if self.latent is None:
            return [("key-value heads", self.kv_heads, "trainer.tensor_parallel", layout.tensor)]
        widths = (("kv_lora_rank + qk_rope_head_dim", self.latent.rank + self.latent.rotary), ("q_lora_rank", self.latent.query_rank or 0))
        return [(f"columns of {name}", width, "trainer.tensor_parallel", layout.tensor) for name, width in widths]


def architecture_of(config: Any, *, values: bool = False) -> Architecture:
    """From a transformers configuration. `values`: of the critic that is made of it.

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
    options: dict[str, Any] = {
        "kv_heads": config.num_key_value_heads or config.num_attention_heads,
        "head_width": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    }
    if family == "deepseek_v3":
        options |= deepseek.options_of(config)
    elif moe:
        options |= {
            "experts": config.num_experts,
            "experts_per_token": config.num_experts_per_tok,
            "expert_width": config.moe_intermediate_size,
            "normalised_routing": bool(config.norm_topk_prob),
        }
    return Architecture(
        family=family,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        feed_forward=config.intermediate_size,
        vocabulary=config.vocab_size,
        tied=bool(config.tie_word_embeddings) and not values,
        norm_epsilon=config.rms_norm_eps,
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        qkv_bias=family == "qwen2",
        head_norm=family in ("qwen3", "qwen3_moe"),
        values=values,
        trained_values=values and is_reward_model(config),
        **options,
    )
