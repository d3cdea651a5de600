"""A decoder layer of the Llama family for training on CPUs: two autograd functions around its attention, each with its backward by hand.

Autograd over the model's own modules walks every activation a dozen times, and at a few million parameters these passes over memory
take a quarter of a step. Here residuals and sums of gradients are part of the products, intermediate results are written where an older
one is no longer needed, and what is cheap to compute again (normalised inputs, the MLP's product) is not kept. The parameters, their
names and the mathematics are the model's own.

    RMSNorm:  y = w n,  n = x / r,  r = sqrt(mean(x^2) + eps);  dL/dx = (u - n mean(u n)) / r  with u = w dL/dy
    SwiGLU:   y = W_down (silu(W_gate x) * W_up x)
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from miles.core.model.packed import window_of

_LAYERS = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen3DecoderLayer"})
_NORMS = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Qwen3RMSNorm"})
_DTYPES = frozenset({torch.float32, torch.float64})  # narrower ones have their norms in float32


_thread = threading.local()


@contextmanager
def without_outputs() -> Iterator[None]:
    """For a forward that is run again for what it saves: a layer's last product, more than a quarter of its work, is left out and its output is not
    to be used. Of this thread."""
    _thread.saved_only = True
    try:
        yield
    finally:
        _thread.saved_only = False


def fuse_layers(model: PreTrainedModel) -> int:
    """Give layers of the family this forward, on a CPU (or without weights as yet) in float32 or float64; returns how many got it. Others keep theirs.

    Call before layers are checkpointed or sharded. A layer that computes in a narrower dtype, or of which a part was replaced or
    hooked since (an adapter), runs its own modules.
    """
    if model.device.type not in ("cpu", "meta") or model.dtype not in _DTYPES:
        return 0
    layers = [module for module in model.modules() if type(module).__name__ in _LAYERS and _is_plain(module)]
    for layer in layers:
        layer.forward = functools.partial(_forward, layer, layer.forward)
    return len(layers)


def _forward(layer: Any, own: Callable[..., Tensor], hidden_states: Tensor, **call: Any) -> Tensor:
    rows = call.get("rows")
    if rows is None or hidden_states.dtype not in _DTYPES or not _is_plain(layer):
        return own(hidden_states, **call)
    attention, mlp, hidden_TD = layer.self_attn, layer.mlp, hidden_states[0]
    cosine_TE, sine_TE = (table[0] for table in call["position_embeddings"])
    projections = [projection.weight for projection in (attention.q_proj, attention.k_proj, attention.v_proj)]
    head_norms = [attention.q_norm.weight, attention.k_norm.weight] if hasattr(attention, "q_norm") else [None, None]
    norm = layer.input_layernorm
    query_THE, key_TGE, value_TGE = _Projected.apply(
        hidden_TD, norm.weight, *projections, *head_norms, cosine_TE, sine_TE, norm.variance_epsilon, attention.head_dim
    )
    attended_THE = rows.attend(attention.layer_idx, query_THE, key_TGE, value_TGE, attention.scaling, 0.0, window_of(attention))
    norm, matrices = layer.post_attention_layernorm, [m.weight for m in (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    return _Rest.apply(hidden_TD, attended_THE.flatten(1), norm.weight, *matrices, norm.variance_epsilon)[None]


def _is_plain(layer: nn.Module) -> bool:
    """Nothing within the layer is other than the model class made it."""
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    for module in layer.modules():
        if module is not layer and (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)):
            return False
    linears = [getattr(attention, f"{name}_proj") for name in "qkvo"] + [getattr(mlp, f"{name}_proj") for name in ("gate", "up", "down")]
    norms = [m for name, m in (*layer.named_children(), *attention.named_children()) if name.endswith("norm")]
    dropout = layer.training and getattr(attention, "attention_dropout", 0.0) > 0
    return (
        all(type(linear) is nn.Linear and linear.bias is None for linear in linears)
        and all(type(norm).__name__ in _NORMS for norm in norms)
        and isinstance(mlp.act_fn, (nn.SiLU, SiLUActivation))
        and not dropout
    )


class _Projected(torch.autograd.Function):
    """Norm, projections, the heads' own norms where there are such, and rotation: queries [T, H, E], keys and values [T, G, E]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        norm_D: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        value_weight: Tensor,
        query_norm_E: Tensor | None,
        key_norm_E: Tensor | None,
        cosine_TE: Tensor,
        sine_TE: Tensor,
        eps: float,
        width: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        scale_T1 = _scale(hidden_TD, eps)
        input_TD = (hidden_TD * scale_T1).mul_(norm_D)
        query_THE, key_TGE, value_TGE = ((input_TD @ w.t()).unflatten(1, (-1, width)) for w in (query_weight, key_weight, value_weight))
        rotary = _rotary(cosine_TE, sine_TE)
        saved: list[Tensor | None] = []
        outputs = []
        for heads_TXE, norm_E in ((query_THE, query_norm_E), (key_TGE, key_norm_E)):
            if norm_E is None:
                saved += [None, None]
                outputs.append(_rotated(heads_TXE, *rotary))
            else:
                scale_TX1 = _scale(heads_TXE, eps)
                saved += [heads_TXE, scale_TX1]
                outputs.append(_rotated((heads_TXE * scale_TX1).mul_(norm_E), *rotary))
        ctx.save_for_backward(hidden_TD, norm_D, query_weight, key_weight, value_weight, query_norm_E, key_norm_E, *rotary, scale_T1, *saved)
        return outputs[0], outputs[1], value_TGE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, norm_D, *weights, query_norm_E, key_norm_E, cosine_T1E, sine_T1E, scale_T1, query, query_scale, key, key_scale = ctx.saved_tensors
        by_head, norm_grads = [], []
        for grad_TXE, heads_TXE, scale_TX1, norm_E in ((grads[0], query, query_scale, query_norm_E), (grads[1], key, key_scale, key_norm_E)):
            grad_TXE = _rotated_back(grad_TXE, cosine_T1E, sine_T1E)
            norm_grad_E = None
            if norm_E is not None:
                grad_TXE, norm_grad_E = _norm_backward(grad_TXE, heads_TXE * scale_TX1, scale_TX1, norm_E)
            by_head.append(grad_TXE.flatten(1))
            norm_grads.append(norm_grad_E)
        by_head.append(grads[2].flatten(1))
        normal_TD = hidden_TD * scale_T1
        input_TD = normal_TD * norm_D
        weight_grads = [grad_TX.t() @ input_TD for grad_TX in by_head]
        grad_TD = by_head[0] @ weights[0]
        for grad_TX, weight in zip(by_head[1:], weights[1:], strict=True):
            grad_TD.addmm_(grad_TX, weight)
        grad_TD, grad_norm_D = _norm_backward(grad_TD, normal_TD, scale_T1, norm_D)
        return grad_TD, grad_norm_D, *weight_grads, *norm_grads, *[None] * 4


class _Rest(torch.autograd.Function):
    """`h = hidden + W_o attended`, then `h + MLP(norm(h))`, [T, D]."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, attended_TX: Tensor, norm_D: Tensor, out: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float) -> Tensor:
        middle_TD = torch.addmm(hidden_TD, attended_TX, out.t())
        scale_T1 = _scale(middle_TD, eps)
        input_TD = (middle_TD * scale_T1).mul_(norm_D)
        gate_TF, up_TF = input_TD @ gate.t(), input_TD @ up.t()
        ctx.save_for_backward(attended_TX, norm_D, out, gate, up, down, middle_TD, scale_T1, gate_TF, up_TF)
        if getattr(_thread, "saved_only", False):
            return torch.empty_like(middle_TD)
        return torch.addmm(middle_TD, silu(gate_TF).mul_(up_TF), down.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        attended_TX, norm_D, out, gate, up, down, middle_TD, scale_T1, gate_TF, up_TF = ctx.saved_tensors
        grad_TF = grads[0] @ down
        active_TF = silu(gate_TF)
        grad_down = grads[0].t() @ (active_TF * up_TF)
        grad_up_TF = active_TF.mul_(grad_TF)
        grad_gate_TF = torch.ops.aten.silu_backward(grad_TF.mul_(up_TF), gate_TF)
        normal_TD = middle_TD * scale_T1
        input_TD = normal_TD * norm_D
        grad_gate, grad_up = grad_gate_TF.t() @ input_TD, grad_up_TF.t() @ input_TD
        grad_TD, grad_norm_D = _norm_backward((grad_gate_TF @ gate).addmm_(grad_up_TF, up), normal_TD, scale_T1, norm_D)
        grad_TD += grads[0]
        return grad_TD, grad_TD @ out, grad_norm_D, grad_TD.t() @ attended_TX, grad_gate, grad_up, grad_down, None


def _scale(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension, which stays as 1."""
    return torch.linalg.vector_norm(x, 2, -1, True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _norm_backward(grad: Tensor, normal: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `x` and `weight` of an RMS norm, given `normal = x * scale`. Overwrites `grad`."""
    product = grad * normal
    grad_weight = product.flatten(0, -2).sum(0)
    # mean(u n) with u = w dL/dy
    mean = (product @ weight).unsqueeze(-1).div_(-weight.shape[0])
    return grad.mul_(weight).addcmul_(normal, mean).mul_(scale), grad_weight


def _rotary(cosine_TE: Tensor, sine_TE: Tensor) -> tuple[Tensor, Tensor]:
    """[T, 1, E]. Rotating turns the sign of the second half: here the sine has it, so that the half turn is a plain roll."""
    half = sine_TE.shape[-1] // 2
    return cosine_TE[:, None], torch.cat((-sine_TE[:, :half], sine_TE[:, half:]), -1)[:, None]


def _rotated(heads_TXE: Tensor, cosine_T1E: Tensor, sine_T1E: Tensor) -> Tensor:
    return (heads_TXE * cosine_T1E).addcmul_(heads_TXE.roll(heads_TXE.shape[-1] // 2, -1), sine_T1E)


def _rotated_back(grad_TXE: Tensor, cosine_T1E: Tensor, sine_T1E: Tensor) -> Tensor:
    """The transposed rotation."""
    return (grad_TXE * sine_T1E).roll(grad_TXE.shape[-1] // 2, -1).addcmul_(grad_TXE, cosine_T1E)
