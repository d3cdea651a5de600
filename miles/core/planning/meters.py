"""Counts what happened: float operations by operator, bytes that autograd holds, collectives and their bytes, waits of the host.

    with Meter(model) as meter:
        loss = ...
        loss.backward()
    meter.flops["matmul"], meter.peak_saved_bytes, meter.collectives["all_gather"], meter.host_syncs

For measurements and tests: every operator passes through Python while it counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from miles.core.planning.ledger import Held, Ledger

_COLLECTIVES = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "broadcast_": "broadcast",
}
_SYNCS = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_consecutive", "unique_dim"})


class SavedMeter:
    """Counts the bytes that autograd holds; a context manager that may be read at any time.

    Args:
        ledger: of whoever keeps tensors in autograd's stead (`trainer.split_forward.activations`), so that they count too.
    Attributes:
        saved_bytes, peak_saved_bytes: held now and at most, each storage once; parameters, gathered or not, are left out.
    """

    def __init__(self, ledger: Ledger | None = None):
        self.ledger = Ledger() if ledger is None else ledger
        self.ledger.reset()
        self._stack = ExitStack()

    @property
    def saved_bytes(self) -> int:
        return self.ledger.now

    @property
    def peak_saved_bytes(self) -> int:
        return self.ledger.peak

    def __enter__(self) -> Self:
        self._stack.enter_context(saved_tensors_hooks(self._pack, _unpack))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _pack(self, tensor: Tensor) -> Any:
        if is_parameter(tensor):
            return tensor
        # Cut from its graph, which holds this and would hold itself.
        return Held(self.ledger, tensor.detach())


class Meter(SavedMeter):
    """Counts operators and collectives, too; read it afterwards. A graph that no backward takes stays for as long as the meter, since torch's
    counter of float operations hangs hooks on it.

    Args:
        model: that is measured. ledger: as in `SavedMeter`.
    Attributes:
        flops: `matmul` and `attention`; a multiply-add is two, and what a causal mask hides is counted as computed.
        collectives, collective_bytes: by name; bytes of the whole tensor (gathered, or before it is scattered).
        host_syncs: operators whose result the host must see before it can go on.
    """

    def __init__(self, model: nn.Module, ledger: Ledger | None = None):
        super().__init__(ledger)
        self._model = model
        self.flops: dict[str, int] = {}
        self.collectives: Counter[str] = Counter()
        self.collective_bytes: Counter[str] = Counter()
        self.host_syncs = 0
        self._flops = FlopCounterMode(display=False, custom_mapping=_MORE)

    def __enter__(self) -> Self:
        self._stack.enter_context(self._flops)
        self._stack.enter_context(_Operators(self))
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        counts = self._flops.get_flop_counts().get("Global", {})
        self.flops = {"matmul": 0, "attention": 0}
        for operator, count in counts.items():
            self.flops["attention" if "attention" in str(operator) else "matmul"] += int(count)


def is_parameter(tensor: Tensor) -> bool:
    """Whether a saved tensor is a parameter or a view of one, which is there anyhow."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def _unpack(packed: Tensor | Held) -> Tensor:
    return packed.tensor if isinstance(packed, Held) else packed


class _Operators(TorchDispatchMode):
    def __init__(self, meter: Meter):
        super().__init__()
        self._meter = meter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")
        if name[0] == "c10d" and name[1] in _COLLECTIVES:
            kind = _COLLECTIVES[name[1]]
            self._meter.collectives[kind] += 1
            self._meter.collective_bytes[kind] += max(_bytes(argument) for argument in args)
        elif name[0] == "aten" and name[1] in _SYNCS:
            self._meter.host_syncs += 1
        return func(*args, **(kwargs or {}))


def _bytes(argument: Any) -> int:
    if isinstance(argument, Tensor):
        return argument.numel() * argument.element_size()
    return sum(_bytes(item) for item in argument) if isinstance(argument, (list, tuple)) else 0


def _forward_flops(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Two products of [Q, E] x [E, K] for each head and batch entry."""
    batch, heads, queries, width = query
    return 2 * 2 * batch * heads * queries * key[2] * width


def _backward_flops(grad: Any, query: Any, key: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Five products: scores again, and gradients of weights, query, key and value."""
    return 5 * _forward_flops(query, key, key) // 2


def _addmm_flops(total: Any, first: Any, second: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * first[0] * first[1] * second[1]


_MORE: dict[Any, Callable[..., int]] = {
    torch.ops.aten.addmm_: _addmm_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward_flops,
}
"""Operators that torch's own counter does not know."""
