"""What each decoder layer keeps of its forward: everything, everything with one tensor in 8 bits, or its input alone.

A layer that keeps everything is left to autograd. For the others saved-tensor hooks stand between autograd and memory, and own what autograd
then no longer sees to: aliases count and are compressed once, a tensor that was changed after it was saved is refused, a value that 8 bits do
not have makes its layer compute again. Nothing here draws random numbers, so a layer's second forward gives the first one's bits.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from miles.core.memory.actions import Action
from miles.core.memory.float8 import compress, restore
from miles.core.model.fused_layer import without_outputs
from miles.core.planning.ledger import Held, Ledger
from miles.core.planning.meters import is_parameter


class Choice:
    """What the layers do in one forward, first layer first."""

    def __init__(self, actions: Sequence[Action]):
        self.actions = actions

    def stays(self, layer: int) -> bool:
        """Asked once the backward has come to a compressed layer: whether what was compressed may be used, or is to be computed again."""
        return True


class Activations:
    """The layers of one model.

    Args:
        width: last dimension of the tensors that may be compressed, the MLP's; None: none may.
    Attributes:
        choice: of forwards with gradients from now on; None: every layer is computed again.
        ledger: bytes that compressed and recomputed layers hold.
        overflows: compressed layers that had a value too large for 8 bits, and were computed again instead.
        revoked: compressed layers that were computed again because of `Choice.stays`.
        seconds: where it is a dictionary, seconds by layer and `Action` are added to it: what that layer's action costs more than keeping.
        errors: where it is a dictionary, relative errors of what was compressed, by layer. This costs a pass more.
    """

    def __init__(self, width: int | None = None):
        self.width = width
        self.choice: Choice | None = None
        self.ledger = Ledger()
        self.overflows = self.revoked = 0
        self.layers = 0
        self.seconds: defaultdict[tuple[int, Action], float] | None = None
        self.errors: defaultdict[int, list[float]] | None = None
        self.observer: Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any] | None = None

    def attach(self, layers: Sequence[nn.Module]) -> None:
        """Before the layers are sharded: an instance's forward, not a module around it, so names stay and FSDP's hooks stay outside."""
        for number, layer in enumerate(layers):
            layer.forward = functools.partial(self._call, number, layer.forward)
        self.layers = len(layers)

    def _call(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if self.observer is not None:
            return self.observer(number, forward, args, kwargs)
        action = Action.RECOMPUTE if self.choice is None else self.choice.actions[number]
        if action is Action.KEEP:
            return forward(*args, **kwargs)
        bundle = _Bundle(self, number, forward, args, kwargs, action)
        with saved_tensors_hooks(bundle.pack, _unpack):
            output = forward(*args, **kwargs)
        bundle.close()
        return output


@dataclass(frozen=True, slots=True)
class _Handle:
    """What autograd keeps in a tensor's stead."""

    bundle: _Bundle
    index: int


class _Enough(Exception):
    """A layer's second forward has made everything that its first one saved."""


class _Bundle:
    """The tensors that one layer saved in one forward, parameters left out, numbered in the order in which they were saved."""

    def __init__(self, owner: Activations, number: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], action: Action):
        self._owner, self._number, self._forward, self._choice = owner, number, forward, owner.choice
        # Cut from the graph, which would otherwise hold itself: what is saved holds this, and this what was computed before.
        self._inputs: list[_Saved] = []
        self._args, self._kwargs = self._cut(args), self._cut(kwargs)
        self._count = 0
        self._kept: list[_Saved] | None = [] if action is Action.COMPRESS else None
        self._asked = False
        self._fresh: dict[int, _Saved] = {}

    def pack(self, tensor: Tensor) -> Tensor | _Handle:
        if is_parameter(tensor):
            return tensor
        if self._kept is not None:
            self._kept.append(_Saved(self._owner.ledger, tensor))
        self._count += 1
        return _Handle(self, self._count - 1)

    def close(self) -> None:
        """The forward is over: compress where that was asked for."""
        if self._kept is None:
            return
        owner, began = self._owner, self._now()
        chosen = compressible([saved.tensor for saved in self._kept], [saved.tensor for saved in self._inputs], owner.width)
        if not chosen:
            return
        first = self._kept[chosen[0]]
        first.check(self._number)
        small = compress(first.tensor)
        if small is None:
            owner.overflows += 1
            self._kept = None
            return
        if owner.errors is not None:
            error = torch.linalg.vector_norm(restore(small, first.tensor.dtype) - first.tensor)
            owner.errors[self._number].append(float(error / (torch.linalg.vector_norm(first.tensor) + 1e-8)))
        replacement = _Compressed(owner.ledger, small, first.tensor.dtype)
        for index in chosen:
            self._kept[index] = replacement
        self._spent(Action.COMPRESS, began)

    def unpack(self, index: int) -> Tensor:
        if self._kept is not None and not self._asked:
            self._asked = True
            if self._choice is not None and not self._choice.stays(self._number):
                self._owner.revoked += 1
                self._kept = None
        if self._kept is not None:
            saved = self._kept[index]
            saved.check(self._number)
            if not isinstance(saved, _Compressed):
                return saved.tensor
            began = self._now()
            tensor = saved.restored()
            self._spent(Action.COMPRESS, began)
            return tensor
        if index not in self._fresh:
            self._recompute()
        # Each is asked for once; a second backward through a graph that was retained computes it again.
        fresh = self._fresh.pop(index)
        fresh.check(self._number)
        return fresh.tensor

    def _recompute(self) -> None:
        began = self._now()
        for saved in self._inputs:
            saved.check(self._number)
        found: list[_Saved] = []

        def pack(tensor: Tensor) -> Tensor | None:
            if is_parameter(tensor):
                return tensor
            found.append(_Saved(self._owner.ledger, tensor))
            if len(found) == self._count:
                raise _Enough
            return None

        try:
            with torch.enable_grad(), without_outputs(), saved_tensors_hooks(pack, _never):
                self._forward(*self._args, **self._kwargs)
        except _Enough:
            pass
        if len(found) != self._count:
            raise RuntimeError(f"layer {self._number} saved {self._count} tensors in its forward and {len(found)} as it was computed again")
        self._fresh = dict(enumerate(found))
        found.clear()  # the second forward's own graph has `pack`, and may outlive this where somebody watches its modules
        self._spent(Action.RECOMPUTE, began)

    def _cut(self, value: Any) -> Any:
        """`value` with each tensor in it as a leaf that is held; objects of other kinds as they are."""
        if isinstance(value, Tensor):
            self._inputs.append(_Saved(self._owner.ledger, value))
            return value.detach().requires_grad_(value.requires_grad)
        if isinstance(value, dict):
            return {key: self._cut(item) for key, item in value.items()}
        return type(value)(self._cut(item) for item in value) if type(value) in (list, tuple) else value

    def _now(self) -> float:
        if self._owner.seconds is None:
            return 0.0
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()  # whatever else this machine is doing

    def _spent(self, action: Action, began: float) -> None:
        if self._owner.seconds is not None:
            self._owner.seconds[self._number, action] += self._now() - began


class _Saved(Held):
    """A tensor, cut from its graph, as it was when it was saved."""

    __slots__ = ("_version",)

    def __init__(self, ledger: Ledger, tensor: Tensor):
        super().__init__(ledger, tensor.detach())
        self._version = tensor._version

    def check(self, layer: int) -> None:
        """Raises RuntimeError, as autograd does, when the tensor was changed since."""
        if self.tensor._version != self._version:
            raise RuntimeError(
                f"a tensor {list(self.tensor.shape)} that layer {layer} needs for its backward was changed in place after it was saved "
                f"(it is at version {self.tensor._version}, and was at {self._version}): change a copy of it instead"
            )


class _Compressed(_Saved):
    __slots__ = ("_dtype", "_ledger_")

    def __init__(self, ledger: Ledger, small: Tensor, dtype: torch.dtype):
        super().__init__(ledger, small)
        self._dtype, self._ledger_ = dtype, ledger

    def restored(self) -> Tensor:
        self._ledger_.touch(self.tensor.numel() * self._dtype.itemsize)
        return restore(self.tensor, self._dtype)


def compressible(saved: Sequence[Tensor], inputs: Sequence[Tensor], width: int | None) -> list[int]:
    """Places in `saved` of the tensor to compress: the first that is a contiguous float one of the MLP's width, has its storage for itself and is
    no input. More than one place where the same tensor was saved more than once; none where there is no such tensor."""
    places = defaultdict(list)
    for index, tensor in enumerate(saved):
        places[tensor.untyped_storage()._cdata].append(index)
    taken = {tensor.untyped_storage()._cdata for tensor in inputs}
    for key, indices in places.items():
        first = saved[indices[0]]
        whole = first.untyped_storage().nbytes() == first.numel() * first.itemsize
        alike = all(saved[i].shape == first.shape and saved[i].is_contiguous() and saved[i].dtype == first.dtype for i in indices)
        if key not in taken and whole and alike and first.is_floating_point() and first.ndim > 1 and first.shape[-1] == width:
            return indices
    return []


def tensors_in(value: Any) -> list[Tensor]:
    """Those of a layer's call that `_Bundle` holds: in lists, tuples and dictionaries, not in other objects."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if type(value) in (list, tuple) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def _unpack(packed: Tensor | _Handle) -> Tensor:
    return packed.bundle.unpack(packed.index) if isinstance(packed, _Handle) else packed


def _never(_: Any) -> Tensor:
    raise AssertionError("a layer's second forward is never differentiated")
