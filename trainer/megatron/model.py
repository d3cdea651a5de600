"""Builds the part of the model that a rank holds: Megatron-Core's layers, filled from a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig, TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from trainer.megatron import cpu
from trainer.megatron.architecture import Architecture
from trainer.megatron.attention import PackedAttention, RMSNorm
from trainer.megatron.deepseek import Latent
from trainer.megatron.latent import LatentAttention
from trainer.megatron.mesh import Mesh
from trainer.megatron.names import layers_of, parts

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # Megatron-Core 0.16.1 asks for it also where there is no Transformer Engine


class Chunk(GPTModel):
    """GPTModel up to the hidden states after the final norm, [T, 1, D]: logits are made where they are scored, a few at a time."""

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states

    def tensors(self) -> dict[str, Tensor]:
        """Parameters but for adapters, and buffers that are part of the model, by name."""
        found = {name: parameter for name, parameter in self.named_parameters() if ".adapter." not in name}
        return found | {name: buffer for name, buffer in self.named_buffers() if name.endswith(".expert_bias")}

    def head(self) -> Tensor:
        """This rank's rows of the output projection, padding included; on the last stage alone."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else self.output_layer.weight
        assert weight is not None
        return weight


class Config(TransformerConfig):
    """With the windows of the layers' attention, which Megatron-Core knows one of."""

    windows: tuple[int | None, ...] = ()


class LatentConfig(MLATransformerConfig):
    """The same with multi-head latent attention."""

    windows: tuple[int | None, ...] = ()


def transformer_config(architecture: Architecture, mesh: Mesh, *, dtype: torch.dtype, compute_dtype: torch.dtype, recompute: bool) -> Config | LatentConfig:
    """Nothing is drawn and nothing is dropped: weights are loaded, and dropout would part an on-policy token's ratio from 1."""
    layout = mesh.layout
    sequence_parallel = bool(architecture.experts) and layout.tensor > 1  # Megatron-Core wants it so
    kind = Config if architecture.latent is None else LatentConfig
    config = kind(
        num_layers=architecture.layers,
        hidden_size=architecture.hidden,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.kv_heads,
        kv_channels=architecture.head_width,
        ffn_hidden_size=architecture.feed_forward,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_epsilon,
        qk_layernorm=architecture.head_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=compute_dtype,
        bf16=compute_dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
        sequence_parallel=sequence_parallel,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the one that takes rows of any length; it is asked of dense models as well
        calculate_per_token_loss=True,  # losses are shares of a global mean: gradients add up, and are never averaged
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
        **_expert_options(architecture, compute_dtype),
        **_latent_options(architecture.latent),
    )
    config.windows = architecture.windows
    return config


def build_chunks(config: Config | LatentConfig, architecture: Architecture, hf_config: Any, mesh: Mesh, device: torch.device) -> list[Chunk]:
    """This rank's pieces of the model, their weights still arbitrary."""
    frequencies = _rotary_frequencies(hf_config)
    stage, layout = mesh.place.stage, mesh.layout
    chunks = []
    for number in range(layout.chunks):
        specs = [_layer_spec(architecture, dense=architecture.dense(layer)) for layer in layers_of(architecture, layout, stage, number)]
        with cpu.tensors():
            chunk = Chunk(
                config=config,
                transformer_layer_spec=TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm),
                vocab_size=architecture.vocabulary_share(layout) * layout.tensor,
                max_sequence_length=hf_config.max_position_embeddings,
                pre_process=stage == 0 and number == 0,
                post_process=stage == layout.pipeline - 1 and number == layout.chunks - 1,
                share_embeddings_and_output_weights=architecture.tied,
                position_embedding_type="rope",
                vp_stage=number if layout.chunks > 1 else None,
            )
        if chunk.post_process and architecture.values:
            chunk.output_layer = nn.Linear(architecture.hidden, 1, bias=False, dtype=config.params_dtype)  # every tensor rank has all of it
        for module in chunk.modules():
            if isinstance(module, RotaryEmbedding):  # one of the chunk, or of each layer's latent attention
                module.inv_freq = frequencies
        _mark(chunk, architecture, mesh, number)
        if chunk.pre_process:
            chunk.embedding.word_embeddings.register_forward_hook(partial(_spare_padding, hf_config.pad_token_id, mesh.place.tensor))
        chunks.append(chunk.to(device).train())
    return chunks


def _mark(chunk: Chunk, architecture: Architecture, mesh: Mesh, number: int) -> None:
    """Tell Megatron-Core which tensors are divided over tensor ranks: it would have noted that when it drew their values."""
    named: dict[str, Any] = chunk.tensors()
    wanted = parts(architecture, mesh.layout, mesh.rank)[number]
    assert named.keys() == wanted.keys(), sorted(named.keys() ^ wanted.keys())
    for name, part in wanted.items():
        assert named[name].shape == part.shape, (name, named[name].shape, part.shape)
        if part.expert:
            named[name].allreduce = False  # each rank's share of the tokens teaches it, also where tensor ranks hold copies of one expert
        if part.sharded is not None and not hasattr(named[name], "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(named[name], True, part.sharded, part.stride)


def _spare_padding(pad: int | None, rank: int, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
    """As in transformers, the padding token's embedding learns nothing from where it is read. `output` may be of this rank's tokens alone."""
    if pad is None or not output.requires_grad:
        return
    tokens_T, hidden = inputs[0].flatten(), output.shape[-1]
    count = output.numel() // hidden
    start = rank * count if count < len(tokens_T) else 0
    spared = (tokens_T[start : start + count] == pad).view(*output.shape[:-1], 1)
    output.register_hook(lambda gradient: gradient.masked_fill(spared, 0))


def _layer_spec(architecture: Architecture, *, dense: bool) -> ModuleSpec:
    backend = LocalSpecProvider()
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=_attention_spec(backend, architecture) if architecture.latent is None else _latent_attention_spec(backend),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=get_mlp_module_spec_for_backend(backend=backend, num_experts=None if dense else architecture.experts, moe_grouped_gemm=False),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _attention_spec(backend: LocalSpecProvider, architecture: Architecture) -> ModuleSpec:
    head_norm: Callable[..., Any] = RMSNorm if architecture.head_norm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_linear(),
            core_attention=PackedAttention,
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def _latent_attention_spec(backend: LocalSpecProvider) -> ModuleSpec:
    column = backend.column_parallel_linear()
    return ModuleSpec(
        module=LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=column,
            linear_q_down_proj=column,
            linear_q_up_proj=column,
            linear_kv_down_proj=column,
            linear_kv_up_proj=column,
            core_attention=PackedAttention,
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=RMSNorm,
            kv_layernorm=RMSNorm,
        ),
    )


def _expert_options(architecture: Architecture, compute_dtype: torch.dtype) -> dict[str, Any]:
    if not architecture.experts:
        return {}
    biased: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,  # it balances a pre-training; here the engines have it too, and a token's experts stay its experts
        "moe_router_topk_scaling_factor": architecture.routing_scale,
    }
    if architecture.expert_groups > 1:
        biased |= {"moe_router_num_groups": architecture.expert_groups, "moe_router_group_topk": architecture.groups_per_token}
    return (biased if architecture.biased_routing else {}) | {
        "moe_layer_freq": [int(not architecture.dense(layer)) for layer in range(architecture.layers)] if architecture.dense_layers else 1,
        "moe_shared_expert_intermediate_size": architecture.shared_width or None,
        "num_moe_experts": architecture.experts,
        "moe_router_topk": architecture.experts_per_token,
        "moe_ffn_hidden_size": architecture.expert_width,
        "moe_router_load_balancing_type": "none",
        "moe_router_pre_softmax": not architecture.normalised_routing,
        "moe_router_dtype": "fp64" if compute_dtype == torch.float64 else "fp32",
    }


def _latent_options(latent: Latent | None) -> dict[str, Any]:
    """The rotary frequencies are set afterwards, as transformers computes them: YaRN's options here only scale the softmax."""
    if latent is None:
        return {}
    return {
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.rank,
        "qk_head_dim": latent.plain,
        "qk_pos_emb_head_dim": latent.rotary,
        "v_head_dim": latent.value,
        "rope_type": "rope",
        "rotary_scaling_factor": latent.stretch,
        "mscale_all_dim": latent.all_dimensions,
    }


def _rotary_frequencies(hf_config: Any) -> Tensor:
    """As transformers computes them, whatever the scaling. Raises ValueError for one that also scales the attention or follows the length."""
    rotary = LlamaRotaryEmbedding(hf_config)
    if rotary.attention_scaling != 1 or rotary.rope_type in ("dynamic", "longrope"):
        raise ValueError(f"rotary embeddings of type {rotary.rope_type!r} are not supported by trainer.backend = 'megatron': use 'fsdp'")
    return rotary.inv_freq.float().clone()
