"""How many bytes a backward holds, moment by moment, for any choice of what each layer keeps.

A storage is in one or more places: saved by a layer, given to it as an input, saved below the layers or above them. It is there at a moment
when any of its places is. Sizes are linear in a few features of the row (tokens, padded tokens, scored tokens), with whole weights, which
observations of a few small rows determine; so the bytes of any row are exact before its forward runs.

    forward has ended      what every layer holds, and what lies above the layers
    backward of layer u    what layers 0..u hold, and beside it the tensors that a recomputed layer has made again, or the one in 8 bits at its full size
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from miles.core.memory.actions import Action
from miles.core.planning.linear import whole_weights

Role = Literal["saved", "input", "narrow", "below", "above"]
Place = tuple[int, Role]
"""A layer and what a storage is to it; `narrow`: the saved one that may be held in 8 bits. -1 for what is below or above all layers."""
Places = frozenset[Place]
BELOW: Place = (-1, "below")
ABOVE: Place = (-1, "above")


@dataclass
class Observation:
    """One row's forward. `sizes`: bytes of all storages that are in the same places. `itemsize`: of narrow tensors as they were."""

    features: tuple[int, ...]
    sizes: dict[Places, int] = field(default_factory=dict)
    itemsize: int = 4


@dataclass(frozen=True)
class LayerBytes:
    """A layer's own: what it saves, its inputs, what is there when it has both (an input is often saved), and what it holds with one tensor in
    8 bits, that tensor's full size; both 0 where there is no such tensor."""

    saved: int
    inputs: int
    both: int
    compressed: int
    narrow: int


class Footprint:
    """Of one model.

    Raises:
        ValueError: sizes are not linear in the features.
    """

    def __init__(self, observations: Sequence[Observation], layers: int):
        self.layers = layers
        self._itemsize = observations[0].itemsize
        seen = {places for one in observations for places in one.sizes}
        self._weights = {places: whole_weights([(one.features, one.sizes.get(places, 0)) for one in observations]) for places in seen}

    def row(self, features: Sequence[int]) -> RowFootprint:
        """Of a row with these features."""
        sizes = {places: sum(w * x for w, x in zip(weights, features, strict=True)) for places, weights in self._weights.items()}
        return RowFootprint(sizes, self.layers, self._itemsize)


class RowFootprint:
    """Of one row.

    Attributes:
        layer: each layer's own bytes, those left out that more than one place outside of it holds.
        shared: bytes of storages that several layers hold, and of what lies below the layers. above: of what lies above them.
    """

    def __init__(self, sizes: dict[Places, int], layers: int, itemsize: int):
        self._sizes, self._itemsize = sizes, itemsize
        own: list[dict[Places, int]] = [{} for _ in range(layers)]
        self.shared = self.above = 0
        for places, size in sizes.items():
            owners = {number for number, _ in places}
            if places == {ABOVE}:
                self.above += size
            elif len(owners) == 1 and -1 not in owners:
                own[owners.pop()][places] = size
            else:
                self.shared += size
        self.layer = [self._own(number, parts) for number, parts in enumerate(own)]

    def peak(self, actions: Sequence[Action]) -> int:
        """The most that is held at one moment."""
        held: list[set[Place]] = [_held(number, action) for number, action in enumerate(actions)]
        narrow = [self._narrow(number) for number in range(len(actions))]
        small = [narrow[n] // self._itemsize if a is Action.COMPRESS else 0 for n, a in enumerate(actions)]
        moments = [self._bytes({BELOW, ABOVE}.union(*held)) + sum(small)]
        for number, action in enumerate(actions):
            if action is Action.KEEP:
                continue
            here = {BELOW}.union(*held[: number + 1])
            if action is Action.RECOMPUTE:
                here |= _held(number, Action.KEEP)
            # What was compressed is there at its full size too, as it is made and as it is used.
            full = narrow[number] if action is Action.COMPRESS else 0
            moments.append(self._bytes(here) + sum(small[: number + 1]) + full)
        return max(moments)

    def _bytes(self, present: set[Place]) -> int:
        return sum(size for places, size in self._sizes.items() if not places.isdisjoint(present) and not _only_narrow(places, present))

    def _narrow(self, layer: int) -> int:
        return sum(size for places, size in self._sizes.items() if (layer, "narrow") in places)

    def _own(self, number: int, parts: dict[Places, int]) -> LayerBytes:
        def those(present: set[Place]) -> int:
            return sum(size for places, size in parts.items() if not places.isdisjoint(present) and not _only_narrow(places, present))

        narrow = sum(size for places, size in parts.items() if (number, "narrow") in places)
        return LayerBytes(
            saved=those(_held(number, Action.KEEP)),
            inputs=those(_held(number, Action.RECOMPUTE)),
            both=those(_held(number, Action.KEEP) | _held(number, Action.RECOMPUTE)),
            compressed=those(_held(number, Action.COMPRESS)) + narrow // self._itemsize if narrow else 0,
            narrow=narrow,
        )


def _held(number: int, action: Action) -> set[Place]:
    """Places of which a layer holds the storages at their full size."""
    if action is Action.KEEP:
        return {(number, "saved"), (number, "narrow")}
    return {(number, "input")} if action is Action.RECOMPUTE else {(number, "saved"), (number, "input")}


def _only_narrow(places: Places, present: set[Place]) -> bool:
    """Whether a storage is saved by a layer that has it in 8 bits."""
    return any(role == "narrow" and (number, "narrow") not in present for number, role in places)


def gathered(storages: Iterable[tuple[int, int, Place]]) -> dict[Places, int]:
    """`(key, bytes, place)` of storages, each as often as it has places, as `Observation.sizes`."""
    places: defaultdict[int, set[Place]] = defaultdict(set)
    size: dict[int, int] = {}
    for key, count, place in storages:
        places[key].add(place)
        size[key] = count
    sizes: defaultdict[Places, int] = defaultdict(int)
    for key, found in places.items():
        sizes[frozenset(found)] += size[key]
    return dict(sizes)
