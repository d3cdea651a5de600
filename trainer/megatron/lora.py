"""Low-rank adapters on Megatron-Core's linear layers, one for each Hugging Face weight that lies in them, so that peft can read them.

Over tensor ranks: where a layer's output is divided, so is B, and what ranks say of A's gradient is summed on the way back to A's output;
where its input is divided, so is A, and A's outputs are summed before B.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor, nn
from torch.nn.functional import linear

from miles.core.model.config import LoraConfig
from trainer.megatron.architecture import Architecture
from trainer.megatron.mesh import Mesh
from trainer.megatron.model import Chunk
from trainer.megatron.names import Part, adapters_of, parts, shapes
from trainer.megatron.policy import Model
from trainer.rows.row import Row


class Adapter(nn.Module):
    """Of the weights in one linear layer. `part`: how they lie in it."""

    def __init__(self, part: Part, tensors: Mapping[str, Mapping[str, Tensor]], scaling: float):
        super().__init__()
        self.off = False
        self._outward, self._scaling = part.sharded == 0, scaling
        self._pairs = nn.ModuleDict({leaf: nn.ParameterDict(dict(pair)) for leaf, pair in tensors.items()})
        order = _order(part, {leaf: len(pair["lora_B"]) for leaf, pair in tensors.items()}) if self._outward else None
        self.register_buffer("_order", order, persistent=False)

    def tensors(self) -> dict[str, Tensor]:
        return {f"{leaf}.{name}": tensor for leaf, pair in self._pairs.items() for name, tensor in pair.items()}  # type: ignore[operator]

    def forward(self, module: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any] | None:
        """As a hook of the layer: x [T, 1, I] and its output [T, 1, O]."""
        if self.off:
            return None
        x_TI = inputs[0]
        if not self._outward:
            (pair,) = self._pairs.values()
            inner_TR = reduce_from_tensor_model_parallel_region(linear(x_TI, pair["lora_A"]))  # type: ignore[index]
            return output[0] + linear(inner_TR, pair["lora_B"]) * self._scaling, output[1]  # type: ignore[index]
        inner_TR = [copy_to_tensor_model_parallel_region(linear(x_TI, pair["lora_A"])) for pair in self._pairs.values()]  # type: ignore[index]
        outer = [linear(inner, pair["lora_B"]) for inner, pair in zip(inner_TR, self._pairs.values(), strict=True)]  # type: ignore[index]
        rest = output[0].new_zeros(1).expand(*output[0].shape[:-1], 1)  # for rows of weights that have no adapter
        return output[0] + torch.cat((*outer, rest), -1).index_select(-1, self._order) * self._scaling, output[1]  # type: ignore[arg-type]


def _order(part: Part, sizes: Mapping[str, int]) -> Tensor:
    """For each row of the layer the place of its adapter's output, in the order of `sizes`; behind them all where it has none."""
    starts, at = dict[str, int](), 0
    for leaf, size in sizes.items():
        starts[leaf], at = at, at + size
    order = torch.full((part.shape[0],), at)
    first = {leaf: min(block.there[0][0] for block in part.blocks if block.name.split(".")[-2] == leaf) for leaf in sizes}
    for block in part.blocks:
        leaf = block.name.split(".")[-2]
        if leaf in sizes:
            begin = starts[leaf] + block.there[0][0] - first[leaf]
            order[block.here[0][0] : block.here[0][1]] = torch.arange(begin, begin + block.here[0][1] - block.here[0][0])
    return order


def add_adapters(chunks: Sequence[Chunk], base: Architecture, lora: LoraConfig, mesh: Mesh, seed: int, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Freeze the chunks and put adapters, in `dtype`, on their layers; the adapters' tensors by name, one dict a chunk. A is drawn from
    `seed`, the same at any layout, and B is 0: nothing changes yet."""
    architecture = adapters_of(base, lora)
    numbers = {name: number for number, name in enumerate(shapes(architecture))}
    found = []
    both = zip(parts(base, mesh.layout, mesh.rank), parts(architecture, mesh.layout, mesh.rank), strict=True)
    for chunk, (whole, wanted) in zip(chunks, both, strict=True):
        for parameter in chunk.parameters():
            parameter.requires_grad_(False)
            parameter.main_grad = None  # type: ignore[attr-defined]  # Megatron-Core looks for it on a tied embedding
        layers: dict[str, dict[str, dict[str, Tensor]]] = {}
        for name, part in wanted.items():
            layer, _, rest = name.partition(".adapter.")
            leaf, _, kind = rest.partition(".")
            layers.setdefault(layer, {}).setdefault(leaf, {})[kind] = _drawn(part, kind, lora.rank, shapes(architecture), seed, numbers, dtype)
        own: dict[str, Tensor] = {}
        for layer, tensors in layers.items():
            module = chunk.get_submodule(layer)
            module.adapter = Adapter(whole[f"{layer}.weight"], tensors, lora.scaling).to(next(module.parameters()).device)
            module.register_forward_hook(module.adapter)
            own |= {f"{layer}.adapter.{name}": tensor for name, tensor in module.adapter.tensors().items()}
        for name, part in wanted.items():
            set_tensor_model_parallel_attributes(own[name], part.sharded is not None, part.sharded or 0, 1)
        if chunk.pre_process:
            # Recomputed layers have no gradient for their adapters if nothing that comes in asks for one.
            chunk.embedding.word_embeddings.register_forward_hook(lambda module, inputs, output: output.requires_grad_(torch.is_grad_enabled()))
        found.append(own)
    return found


def _drawn(part: Part, kind: str, rank: int, sizes: Mapping[str, tuple[int, ...]], seed: int, numbers: Mapping[str, int], dtype: torch.dtype) -> Tensor:
    """As peft draws: A uniform in +-1 / sqrt(I)."""
    (block,) = part.blocks
    if kind == "lora_B":
        return nn.Parameter(torch.zeros(part.shape, dtype=dtype))
    width = sizes[block.name][1]
    generator = torch.Generator().manual_seed(seed * 1_000_003 + numbers[block.name])
    full = (torch.rand(rank, width, generator=generator) * 2 - 1) / width**0.5
    return nn.Parameter(full[:, slice(*block.there[1])].to(dtype).contiguous())


def shards_of(architecture: Architecture, mesh: Mesh, own: Mapping[str, Tensor], chunk: int) -> dict[int, ShardedTensor]:
    """For dist_checkpointing: where each adapter tensor, by its id, lies in the whole, under its name in peft's files."""
    tensor, data = mesh.place.tensor, mesh.place.data
    found = {}
    for name, part in parts(architecture, mesh.layout, mesh.rank)[chunk].items():
        divided = [] if part.sharded is None else [(part.sharded, tensor, mesh.layout.tensor)]
        replica = (0, 0 if divided else tensor, data)
        found[id(own[name])] = ShardedTensor.from_rank_offsets(part.blocks[0].name, own[name], *divided, replica_id=replica)
    return found


@contextmanager
def adapters_off(chunks: Sequence[nn.Module]) -> Iterator[None]:
    found = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Adapter)]
    for adapter in found:
        adapter.off = True
    try:
        yield
    finally:
        for adapter in found:
            adapter.off = False


class Base(Model):
    """The reference of a policy with adapters: the policy without them, so that there is no second copy of the weights."""

    def score(self, rows: Sequence[Row], temperature: float) -> list[Tensor]:
        with adapters_off(self.chunks):
            return super().score(rows, temperature)
