"""What models of DeepSeek-V3's kind have that others have not: multi-head latent attention, and experts chosen by biased, grouped scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values are made from one narrow vector a token.

    Attributes:
        query_rank, rank: widths of the vectors that queries, and keys and values, are made from; queries may have none.
        plain, rotary: parts of a head's query and key without and with positions; the rotary key is one for all heads.
        value: width of a head's value.
        stretch, all_dimensions: YaRN's factor and `mscale_all_dim`, from which the softmax's scale follows.
    """

    query_rank: int | None
    rank: int
    plain: int
    rotary: int
    value: int
    stretch: float = 1.0
    all_dimensions: float = 0.0


def options_of(config: Any) -> dict[str, Any]:
    """What an `Architecture` has of such a model beside the sizes that all have.

    Raises:
        ValueError: Megatron-Core's router or rotary embedding would differ from transformers'.
    """
    _check(config)
    rope = config.rope_parameters
    grouped = config.topk_group < config.n_group
    return {
        "latent": Latent(
            query_rank=config.q_lora_rank,
            rank=config.kv_lora_rank,
            plain=config.qk_nope_head_dim,
            rotary=config.qk_rope_head_dim,
            value=config.v_head_dim,
            stretch=rope.get("factor", 1.0),
            all_dimensions=rope.get("mscale_all_dim") or 0.0,
        ),
        "head_width": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "kv_heads": config.num_attention_heads,
        "experts": config.n_routed_experts,
        "experts_per_token": config.num_experts_per_tok,
        "expert_width": config.moe_intermediate_size,
        "normalised_routing": True,
        "dense_layers": config.first_k_dense_replace,
        "shared_width": config.moe_intermediate_size * config.n_shared_experts,
        "biased_routing": True,
        "expert_groups": config.n_group if grouped else 1,
        "groups_per_token": config.topk_group if grouped else 1,
        "routing_scale": config.routed_scaling_factor,
    }


def _check(config: Any) -> None:
    if not config.rope_interleave or not config.norm_topk_prob or config.num_experts_per_tok < 2:
        raise ValueError(
            f"rope_interleave = {config.rope_interleave}, norm_topk_prob = {config.norm_topk_prob}, num_experts_per_tok = {config.num_experts_per_tok} in the "
            "model's configuration: trainer.backend = 'megatron' wants true, true and at least 2 of a deepseek_v3 model; use 'fsdp'"
        )
    if config.topk_group < config.n_group and config.num_experts_per_tok // config.topk_group != 2:
        raise ValueError(
            f"num_experts_per_tok = {config.num_experts_per_tok} and topk_group = {config.topk_group} in the model's configuration: Megatron-Core ranks a "
            f"group by its {config.num_experts_per_tok // config.topk_group} best experts (one by the other), transformers by 2; use trainer.backend = 'fsdp'"
        )
    if config.first_k_dense_replace >= config.num_hidden_layers:
        raise ValueError(f"first_k_dense_replace = {config.first_k_dense_replace} leaves no layer with experts, which trainer.backend = 'megatron' wants here")
