"""What every walk through a model under FSDP2 has to say to it; nothing, where the model is whole."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a tensor, without its graph, gathered where the ranks' groups are, also from parts that are offloaded. Collective."""
    tensor = tensor.detach()
    return tensor.to(tensor.device_mesh.device_type).full_tensor() if isinstance(tensor, DTensor) else tensor  # type: ignore[attr-defined]


def reshard(model: nn.Module) -> None:
    """Drop gathered parameters. After a forward without backward the root keeps them, and would not see that its shards changed."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def last_microbatch(model: nn.Module, last: bool) -> None:
    """Gradients are reduced over ranks in the last backward of an optimizer step only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
