"""Decoder layers of the Llama family with a third of the calls: the same parameters, for forwards without autograd.

At a few million parameters a decoding step is made of call overhead, not of arithmetic. Projections that read the same input
become one product: their weights are laid side by side in one buffer and the model's own parameters become views of it, so there
is one copy and whatever writes the parameters in place writes here. The buffer is [inputs, outputs]: MKL's product of a few dozen
rows with it takes two thirds of the time of the one with [outputs, inputs]. `decode.Decoder` compares with the model's own forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers.activations import SiLUActivation

from miles.core.model.lora import adapter_tensors
from miles.core.model.packed import window_of

_LAYERS = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})


def lean_layers(body: Any) -> LeanLayers | None:
    """The layers and final norm of a transformers decoder `body`, or None for an architecture that is not of the family, and with adapters."""
    known = all(type(layer).__name__ in _LAYERS and not adapter_tensors(layer) for layer in body.layers)
    return LeanLayers(body) if known else None


class LeanLayers:
    """Call with tokens [T], their rows [T, E] of the rotary table and an attention context."""

    def __init__(self, body: Any):
        self._embedding = body.embed_tokens.weight.detach()
        self._layers = [_LeanLayer(layer) for layer in body.layers]
        self._norm = _Norm(body.norm.weight, body.norm.variance_epsilon)

    def __call__(self, tokens_T: Tensor, rotary: Sequence[Tensor], rows: Any) -> Tensor:
        hidden_TD = self._embedding.index_select(0, tokens_T)
        cosine_T1E, sine_T1E = (table_TE[:, None] for table_TE in rotary)
        for layer in self._layers:
            hidden_TD = layer(hidden_TD, cosine_T1E, sine_T1E, rows)
        return self._norm(hidden_TD)

    @staticmethod
    def rotary_table(cosine_CE: Tensor, sine_CE: Tensor) -> tuple[Tensor, Tensor]:
        """Rotating turns the second half's sign: here the sine has it."""
        half = sine_CE.shape[-1] // 2
        return cosine_CE, torch.cat((-sine_CE[:, :half], sine_CE[:, half:]), -1)

    def refresh(self) -> None:
        """Call after parameters were written in place: the norms hold scaled copies of their weights."""
        self._norm.refresh()
        for layer in self._layers:
            layer.refresh()


class _LeanLayer:
    def __init__(self, layer: Any):
        attention, mlp = layer.self_attn, layer.mlp
        self._number: int = attention.layer_idx
        self._scaling: float = attention.scaling
        self._width: int = attention.head_dim
        self._window = window_of(attention)
        self._heads = attention.q_proj.out_features // self._width
        groups = attention.k_proj.out_features // self._width
        self._rotated_heads = self._heads + groups
        self._qkv = _Projections(attention.q_proj, attention.k_proj, attention.v_proj)
        self._gate_up = _Projections(mlp.gate_proj, mlp.up_proj)
        self._output, self._down = _Projections(attention.o_proj), _Projections(mlp.down_proj)
        self._activation = silu if isinstance(mlp.act_fn, (nn.SiLU, SiLUActivation)) else mlp.act_fn
        self._norms = [_Norm(norm.weight, norm.variance_epsilon) for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        if hasattr(attention, "q_norm"):
            query_norm, key_norm = attention.q_norm, attention.k_norm
            heads = [query_norm.weight] * self._heads + [key_norm.weight] * groups
            self._norms.append(_Norm(heads, query_norm.variance_epsilon))

    def refresh(self) -> None:
        for norm in self._norms:
            norm.refresh()

    def __call__(self, hidden_TD: Tensor, cosine_T1E: Tensor, sine_T1E: Tensor, rows: Any) -> Tensor:
        input_norm, mlp_norm, *head_norm = self._norms
        qkv_TXE = self._qkv(input_norm(hidden_TD)).view(hidden_TD.shape[0], -1, self._width)
        rotated_TXE = qkv_TXE[:, : self._rotated_heads]
        if head_norm:
            rotated_TXE = head_norm[0](rotated_TXE)
        rotated_TXE = (rotated_TXE * cosine_T1E).addcmul_(rotated_TXE.roll(self._width // 2, -1), sine_T1E)
        query_THE, key_TGE, value_TGE = rotated_TXE[:, : self._heads], rotated_TXE[:, self._heads :], qkv_TXE[:, self._rotated_heads :]
        output_THE = rows.attend(self._number, query_THE, key_TGE, value_TGE, self._scaling, 0.0, self._window)
        hidden_TD = self._output.add_to(hidden_TD, output_THE.flatten(1))
        gate_TF, up_TF = self._gate_up(mlp_norm(hidden_TD)).chunk(2, -1)
        return self._down.add_to(hidden_TD, self._activation(gate_TF).mul_(up_TF))


class _Norm:
    """RMS norm over the last dimension in four calls: x / sqrt(mean(x^2) + eps) = x sqrt(D) / hypot(|x|, sqrt(D eps)).

    `weight` is [D], or a list of such, one for each head of [..., X, D]. Narrower dtypes than float32 take torch's own.
    """

    def __init__(self, weight: Tensor | list[Tensor], eps: float):
        self._source, self._eps = weight, eps
        self.refresh()

    def refresh(self) -> None:
        weight = torch.stack(self._source) if isinstance(self._source, list) else self._source
        self._weight, self._size = weight.detach(), weight.shape[-1]
        self._scaled = self._weight * self._size**0.5
        self._floor = torch.tensor((self._size * self._eps) ** 0.5, dtype=weight.dtype, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return torch.rms_norm(x, (self._size,), None, self._eps).mul_(self._weight)
        return x.div(torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), self._floor)).mul_(self._scaled)


class _Projections:
    """Projections of one input, their outputs side by side: weight [D, X] and bias [X], of which their own parameters become views."""

    def __init__(self, *projections: nn.Linear):
        sizes = [projection.out_features for projection in projections]
        self._weight = torch.cat([projection.weight.detach() for projection in projections]).t().contiguous()
        for projection, part_DX in zip(projections, self._weight.split(sizes, 1), strict=True):
            projection.weight.data = part_DX.t()
        biases = [projection.bias for projection in projections if projection.bias is not None]
        assert len(biases) in (0, len(projections))
        self._bias = torch.cat([bias.detach() for bias in biases]) if biases else None
        for bias, part in zip(biases, self._bias.split(sizes) if self._bias is not None else (), strict=True):
            bias.data = part

    def __call__(self, input_TD: Tensor) -> Tensor:
        return input_TD @ self._weight if self._bias is None else torch.addmm(self._bias, input_TD, self._weight)

    def add_to(self, hidden_TX: Tensor, input_TD: Tensor) -> Tensor:
        """`hidden + projection(input)`, written into `hidden`."""
        hidden_TX.addmm_(input_TD, self._weight)
        return hidden_TX if self._bias is None else hidden_TX.add_(self._bias)
