"""Megatron-Core's process groups for a layout."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer.megatron import cpu
from trainer.megatron.layout import Layout, Place


@dataclass(frozen=True)
class Mesh:
    """This rank's groups. `everyone` is of all ranks: the default group is left to checkpoints that are written in the background."""

    layout: Layout
    rank: int
    place: Place
    everyone: dist.ProcessGroup
    tensor: dist.ProcessGroup
    data: dist.ProcessGroup
    pipeline: dist.ProcessGroup

    @property
    def scores(self) -> bool:
        """Whether this rank is of the last stage, which alone has log-probs."""
        return self.place.stage == self.layout.pipeline - 1

    @property
    def speaks(self) -> bool:
        """Whether this rank's log-probs count: one of those that have the same."""
        return self.scores and self.place.tensor == 0


def open_mesh(layout: Layout, rank: int, timeout_s: float) -> Mesh:
    """Collective over the default process group, and seeds torch, so seed it after. Groups of a mesh opened before in this process are closed.

    A rank waits `timeout_s` seconds for the others in each of its groups: torch gives a new one half an hour, whatever the default group has.
    """
    cpu.redirect()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    if parallel_state.is_initialized():
        _close()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=True,
        distributed_timeout_minutes=timeout_s / 60,  # type: ignore[arg-type]
    )
    model_parallel_cuda_manual_seed(0)  # generators that Megatron-Core wants to find; nothing is drawn from them
    place = layout.place(rank)
    mesh = Mesh(
        layout=layout,
        rank=rank,
        place=place,
        everyone=parallel_state.create_group(list(range(layout.ranks)), timeout=timedelta(seconds=timeout_s)),
        tensor=parallel_state.get_tensor_model_parallel_group(),
        data=parallel_state.get_data_parallel_group(),
        pipeline=parallel_state.get_pipeline_model_parallel_group(),
    )
    found = (mesh.tensor.rank(), mesh.data.rank(), mesh.pipeline.rank(), parallel_state.get_expert_model_parallel_rank())
    assert found == (place.tensor, place.data, place.stage, place.expert), (found, place)
    return mesh


def _close() -> None:
    """Megatron-Core only forgets its groups, which live on: dozens a mesh, and each of gloo's has a thread that wakes a hundred times a second."""
    from megatron.core import parallel_state

    dist.barrier()  # none is closed while another rank still talks in it
    for group in parallel_state._global_process_group_list or []:
        if group is not None:  # the default one
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def summed(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Over the group, in place."""
    if group.size() > 1:
        dist.all_reduce(tensor, group=group)
    return tensor
