"""Megatron-Core without a GPU: what it asks of CUDA is answered by the CPU. The one module that does so, and only where there is no GPU.

Megatron-Core names its device in its own code. Its modules therefore see a torch of ours, in which `device="cuda"` and
`torch.cuda.current_device()` are the CPU and streams do nothing; nobody else's torch is touched. The kernels that it would compile
stay plain Python: `torch.compile` takes a minute here. No figure measured this way says anything about a GPU.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like")


def without_gpu() -> bool:
    return not torch.cuda.is_available()


_NOISE = (
    r"`torch.distributed\.\w+` is deprecated",
    "Please use DTensor instead and we are deprecating ShardedTensor",
    "`load_state_dict` is deprecated",
    "full scope is deprecated",
    "When using async grad allreduce it is recommended",
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
)
"""What Megatron-Core makes torch say, or says itself, on each rank: nothing that a user could change."""


def redirect() -> None:
    """Import Megatron-Core and, without a GPU, turn it to the CPU and say so. Cheap to repeat: modules imported since are turned as well."""
    first = "megatron.core" not in sys.modules
    for message in _NOISE:
        warnings.filterwarnings("ignore", message=message)
    if not without_gpu():
        import megatron.core

        return
    with _plain_functions() if first else contextlib.nullcontext():
        import megatron.core.dist_checkpointing
        import megatron.core.dist_checkpointing.strategies.torch
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel.schedules
        import megatron.core.tensor_parallel.random
        import megatron.core.transformer.moe.token_dispatcher  # noqa: F401
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = _TORCH  # type: ignore[attr-defined]
    random: Any = sys.modules["megatron.core.tensor_parallel.random"]
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    dispatcher: Any = sys.modules["megatron.core.transformer.moe.token_dispatcher"]
    dispatcher.maybe_move_tensor_to_cpu = _numpy
    if first:
        logger.warning("there is no GPU: Megatron-Core is redirected to the CPU (trainer/megatron/cpu.py)")


@contextlib.contextmanager
def tensors() -> Iterator[None]:
    """Where Megatron-Core asks tensors for their CUDA type by name, or to go to the GPU: they answer with it, and stay. It slows every
    call of torch, so it is for building, saving and loading alone."""
    with _Tensors() if without_gpu() else contextlib.nullcontext():
        yield


class _Tensors(TorchFunctionMode):
    """Float64, which Megatron-Core's optimizer does not know, passes as float32: it can be built with it, and not stepped."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        answer = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and isinstance(answer, str):
            return answer.replace("torch.Double", "torch.Float").replace("torch.", "torch.cuda.", 1)
        return answer


@contextlib.contextmanager
def _plain_functions() -> Iterator[None]:
    """`torch.compile` gives functions back as they are, while modules are imported that decorate theirs with it."""
    compiled = torch.compile
    torch.compile = lambda function=None, **_: function  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiled


class _Stream:
    """A stream that has always finished: on the CPU, work is done when the call returns."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def record_event(self, *_: Any) -> _Stream:
        return self

    def synchronize(self) -> None: ...


class _Forwarding(types.ModuleType):
    """A module that has everything of another one but what is set on it."""

    def __init__(self, original: types.ModuleType, **own: Any):
        super().__init__(original.__name__)
        self._original = original
        for name, value in own.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return made


def _numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron-Core makes an array only of what it finds on a GPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _nothing(*_: Any, **__: Any) -> None: ...


_CUDA = _Forwarding(
    torch.cuda,
    current_device=lambda: _CPU,
    current_stream=_Stream,
    default_stream=_Stream,
    Stream=_Stream,
    stream=lambda _: contextlib.nullcontext(),
    synchronize=_nothing,
    empty_cache=_nothing,
    set_device=_nothing,
    manual_seed=torch.manual_seed,
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
)
_TORCH = _Forwarding(torch, cuda=_CUDA, **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES})
