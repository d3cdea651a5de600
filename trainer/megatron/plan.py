"""What a recipe's parallelism comes to, before anything starts: the mesh, what is divided how, and bytes per rank. No torch, no Megatron-Core."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from trainer.config import TrainerConfig
from trainer.megatron.architecture import VOCABULARY_UNIT, Architecture
from trainer.megatron.layout import Layout, layout_of
from trainer.megatron.names import layers_of, parts

MIB = 2**20


def describe(config: TrainerConfig, architecture: Architecture, *, bfloat16: bool, adapters: Architecture | None = None) -> Iterator[str]:
    """Lines for `miles config`. `adapters`: of what learns in the model's place. Raises ValueError as `layout_of` and `Architecture.check`."""
    layout = layout_of(config)
    architecture.check(layout)
    data, tensor, stages = layout.data, layout.tensor, layout.pipeline
    yield f"mesh: {layout.ranks} ranks = {data} data x {tensor} tensor x {stages} pipeline-parallel (tensor fastest)"
    yield (
        f"tensor-parallel: {architecture.heads} heads / {tensor} = {architecture.heads // tensor}, {architecture.kv_heads} key-value heads / {tensor} = "
        f"{architecture.kv_heads // tensor}; vocabulary {architecture.vocabulary} padded to {architecture.vocabulary_share(layout) * tensor} = "
        f"{tensor} x {architecture.vocabulary_share(layout)} (multiples of {VOCABULARY_UNIT})"
    )
    if stages > 1:
        each = architecture.layers // (stages * layout.chunks)
        schedule = "1F1B" if layout.chunks == 1 else f"interleaved 1F1B, {layout.chunks} pieces a stage"
        yield f"pipeline: {architecture.layers} layers = {stages} stages x {layout.chunks} x {each}; {schedule}; {_stages(architecture, layout)}"
    if architecture.experts:
        yield f"experts: {architecture.experts} / {layout.expert} = {architecture.experts // layout.expert} whole ones in each layer on a rank"
    frozen = [0 if adapters is None else _weights(architecture, layout, rank) * (2 if bfloat16 else 4) for rank in range(layout.ranks)]
    sizes = [own + bytes_of(adapters or architecture, layout, rank, bfloat16=bfloat16) for rank, own in enumerate(frozen)]
    yield (
        f"memory of a rank: {_range(sizes)} for {'' if adapters is None else 'frozen weights, and '}weights, gradients and AdamW "
        f"({'2 + 4 + 12' if bfloat16 else '4 + 4 + 8'} / {data} data-parallel B a parameter), without activations"
    )


def bytes_of(architecture: Architecture, layout: Layout, rank: int, *, bfloat16: bool) -> int:
    """Weights and gradients of what the rank holds, and its share of the distributed optimizer's state; padding included."""
    total = 0
    for chunk in parts(architecture, layout, rank):
        for part in chunk.values():
            copies = layout.data * layout.tensor // layout.expert if part.expert else layout.data
            weight, state = (6, 12) if bfloat16 else (8, 8)
            total += prod(part.shape) * weight + -(-prod(part.shape) * state // copies)
    return total


def _weights(architecture: Architecture, layout: Layout, rank: int) -> int:
    return sum(prod(part.shape) for chunk in parts(architecture, layout, rank) for part in chunk.values())


def _stages(architecture: Architecture, layout: Layout) -> str:
    held = []
    for stage in range(layout.pipeline):
        spans = [layers_of(architecture, layout, stage, chunk) for chunk in range(layout.chunks)]
        held.append(f"stage {stage} has layers " + ", ".join(f"{span.start}-{span.stop - 1}" for span in spans))
    return "; ".join(held)


def _range(sizes: list[int]) -> str:
    low, high = min(sizes), max(sizes)
    return f"{low / MIB:,.1f} MiB" if low == high else f"{low / MIB:,.1f} to {high / MIB:,.1f} MiB"
