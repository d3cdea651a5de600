"""Decoder layers of the Llama family with a third of the calls: the same parameters, for forwards without autograd.

At a few million parameters a decoding step is made of call overhead, not of arithmetic. Projections that read the same input
become one product: their weights are laid end to end in one buffer and the model's own parameters become views of it, so there
is one copy and whatever writes the parameters in place writes here. `decode.Decoder` compares with the model's own forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

_LAYERS = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})


def lean_layers(body: Any) -> LeanLayers | None:
    """The layers and final norm of a transformers decoder `body`, or None for an architecture that is not of the family."""
    known = all(type(layer).__name__ in _LAYERS for layer in body.layers)
    return LeanLayers(body) if known else None


class LeanLayers:
    """Call with embeddings [T, D], which it overwrites, cosines and sines [1, T, E] and an attention context."""

    def __init__(self, body: Any):
        self._layers = [_LeanLayer(layer) for layer in body.layers]
        self._norm = body.norm

    def __call__(self, hidden_TD: Tensor, rotary: Sequence[Tensor], rows: Any) -> Tensor:
        cosine_1TE, sine_1TE = rotary
        cosine_T1E = cosine_1TE[0, :, None]
        half = sine_1TE.shape[-1] // 2
        sine_T1E = torch.cat((-sine_1TE[0, :, :half], sine_1TE[0, :, half:]), -1)[:, None]
        for layer in self._layers:
            hidden_TD = layer(hidden_TD, cosine_T1E, sine_T1E, rows)
        return _normed(hidden_TD, self._norm)


class _LeanLayer:
    def __init__(self, layer: Any):
        attention = layer.self_attn
        self._layer, self._attention = layer, attention
        self._width: int = attention.head_dim
        self._window: int | None = getattr(attention, "sliding_window", None)
        self._qkv = _side_by_side(attention.q_proj, attention.k_proj, attention.v_proj)
        self._gate_up = _side_by_side(layer.mlp.gate_proj, layer.mlp.up_proj)
        self._heads = attention.q_proj.out_features // self._width
        self._groups = attention.k_proj.out_features // self._width

    def __call__(self, hidden_TD: Tensor, cosine_T1E: Tensor, sine_T1E: Tensor, rows: Any) -> Tensor:
        attention, layer = self._attention, self._layer
        heads, groups = self._heads, self._groups
        qkv_TXE = linear(_normed(hidden_TD, layer.input_layernorm), *self._qkv).unflatten(1, (-1, self._width))
        rotated_TXE = _rotated(self._head_norms(qkv_TXE[:, : heads + groups]), cosine_T1E, sine_T1E)
        query_THE, key_TGE, value_TGE = rotated_TXE[:, :heads], rotated_TXE[:, heads:], qkv_TXE[:, heads + groups :]
        output_THE = rows.attend(attention.layer_idx, query_THE, key_TGE, value_TGE, attention.scaling, 0.0, self._window)
        hidden_TD = _added(hidden_TD, output_THE.flatten(1), attention.o_proj)
        gate_TF, up_TF = linear(_normed(hidden_TD, layer.post_attention_layernorm), *self._gate_up).chunk(2, -1)
        return _added(hidden_TD, layer.mlp.act_fn(gate_TF).mul_(up_TF), layer.mlp.down_proj)

    def _head_norms(self, query_key_TXE: Tensor) -> Tensor:
        if not hasattr(self._attention, "q_norm"):
            return query_key_TXE
        query_norm, key_norm = self._attention.q_norm, self._attention.k_norm
        weight_XE = torch.cat((query_norm.weight.expand(self._heads, -1), key_norm.weight.expand(self._groups, -1)))
        return rms_norm(query_key_TXE, (self._width,), None, query_norm.variance_epsilon).mul_(weight_XE)


def _normed(hidden_TD: Tensor, norm: Any) -> Tensor:
    return rms_norm(hidden_TD, hidden_TD.shape[-1:], norm.weight, norm.variance_epsilon)


def _rotated(heads_TXE: Tensor, cosine_T1E: Tensor, sine_T1E: Tensor) -> Tensor:
    """Rotary embedding; the sign of the rotated half is in the sine."""
    return (heads_TXE * cosine_T1E).addcmul_(heads_TXE.roll(heads_TXE.shape[-1] // 2, -1), sine_T1E)


def _added(hidden_TD: Tensor, input_TF: Tensor, projection: nn.Linear) -> Tensor:
    """`hidden + projection(input)`, written into `hidden`."""
    hidden_TD.addmm_(input_TF, projection.weight.t())
    return hidden_TD if projection.bias is None else hidden_TD.add_(projection.bias)


def _side_by_side(*projections: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the projections as one; their own parameters become views of it."""
    biases = [projection.bias for projection in projections if projection.bias is not None]
    assert len(biases) in (0, len(projections))
    return _joined([projection.weight for projection in projections]), _joined(biases) if biases else None


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    joined = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, joined.split([len(parameter) for parameter in parameters]), strict=True):
        parameter.data = part
    return joined
