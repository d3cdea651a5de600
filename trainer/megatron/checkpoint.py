"""Checkpoints by Megatron-Core's dist_checkpointing: every parameter once, in global shapes, so that any layout reads them.

A parameter is stored as its float32 master and its two Adam moments; weights in a narrower dtype are made from the master again.
Megatron-Core's own reshardable format mixes up parameters when a rank has several buckets, as pipeline stages with a tied embedding
have, so the moments are put together here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, _replace_state_dict_keys_with_sharded_keys, mcore_to_pyt_state_dict
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from miles.core.checkpoint import reader
from miles.core.checkpoint.rng import tensor_name as rng_name
from miles.core.checkpoint.store import CheckpointError, read_manifest
from miles.core.checkpoint.writer import CheckpointWriter
from trainer.megatron import cpu
from trainer.megatron.mesh import Mesh
from trainer.megatron.optimizer import Optimizer

KINDS = ("master", "exp_avg", "exp_avg_sq")


class Writer(CheckpointWriter):
    """Writes what `collect` gathered. Megatron-Core's bookkeeping uses the default process group, which is left to this thread."""

    def _staged(self, tensors: Any) -> dict[str, Any]:
        return dict(tensors)  # `collect` copied them

    def _put(self, tensors: dict[str, Any], folder: Path) -> None:
        name = rng_name(self._rank)
        try:
            with cpu.tensors():
                dist_checkpointing.save(tensors | {name: _of_one_rank(name, tensors[name])}, str(folder), _Strategy(self._group))
        except dist_checkpointing.mapping.CheckpointingException as error:
            raise RuntimeError(str(error)) from error


class _Strategy(SaveShardedStrategy):
    """Megatron-Core's `torch_dist` format, written by torch's own writer in this thread: its own one forks processes."""

    def __init__(self, group: dist.ProcessGroup | None):
        super().__init__("torch_dist", 1)
        self._group = group

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        dcp.save(mcore_to_pyt_state_dict(flat, False), checkpoint_id=checkpoint_dir, planner=planner, process_group=self._group)

    def can_handle_sharded_objects(self) -> bool:
        return True


@dataclass(frozen=True)
class Saved:
    """A model and its optimizer. `prefix`: of all its names in a checkpoint; the policy's is empty. `adapters`: where all that is saved of
    the model lies, one dict a chunk by the tensors' ids; None where that is the whole model."""

    prefix: str
    chunks: Sequence[DistributedDataParallel]
    optimizer: Optimizer
    adapters: Sequence[dict[int, Any]] | None = None


def collect(models: Sequence[Saved]) -> dict[str, Any]:
    """Copies of everything that is trained, whole on data-parallel rank 0 and described for dist_checkpointing. Collective."""
    collected: dict[str, Any] = {}
    for name, place, parameter, part in chain.from_iterable(map(_described, models)):
        group = part.data_parallel_group
        for kind in KINDS:
            full = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
            if parameter in _held(part):
                start, stop = _span(part, parameter)
                full[start:stop] = _states(part, parameter)[kind]
            if group.size() > 1:
                dist.reduce(full, dist.get_process_group_ranks(group)[0], group=group)
            if group.rank() == 0:
                collected[f"{kind}.{name}"] = _named(place, kind, full.view(parameter.shape).cpu())
    for name, place, buffer in chain.from_iterable(map(_untrained, models)):
        collected[f"master.{name}"] = _named(place, "master", buffer.cpu().clone())
    return collected


def load(folder: Path, models: Sequence[Saved], mesh: Mesh, *, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fill parameters and optimizers from `folder`, written at any layout, and restore random states; `(state, extra)`. Collective.

    Raises:
        CheckpointError: `folder` is not complete, not of this backend, or not of this model.
    """
    manifest = read_manifest(folder)
    if not (folder / "metadata.json").is_file():
        raise CheckpointError(f"checkpoint {folder} does not fit: it was not written by trainer.backend = 'megatron'")
    stored = dist_checkpointing.load_tensors_metadata(str(folder))
    wanted: dict[str, Any] = {}
    for name, place, parameter, _ in chain.from_iterable(map(_described, models)):
        for kind in KINDS:
            wanted[f"{kind}.{name}"] = _named(place, kind, torch.empty(parameter.shape, dtype=torch.float32))
    for name, place, buffer in chain.from_iterable(map(_untrained, models)):
        wanted[f"master.{name}"] = _named(place, "master", torch.empty_like(buffer, device="cpu"))
    own = rng_name(mesh.rank)
    if manifest["world"] == mesh.layout.ranks:
        wanted[own] = _of_one_rank(own, torch.empty(stored[own].global_shape, dtype=torch.uint8))
    try:
        with cpu.tensors():
            found = dist_checkpointing.load(wanted, str(folder))
    except dist_checkpointing.mapping.CheckpointingException as error:
        raise CheckpointError(f"checkpoint {folder} does not fit: {error}") from error
    with torch.no_grad():
        for name, _, parameter, part in chain.from_iterable(map(_described, models)):
            parameter.copy_(found[f"master.{name}"])
            if parameter in _held(part):
                start, stop = _span(part, parameter)
                for kind, tensor in _states(part, parameter).items():
                    tensor.copy_(found[f"{kind}.{name}"].view(-1)[start:stop])
        for name, _, buffer in chain.from_iterable(map(_untrained, models)):
            buffer.copy_(found[f"master.{name}"])
    reader.resume_rng(folder, manifest, found.get(own), rank=mesh.rank, world=mesh.layout.ranks, seed=seed)
    return manifest["state"], manifest["extra"]


def _described(model: Saved) -> Iterator[tuple[str, ShardedBase, Tensor, Any]]:
    """A name of this rank, Megatron-Core's description of its place in the whole, the parameter, and the part of the optimizer that has it."""
    parts = {parameter: part for part in model.optimizer.parts() for buffer in part.buffers for parameter in buffer.param_index_map}
    for number, chunk in enumerate(model.chunks):
        bases = [] if model.adapters is not None else _bases(chunk.module.sharded_state_dict(model.prefix))
        places = model.adapters[number] if model.adapters is not None else {id(base.data): base for base in bases}
        for name, parameter in ((name, p) for name, p in chunk.module.named_parameters() if p.requires_grad):
            yield f"{model.prefix}{number}.{name}", places[id(parameter)], parameter, parts[parameter]


def _untrained(model: Saved) -> Iterator[tuple[str, ShardedBase, Tensor]]:
    """As `_described`, of buffers that are part of the model: one rank's is written."""
    if model.adapters is not None:
        return
    for number, chunk in enumerate(model.chunks):
        places = {id(base.data): base for base in _bases(chunk.module.sharded_state_dict(model.prefix))}
        for name, tensor in chunk.module.tensors().items():
            if not isinstance(tensor, torch.nn.Parameter):
                yield f"{model.prefix}{number}.{name}", places[id(tensor)], tensor


def _bases(tree: Any) -> Iterator[ShardedBase]:
    if isinstance(tree, ShardedBase):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _bases(value)


def _named(place: Any, kind: str, tensor: Tensor) -> Any:
    """The same place for another tensor. A factory (gate and up in one) tells its pieces itself."""
    options = {"dtype": tensor.dtype} if isinstance(place, ShardedTensor) else {}
    return replace(place, key=f"{kind}.{place.key}", data=tensor, **options)


def _held(part: Any) -> Any:
    """The parameters of which this data-parallel rank has a shard."""
    return part.model_param_group_index_map


def _span(part: Any, parameter: Tensor) -> tuple[int, int]:
    span = part._get_model_param_range_map(parameter)["param"]
    return span.start, span.end


def _states(part: Any, parameter: Tensor) -> dict[str, Tensor]:
    """This rank's shards, live and flat."""
    states = part._get_main_param_and_optimizer_states(parameter)
    return {"master": states["param"].detach(), "exp_avg": states["exp_avg"], "exp_avg_sq": states["exp_avg_sq"]}


def _of_one_rank(name: str, tensor: Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(name, tensor, replica_id=0)
