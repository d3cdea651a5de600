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
from torch.nn.functional import linear, silu
from transformers.activations import SiLUActivation

_LAYERS = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})


def lean_layers(body: Any) -> LeanLayers | None:
    """The layers and final norm of a transformers decoder `body`, or None for an architecture that is not of the family."""
    known = all(type(layer).__name__ in _LAYERS for layer in body.layers)
    return LeanLayers(body) if known else None


class LeanLayers:
    """Call with embeddings [T, D], which it overwrites, cosines and sines [1, T, E] and an attention context."""

    def __init__(self, body: Any):
        self._layers = [_LeanLayer(layer) for layer in body.layers]
        self._norm = _Norm(body.norm)

    def __call__(self, hidden_TD: Tensor, rotary: Sequence[Tensor], rows: Any) -> Tensor:
        cosine_1TE, sine_1TE = rotary
        half = sine_1TE.shape[-1] // 2
        cosine_T1E = cosine_1TE[0, :, None]
        sine_T1E = torch.cat((-sine_1TE[0, :, :half], sine_1TE[0, :, half:]), -1)[:, None]
        for layer in self._layers:
            hidden_TD = layer(hidden_TD, cosine_T1E, sine_T1E, rows)
        return self._norm(hidden_TD)

    def refresh(self) -> None:
        """Call after parameters were written in place: the norms of query and key heads are one tensor here, a copy."""
        for layer in self._layers:
            layer.refresh()


class _LeanLayer:
    def __init__(self, layer: Any):
        attention, mlp = layer.self_attn, layer.mlp
        self._attention = attention
        self._number: int = attention.layer_idx
        self._scaling: float = attention.scaling
        self._width: int = attention.head_dim
        self._window: int | None = getattr(attention, "sliding_window", None)
        self._heads = attention.q_proj.out_features // self._width
        self._rotated_heads = self._heads + attention.k_proj.out_features // self._width
        self._input_norm, self._mlp_norm = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._qkv = _side_by_side(attention.q_proj, attention.k_proj, attention.v_proj)
        self._gate_up = _side_by_side(mlp.gate_proj, mlp.up_proj)
        self._output, self._down = _Projection(attention.o_proj), _Projection(mlp.down_proj)
        self._activation = silu if isinstance(mlp.act_fn, (nn.SiLU, SiLUActivation)) else mlp.act_fn
        self.refresh()

    def refresh(self) -> None:
        self._head_norm_XE: Tensor | None = None
        if hasattr(self._attention, "q_norm"):
            query_E, key_E = self._attention.q_norm.weight.detach(), self._attention.k_norm.weight.detach()
            self._head_norm_XE = torch.cat((query_E.expand(self._heads, -1), key_E.expand(self._rotated_heads - self._heads, -1)))
            self._head_norm_eps: float = self._attention.q_norm.variance_epsilon

    def __call__(self, hidden_TD: Tensor, cosine_T1E: Tensor, sine_T1E: Tensor, rows: Any) -> Tensor:
        qkv_TXE = linear(self._input_norm(hidden_TD), *self._qkv).view(hidden_TD.shape[0], -1, self._width)
        rotated_TXE = qkv_TXE[:, : self._rotated_heads]
        if self._head_norm_XE is not None:
            rotated_TXE = torch.rms_norm(rotated_TXE, (self._width,), None, self._head_norm_eps).mul_(self._head_norm_XE)
        # Rotary embedding; the sign of the half that turns is in the sine.
        rotated_TXE = (rotated_TXE * cosine_T1E).addcmul_(rotated_TXE.roll(self._width // 2, -1), sine_T1E)
        query_THE, key_TGE, value_TGE = rotated_TXE[:, : self._heads], rotated_TXE[:, self._heads :], qkv_TXE[:, self._rotated_heads :]
        output_THE = rows.attend(self._number, query_THE, key_TGE, value_TGE, self._scaling, 0.0, self._window)
        hidden_TD = self._output.add_to(hidden_TD, output_THE.flatten(1))
        gate_TF, up_TF = linear(self._mlp_norm(hidden_TD), *self._gate_up).chunk(2, -1)
        return self._down.add_to(hidden_TD, self._activation(gate_TF).mul_(up_TF))


class _Norm:
    def __init__(self, norm: Any):
        self._weight, self._eps, self._shape = norm.weight.detach(), norm.variance_epsilon, tuple(norm.weight.shape)

    def __call__(self, hidden_TD: Tensor) -> Tensor:
        return torch.rms_norm(hidden_TD, self._shape, self._weight, self._eps)


class _Projection:
    """`hidden + projection(input)`, written into `hidden`."""

    def __init__(self, projection: nn.Linear):
        self._transposed = projection.weight.detach().t()
        self._bias = None if projection.bias is None else projection.bias.detach()

    def add_to(self, hidden_TD: Tensor, input_TF: Tensor) -> Tensor:
        hidden_TD.addmm_(input_TF, self._transposed)
        return hidden_TD if self._bias is None else hidden_TD.add_(self._bias)


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
