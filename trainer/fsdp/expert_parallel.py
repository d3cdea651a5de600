"""Divides the experts of each layer over the ranks that share a batch: tokens travel to their experts and back, and no expert's weights do.

Each rank has whole experts, the same that FSDP2 would give it of a parameter that has them by rows, but nothing gathers them: a layer's tokens
are sent to the ranks of the experts that they chose, all to all, and the answers return the same way (Lepikhin et al. 2020, arXiv:2006.16668).
An expert's gradient is whole on its own rank, since every token that it saw came there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import linear

_EXPERTS = frozenset({"Qwen3MoeExperts"})
_WEIGHTS = ("gate_up_proj", "down_proj")


def experts_of(model: nn.Module) -> list[Any]:
    """The modules that have all experts of a layer, fused."""
    return [module for module in model.modules() if type(module).__name__ in _EXPERTS]


def check_experts(model: nn.Module, ranks: int) -> None:
    """Raises ValueError for a model without experts, or with a number of them that does not divide."""
    found = experts_of(model)
    if not found:
        raise ValueError(f"trainer.expert_parallel = {ranks} is for mixtures of the kind of qwen3_moe, and {type(model).__name__} is none: use 1")
    if found[0].num_experts % ranks:
        raise ValueError(f"trainer.expert_parallel = {ranks} does not divide the model's num_experts = {found[0].num_experts}")


def divide_experts(model: nn.Module, mesh: DeviceMesh) -> set[nn.Parameter]:
    """In place, before `fully_shard`, which is to leave the parameters that are returned alone. A model without experts stays as it is."""
    divided = set()
    for experts in experts_of(model):
        for name in _WEIGHTS:
            whole = getattr(experts, name)
            part = nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None), requires_grad=whole.requires_grad)
            experts.register_parameter(name, part)
            divided.add(part)
        experts.forward = partial(_forward, experts, mesh.get_group())
    return divided


def _forward(experts: Any, group: dist.ProcessGroup, hidden_TD: Tensor, chosen_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """The sum of the chosen experts' outputs by weight, [T, D]. Collective, also for a rank without tokens."""
    ranks, own = group.size(), experts.num_experts // group.size()
    order_S = chosen_TK.flatten().argsort(stable=True)  # S = T K places, by expert
    token_S = order_S // chosen_TK.shape[1]
    sent_RX = chosen_TK.flatten().bincount(minlength=experts.num_experts).view(ranks, own)
    received_RX = torch.empty_like(sent_RX)
    dist.all_to_all_single(received_RX, sent_RX, group=group)
    sent, received = sent_RX.sum(1).tolist(), received_RX.sum(1).tolist()
    arrived_AD = _AllToAll.apply(hidden_TD[token_S], received, sent, group)
    expert_A = torch.arange(own, device=hidden_TD.device).repeat(ranks).repeat_interleave(received_RX.flatten())
    by_expert_A = expert_A.argsort(stable=True)
    parts = arrived_AD[by_expert_A].split(received_RX.sum(0).tolist())
    answers_AD = torch.cat([_answer(experts, number, part_AD) for number, part_AD in enumerate(parts)])
    returned_SD = _AllToAll.apply(answers_AD[by_expert_A.argsort()], sent, received, group)
    weighted_SD = returned_SD * weight_TK.flatten()[order_S, None].to(returned_SD.dtype)
    return torch.zeros_like(hidden_TD).index_add(0, token_S, weighted_SD)


def _answer(experts: Any, number: int, hidden_AD: Tensor) -> Tensor:
    """Of this rank's expert `number`; of no token too, so that every rank's backward has the same exchanges."""
    up_weight, down_weight = (_local(getattr(experts, name))[number].to(hidden_AD.dtype) for name in _WEIGHTS)
    gate_AF, up_AF = linear(hidden_AD, up_weight).chunk(2, -1)
    return linear(experts.act_fn(gate_AF) * up_AF, down_weight)


def _local(weight: DTensor) -> Tensor:
    return weight.to_local()


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks: `sent[r]` rows to rank r, `received[r]` from it, in the order of ranks. The gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, rows_SD: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way = received, sent, group
        return _exchanged(rows_SD, received, sent, group)

    @staticmethod
    def backward(ctx: Any, gradient_AD: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        received, sent, group = ctx.way
        return _exchanged(gradient_AD, sent, received, group), None, None, None


def _exchanged(rows_SD: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived_AD = rows_SD.new_empty(sum(received), rows_SD.shape[1])
    dist.all_to_all_single(arrived_AD, rows_SD.contiguous(), received, sent, group=group)
    return arrived_AD
