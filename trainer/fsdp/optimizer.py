"""AdamW over plain or sharded parameters: global clipping, the schedule, and steps that are left out because they would harm."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.config import OptimizerConfig
from trainer.rows.schedule import Update, learning_rate

logger = logging.getLogger(__name__)


class Optimizer:
    """`steps` counts every optimizer step, applied or not: the schedule follows the run's plan."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, total_steps: int):
        self._config, self._total = config, total_steps
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # One call of the fused kernel takes tensors of one mesh only.
        groups: dict[tuple[bool, Any], list[Tensor]] = {}
        for p in self._named.values():
            groups.setdefault((p.ndim >= 2, p.device_mesh if isinstance(p, DTensor) else None), []).append(p)
        by_kind = [{"params": found, "weight_decay": config.weight_decay if matrices else 0.0} for (matrices, _), found in groups.items()]
        self._adamw = torch.optim.AdamW(by_kind, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        for parameter in self._named.values():
            # Made now and not at the first step, so that a checkpoint has the same tensors whenever it is taken.
            self._adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        self.steps = 0

    def step(self) -> Update:
        """Clip the gradients to the global norm, update, and drop them. A gradient that is not finite moves nothing. Collective."""
        lr = learning_rate(self._config, self.steps, self._total)
        self.steps += 1
        gradients = {name: p.grad for name, p in self._named.items() if p.grad is not None}
        norm = global_norm(list(gradients.values()))
        grad_norm = float(norm)
        finite = torch.isfinite(norm).item()
        if finite:
            if grad_norm > self._config.clip_norm:
                torch._foreach_mul_([local(g) for g in gradients.values()], self._config.clip_norm / grad_norm)
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
        else:
            self._report(gradients)
        self._adamw.zero_grad(set_to_none=True)
        return Update(grad_norm, lr, bool(finite))

    def skip(self) -> Update:
        """Count a step that has nothing to train on."""
        lr = learning_rate(self._config, self.steps, self._total)
        self.steps += 1
        return Update(0.0, lr, False)

    def tensors(self) -> dict[str, Tensor]:
        """State by name, live: loading a checkpoint writes into these."""
        return {f"optimizer.{name}.{kind}": value for name, p in self._named.items() for kind, value in self._adamw.state[p].items()}

    def to(self, device: str) -> None:
        """Move the state; parameters have been moved already."""
        for state in self._adamw.state.values():
            for kind, value in state.items():
                state[kind] = value.to(device)

    def _report(self, gradients: dict[str, Tensor]) -> None:
        broken = [name for name, gradient in gradients.items() if not torch.isfinite(local(gradient)).all()]
        if broken:
            logger.warning("optimizer step %d is left out: the gradient is not finite in %d tensors: %s", self.steps, len(broken), ", ".join(broken[:8]))


def global_norm(gradients: list[Tensor]) -> Tensor:
    """L2 norm over all tensors and ranks, a 0-dimensional plain tensor in float64."""
    squares = torch.stack([n.double() for n in torch._foreach_norm([local(g) for g in gradients])]).square()
    parts: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for gradient, square in zip(gradients, squares, strict=True):
        parts.setdefault(_sharded_over(gradient), []).append(square)
    totals = []
    for groups, own in parts.items():
        total = torch.stack(own).sum().to(_home_of_groups(gradients[0]))
        for group in groups:
            dist.all_reduce(total, group=group)
        totals.append(total)
    return torch.stack(totals).sum().sqrt()


def _home_of_groups(tensor: Tensor) -> str:
    """Where a sum over ranks must lie: gradients that are offloaded lie elsewhere."""
    return tensor.device_mesh.device_type if isinstance(tensor, DTensor) else tensor.device.type


def _sharded_over(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups whose ranks hold parts of it, and not the same."""
    if not isinstance(tensor, DTensor):
        return ()
    return tuple(tensor.device_mesh.get_group(d) for d, placement in enumerate(tensor.placements) if not placement.is_replicate())


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
