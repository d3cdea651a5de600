"""Divides the layers of a transformers model over the tensor-parallel ranks, by the plan that the model's own configuration has.

Projections into a layer are cut by columns (heads), those out of it by rows; between layers every rank has the same hidden states
(Shoeybi et al. 2019, arXiv:1909.08053). Embedding, norms and output head stay whole on each tensor rank.
"""

from __future__ import annotations

import re

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel, parallelize_module
from transformers import PreTrainedModel

_HEADS = 2
"""The dimension of heads where a norm of heads sees them: [1, T, H, E]."""


def parallelise(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """In place, before `fully_shard`. Collective, where the model has weights already. Raises ValueError as `styles_of`."""
    parallelize_module(model.base_model, mesh, styles_of(model, mesh.size()))


def styles_of(model: PreTrainedModel, ranks: int) -> dict[str, ParallelStyle]:
    """How each module of the model's body is divided over so many ranks.

    Raises:
        ValueError: the model's configuration has no such plan, or one with parts that are not there yet (experts), or its heads do not divide.
    """
    config = model.config.get_text_config()
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    if not plan:
        raise ValueError(f"trainer.tensor_parallel = {ranks} needs a plan, and {type(config).__name__} has none: use tensor_parallel = 1")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, name) % ranks:
            raise ValueError(f"trainer.tensor_parallel = {ranks} does not divide the model's {name} = {getattr(config, name)}")
    return {name: style for name, module in model.base_model.named_modules() if (style := _style(plan, name, module)) is not None}


def _style(plan: dict[str, str], name: str, module: nn.Module) -> ParallelStyle | None:
    """What stands outside of the numbered layers stays whole."""
    for pattern, style in plan.items():
        if "*" not in pattern or not re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name):
            continue
        if style == "colwise":
            return ColwiseParallel()
        if style == "rowwise":
            return RowwiseParallel()
        if style == "replicated_with_grad_allreduce":
            return SequenceParallel(sequence_dim=_HEADS, use_local_output=True)  # each rank has the gradient of its own heads
        raise ValueError(f"trainer.tensor_parallel > 1 with {type(module).__name__} ({name}: {style!r}) is not there yet: use tensor_parallel = 1")
    return None
