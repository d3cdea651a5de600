"""Megatron-Core's distributed optimizer (AdamW, its state divided over data-parallel ranks) under our clipping, schedule and guards."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronConfig
from megatron.core.optimizer import get_megatron_optimizer
from torch import Tensor

from trainer.config import OptimizerConfig
from trainer.megatron import cpu
from trainer.megatron.mesh import Mesh, summed
from trainer.rows.schedule import Update, learning_rate

logger = logging.getLogger(__name__)


class Optimizer:
    """`steps` counts every optimizer step, applied or not, as in `trainer.fsdp.optimizer`.

    Args:
        masters: where the model computes in bfloat16, its parameters in float32, one dict a chunk; they are copied.
    """

    def __init__(
        self, chunks: Sequence[DistributedDataParallel], config: OptimizerConfig, total_steps: int, mesh: Mesh, masters: Sequence[Mapping[str, Tensor]]
    ):
        self._chunks, self._config, self._total, self._mesh = list(chunks), config, total_steps, mesh
        options = MegatronConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            bf16=bool(masters),
            params_dtype=torch.bfloat16 if masters else torch.float32,
            use_distributed_optimizer=True,
            clip_grad=0.0,  # clipped here, in float64 and exactly at the norm
        )
        with cpu.tensors():
            self.inner: Any = get_megatron_optimizer(options, self._chunks)
        for group in self.inner.param_groups:
            # Megatron-Core marks norms and biases, and leaves it to its own scheduler, which is not used, to act on that.
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
        if masters:
            self._set_masters(masters)
        for part in self.parts():
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    # Made now and not at the first step, so that a checkpoint has the same tensors whenever it is taken.
                    part.optimizer.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
        self.steps = 0

    @property
    def applied(self) -> int:
        """Steps that moved the weights, as AdamW counts them."""
        return int(next(self._counters()))

    @applied.setter
    def applied(self, count: int) -> None:
        for counter in self._counters():
            counter.fill_(count)

    def parts(self) -> list[Any]:
        """One for dense parameters, one for experts."""
        return [part for part in self.inner.chained_optimizers if not part.is_stub_optimizer]

    def step(self) -> Update:
        """Clip the reduced gradients to the global norm and update. A gradient that is not finite moves nothing. Collective."""
        lr = learning_rate(self._config, self.steps, self._total)
        self.steps += 1
        self.inner.prepare_grads()
        norm = self._norm()
        grad_norm, finite = float(norm), bool(torch.isfinite(norm))
        if finite:
            if grad_norm > self._config.clip_norm:
                gradients = [p.grad for part in self.parts() for p in part.get_parameters() if p.grad is not None]
                torch._foreach_mul_(gradients, self._config.clip_norm / grad_norm)
            for group in self.inner.param_groups:
                group["lr"] = lr
            self.inner.step_with_ready_grads()
        else:
            self._report()
        self.inner.zero_grad()
        return Update(grad_norm, lr, finite)

    def skip(self) -> Update:
        """Count a step that has nothing to train on."""
        lr = learning_rate(self._config, self.steps, self._total)
        self.steps += 1
        return Update(0.0, lr, False)

    def sleep(self) -> None:
        """Parameters and optimizer state go to the CPU, and the memory they had is given back, gradients' too. Views of it stay views of it."""
        self._move_state(torch.device("cpu"))
        for buffer in self._buffers():
            buffer.param_data_cpu = buffer.param_data.to("cpu", copy=True)
            for data in (buffer.param_data, buffer.grad_data):
                data.untyped_storage().resize_(0)

    def wake(self) -> None:
        """All is as it was; gradients are zero."""
        for buffer in self._buffers():
            for data in (buffer.param_data, buffer.grad_data):
                data.untyped_storage().resize_(data.numel() * data.itemsize)
            buffer.param_data.copy_(buffer.param_data_cpu)
            buffer.grad_data.zero_()
            buffer.param_data_cpu = None
        self._move_state(self._device())

    def _move_state(self, device: torch.device) -> None:
        for part in self.parts():
            for state in part.optimizer.state.values():
                state.update({kind: state[kind].to(device) for kind in ("exp_avg", "exp_avg_sq")})
            for group in part.shard_fp32_from_float16_groups:
                for master in group:
                    master.data = master.data.to(device)

    def _buffers(self) -> list[Any]:
        return [buffer for chunk in self._chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def _counters(self) -> Iterator[Tensor]:
        return (state["step"] for part in self.parts() for state in part.optimizer.state.values())

    def _norm(self) -> Tensor:
        """L2 norm of the whole model's gradient in float64. Every element counts once: copies on tensor ranks and stages are left out."""
        gradients = [gradient for part in self.parts() for gradient in part.get_main_grads_for_grad_norm()]
        norms = torch._foreach_norm(gradients) if gradients else [torch.zeros((), device=self._device())]
        return summed(torch.stack([n.double() for n in norms]).square().sum(), self._mesh.everyone).sqrt()

    def _set_masters(self, masters: Sequence[Mapping[str, Tensor]]) -> None:
        """Megatron-Core made them from bfloat16, which has lost bits that the checkpoint has."""
        owners = {parameter: part for part in self.parts() for parameter in part.model_param_gbuf_map}
        for chunk, values in zip(self._chunks, masters, strict=True):
            for name, parameter in chunk.module.named_parameters():
                if parameter.requires_grad and parameter.main_param is not None:
                    span = owners[parameter]._get_model_param_range_map(parameter)["param"]
                    parameter.main_param.copy_(values[name].view(-1)[span.start : span.end])

    def _device(self) -> torch.device:
        return next(self._chunks[0].parameters()).device

    def _report(self) -> None:
        broken = [name for chunk in self._chunks for name, p in chunk.module.named_parameters() if p.requires_grad and not torch.isfinite(p.main_grad).all()]
        if broken:
            logger.warning("optimizer step %d is left out: the gradient is not finite in %d tensors: %s", self.steps, len(broken), ", ".join(broken[:8]))
