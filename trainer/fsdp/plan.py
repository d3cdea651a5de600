"""What a recipe's layout comes to on `fsdp`, before anything starts: the mesh, what is divided how, and bytes of a rank. No torch: shapes alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from trainer.config import TrainerConfig

MIB = 2**20
_COLUMNS = re.compile(r"\.(q|k|v|gate|up)_proj\.(weight|bias)$")
_ROWS = re.compile(r"\.(o|down)_proj\.weight$")
_LAYER = re.compile(r"\.layers\.\d+\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")

Shapes = Mapping[str, tuple[int, ...]]
"""Of a checkpoint's tensors, by name; a tied head comes once."""


@dataclass(frozen=True, kw_only=True)
class RankBytes:
    """Of the rank that holds most, which is the first.

    Attributes:
        weights, gradients, optimizer: of its own part. gathered: of what is whole for a moment, the root's parameters and the largest layer.
        activations: an estimate of what autograd keeps of one full micro-batch, loss included.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int


def describe(trainer: TrainerConfig, shapes: Shapes, model: Mapping[str, Any], *, bfloat16: bool, adapters: int | None) -> Iterator[str]:
    """Lines for `miles config`.

    Args:
        model: the model's `config.json`. adapters: parameters of what is trained in the weights' stead, or None.
    """
    replicas, tensor = trainer.replicas, trainer.tensor_parallel
    shards = trainer.ranks // (replicas * tensor)
    ranks = f"{trainer.ranks} rank{'s' * (trainer.ranks > 1)}"
    yield f"mesh: {ranks} = {replicas} replica{'s' * (replicas > 1)} x {shards} sharded x {tensor} tensor-parallel (tensor fastest)"
    layers = len({found.group() for name in shapes if (found := _LAYER.search(name))})
    if trainer.ranks > 1:
        yield (
            f"sharded: weights, gradients and AdamW of each of {layers} layers, and of embedding, norm and head as one more unit, by rows over {shards} ranks; "
            f"gathered layer by layer{f'; gradients are summed over {replicas} replicas' if replicas > 1 else ''}"
        )
    if tensor > 1:
        heads, kv_heads = model.get("num_attention_heads", 0), model.get("num_key_value_heads", 0)
        yield (
            f"tensor-parallel: {heads} heads / {tensor} = {heads // tensor}, {kv_heads} key-value heads / {tensor} = {kv_heads // tensor}; embedding, norms "
            "and head are on each"
        )
    if trainer.expert_parallel > 1:
        experts = int(model.get("num_experts") or 0)
        yield f"expert-parallel: {experts} experts / {trainer.expert_parallel} = {experts // trainer.expert_parallel}, whole on their ranks; tokens go there"
    held = bytes_of(trainer, shapes, model, bfloat16=bfloat16, adapters=adapters)
    yield (
        f"memory of a rank: {_mib(held.weights)} weights + {_mib(held.gradients)} gradients + {_mib(held.optimizer)} AdamW (float32)"
        f"{f', {_mib(held.gathered)} gathered for a moment' if held.gathered else ''}, about {_mib(held.activations)} activations of a full micro-batch"
    )


def bytes_of(trainer: TrainerConfig, shapes: Shapes, model: Mapping[str, Any], *, bfloat16: bool, adapters: int | None = None) -> RankBytes:
    """Arguments as in `describe`. Masters, gradients and AdamW's moments are float32; activations and what is gathered in the compute dtype."""
    shards, compute = trainer.ranks // (trainer.replicas * trainer.tensor_parallel), 2 if bfloat16 else 4
    own = 0
    units: dict[str, int] = {}
    for name, (shape, count) in _in_memory(shapes).items():
        shape = _cut(name, shape, trainer.tensor_parallel)
        rows, width = (count, prod(shape)) if count > 1 else (shape[0], prod(shape[1:]))
        own += -(-rows // shards) * width
        layer = _LAYER.search(name)
        unit = layer.group() if layer else ""
        units[unit] = units.get(unit, 0) + (rows * width if trainer.expert_parallel == 1 or ".experts." not in name else 0)
    trained = own if adapters is None else -(-adapters // shards)
    root = units.pop("", 0)
    gathered = root + max(units.values(), default=0) if trainer.ranks > 1 or bfloat16 else 0
    return RankBytes(
        weights=4 * (own if adapters is None else own + trained),
        gradients=4 * trained,
        optimizer=8 * trained,
        gathered=compute * gathered,
        activations=_activations(trainer, model, len(units), compute),
    )


def _in_memory(shapes: Shapes) -> dict[str, tuple[tuple[int, ...], int]]:
    """Shape and number of the tensors that lie fused in memory: those of a layer's experts are one parameter, sharded by experts."""
    found: dict[str, tuple[tuple[int, ...], int]] = {}
    for name, shape in shapes.items():
        fused = _EXPERT.sub(".experts.", name)
        found[fused] = shape, found[fused][1] + 1 if fused in found else 1
    return found


def _cut(name: str, shape: tuple[int, ...], tensor: int) -> tuple[int, ...]:
    if _COLUMNS.search(name):
        return (shape[0] // tensor, *shape[1:])
    return (*shape[:-1], shape[-1] // tensor) if _ROWS.search(name) else shape


def _activations(trainer: TrainerConfig, model: Mapping[str, Any], layers: int, compute: int) -> int:
    """Of a row of `max_tokens_per_microbatch`: two hidden states, the gate and up halves of the MLP, and queries, keys, values and outputs of
    attention before and behind norm and rotation, in each layer; recomputed ones keep one hidden state. The loss keeps the head's gradient and
    the hidden states', and has a chunk of logits beside them."""
    hidden, vocabulary = int(model.get("hidden_size", 0)), int(model.get("vocab_size", 0))
    heads = int(model.get("num_attention_heads") or 1)
    width = int(model.get("head_dim") or hidden // heads)
    kv_heads = int(model.get("num_key_value_heads") or heads)
    inner = int(model.get("moe_intermediate_size") or 0) * int(model.get("num_experts_per_tok") or 0) or int(model.get("intermediate_size") or 4 * hidden)
    per_layer = 2 * hidden + (2 * inner + (3 * heads + 3 * kv_heads) * width) // trainer.tensor_parallel
    tokens, chunk = trainer.max_tokens_per_microbatch, trainer.chunk(max(vocabulary, 1))
    everything, inputs = layers * per_layer, layers * hidden + per_layer
    kept = {"keep": everything, "recompute": inputs, "hilore": min(everything, int(trainer.activation_memory * inputs))}[trainer.activations]
    head = vocabulary * hidden + tokens * 2 * hidden + min(chunk, tokens) * vocabulary
    return compute * (tokens * kept + head)


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"
