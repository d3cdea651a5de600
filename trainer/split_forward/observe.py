"""What autograd keeps of one row's forward, storage by storage, and where: what `miles.core.memory.footprint` is fitted to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from algorithms.contracts import LossOutput
from miles.core.memory.footprint import ABOVE, BELOW, Observation, Place, gathered
from miles.core.model.packed import padded_blocks
from miles.core.planning.meters import is_parameter
from trainer.rows.row import Row, RowLoss
from trainer.split_forward.activations import Activations, compressible, tensors_in


def observe(activations: Activations, row: Row, run: Callable[[Row, RowLoss], LossOutput]) -> Observation:
    """Of `run`'s forward, with a loss that is the log-probs' sum. Its backward is run too. Collective."""
    found: list[tuple[Tensor, Place]] = []  # holding every tensor, so that no storage is given away and counted as another
    itemsizes: set[int] = set()
    begun = False

    def note(place: Place) -> Callable[[Tensor], Tensor]:
        def pack(tensor: Tensor) -> Tensor:
            tensor = tensor if is_parameter(tensor) else tensor.detach()
            if not is_parameter(tensor):
                found.append((tensor, place))
            return tensor

        return pack

    def layer(number: int, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal begun
        begun, first = True, len(found)
        with saved_tensors_hooks(note((number, "saved")), _same):
            output = own(*args, **kwargs)
        saved, inputs = [tensor for tensor, _ in found[first:]], tensors_in((args, kwargs))
        chosen = [saved[place] for place in compressible(saved, inputs, activations.width)]
        itemsizes.update(tensor.itemsize for tensor in chosen)
        found.extend((tensor, (number, "narrow")) for tensor in chosen[:1])
        found.extend((tensor.detach(), (number, "input")) for tensor in inputs)
        return output

    def outside(tensor: Tensor) -> Tensor:
        return note(ABOVE if begun else BELOW)(tensor)

    activations.observer = layer
    try:
        with saved_tensors_hooks(outside, _same):
            loss = run(row, summed).loss
        storages = [(tensor.untyped_storage(), place) for tensor, place in found]
        sizes = gathered((storage._cdata, storage.nbytes(), place) for storage, place in storages)
        loss.backward()
    finally:
        activations.observer = None
    assert len(itemsizes) < 2, itemsizes
    return Observation(features=features(row), sizes=sizes, itemsize=max(itemsizes, default=1))


def features(row: Row) -> tuple[int, ...]:
    """What a row's bytes are linear in: tokens that are computed (common ones once); where attention gathers them into blocks, the places of the
    blocks, and again those tokens; scored tokens; and 1."""
    lengths = _lengths(row)
    blocks, gather, _ = padded_blocks(lengths)
    every = computed = sum(lengths)
    if row.first_T is not None:
        computed = int((row.first_T == torch.arange(every, device=row.first_T.device)).sum())
    placed = 0 if gather is None and row.first_T is None else sum(count * length for count, length in blocks)
    return computed, placed, computed if placed else 0, len(row.scored_N), 1


def _lengths(row: Row) -> list[int]:
    starts = (row.positions_T == 0).nonzero().flatten().tolist()
    return [stop - start for start, stop in zip(starts, [*starts[1:], len(row.positions_T)], strict=True)]


def summed(row: Row, logprobs_N: Tensor, entropy_N: Tensor | None) -> LossOutput:
    """The log-probs' sum."""
    return LossOutput(loss=logprobs_N.sum())


def _same(tensor: Tensor) -> Tensor:
    return tensor
