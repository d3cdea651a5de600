"""Plans a batch: how much of what is shared is worth a pass of its own, which rank takes what, and in which passes.

Pure arithmetic on what every rank knows, so every rank makes the plans of all and takes its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from miles.core.planning.hardware import HardwareSpec
from miles.core.planning.plan import Pass, Plan, Prediction, Segment, Step
from miles.core.planning.workload import Workload
from miles.data.common import Tokens, common_length, in_order
from trainer.split_forward.balance import contiguous_parts, costs
from trainer.split_forward.layout import FILLER, Places, scores_of
from trainer.split_forward.schedule import Frame, Unit, flatten, frames
from trainer.split_forward.tree import Node, build_tree

if TYPE_CHECKING:
    from trainer.split_forward.saved import SavedBytes

THRESHOLDS = (1, 32, 512)
"""Tokens that a shared segment must save to be one: what is tried. A deep tree of short segments costs more passes than it saves tokens."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences to plan for. `together`: so many neighbours of `places` are a unit, as the answers of a pair."""

    tokens: Sequence[Tokens]
    prompt_lengths: Sequence[int]
    places: Sequence[int]
    together: int = 1


def plan(
    batch: Batch,
    workload: Workload,
    hardware: HardwareSpec,
    *,
    world: int,
    capacity: int,
    thresholds: Sequence[int] = THRESHOLDS,
    saved: SavedBytes | None = None,
) -> list[Plan]:
    """The plans of all ranks: of those that `thresholds` give, the ones whose slowest rank is predicted to be done first.

    With `saved` they say how many bytes autograd will hold, which `capacity` bounds already.
    """
    units = units_of(batch)
    candidates = []
    for threshold in thresholds:
        parts = [[units[i] for i in part] for part in parts_of(batch, units, workload, world, threshold)]
        candidates.append([replace(p, predicted=predict(p, workload, hardware)) for p in _plans(batch, parts, capacity, threshold)])
    best = min(candidates, key=lambda plans: max(p.predicted.seconds for p in plans))
    if saved is None:
        return best
    return [replace(p, predicted=replace(p.predicted, saved_bytes=saved.peak(p, batch.prompt_lengths))) for p in best]


def predict(one: Plan, workload: Workload, hardware: HardwareSpec) -> Prediction:
    """What `one` costs in float operations and time. A rank without work in a pass takes part with FILLER tokens."""
    flops, places = {"matmul": 0, "attention": 0}, Places(one)
    for number, current in enumerate(one.passes):
        segments = [one.segments[s] for s in current.segments]
        tokens, scored = (sum(s.length for s in segments), sum(s.scored for s in segments)) if segments else (FILLER, 1)
        flops["matmul"] += workload.matmul_flops(tokens, scored, fused=places.alone(number))
        flops["attention"] += workload.attention_flops(scores_of(places, number))
    entries = one.computed * workload.layers * workload.hidden
    seconds = sum(flops.values()) / hardware.flops_per_s + len(one.passes) * workload.layers * hardware.layer_s + entries * hardware.value_s
    collectives, collective_bytes = workload.collectives(len(one.passes))
    return Prediction(seconds=seconds, flops=flops, collectives=collectives, collective_bytes=collective_bytes)


def units_of(batch: Batch) -> list[Unit]:
    """In the order of their tokens."""
    step = batch.together
    units = [tuple(batch.places[start : start + step]) for start in range(0, len(batch.places), step)]
    return [units[i] for i in in_order([batch.tokens[unit[0]] for unit in units])]


def parts_of(batch: Batch, units: Sequence[Unit], workload: Workload, world: int, threshold: int, more: int = 0) -> list[range]:
    """The units of each rank, whose samples grow by `more` tokens each."""
    lengths = [sum(len(batch.tokens[s]) + more for s in unit) for unit in units]
    firsts = [batch.tokens[unit[0]] for unit in units]
    common = [0] + [common_length(a, b) for a, b in itertools.pairwise(firsts)]
    shared = [n if n >= threshold else 0 for n in common]

    def cost(start: int, stop: int) -> float:
        # A token's products, and the tokens that it attends to.
        return float((stop - start) * workload.weights + workload.layers * workload.heads * workload.width * (stop**2 - start**2) / 2)

    return contiguous_parts(*costs(lengths, shared, cost), world)


def _plans(batch: Batch, parts: Sequence[Sequence[Unit]], capacity: int, threshold: int) -> list[Plan]:
    lengths = [len(tokens) for tokens in batch.tokens]
    columns, builders = [], []
    for units in parts:
        root = build_tree(batch.tokens, [s for unit in units for s in unit], threshold)
        columns.append(frames(root, units, tails_of(root, lengths).__getitem__, capacity))
        builders.append(Builder([root], lengths, batch.prompt_lengths, capacity, batch.together))
    steps: list[tuple[str, int]] = []

    flatten(columns, partial(take_pass, builders), steps)
    return [builder.plan(steps) for builder in builders]


def take_pass(builders: Sequence[Builder], kind: str, row: Sequence[Frame], index: int) -> int:
    """The number of a pass that all ranks' plans get, from their frames side by side."""
    numbers = {builder.take(kind, frame, index) for builder, frame in zip(builders, row, strict=True)}
    assert len(numbers) == 1, "the ranks' plans are out of step"
    return numbers.pop()


def tails_of(root: Node, lengths: Sequence[int] | Mapping[int, int]) -> dict[int, int]:
    """By sample below `root`: the tokens that it alone computes, of as many as `lengths` says."""
    return {sample: lengths[sample] - node.stop for node in root.subtree() for sample in node.tails}


class Builder:
    """One rank's plan in the making.

    Args:
        forest: trees whose nodes the frames have. lengths, prompt_lengths: by sample.
    """

    def __init__(
        self,
        forest: Sequence[Node],
        lengths: Sequence[int] | Mapping[int, int],
        prompt_lengths: Sequence[int] | Mapping[int, int],
        capacity: int,
        together: int,
    ):
        self._lengths, self._prompt_lengths, self._capacity, self._together = lengths, prompt_lengths, capacity, together
        nodes = [node for root in forest for node in root.subtree()]
        self._above = {id(child): node for node in nodes for child in node.children}
        self._parent = {sample: node for node in nodes for sample in node.tails}
        self.segments: list[Segment] = []
        self.passes: list[Pass] = []
        self._number: dict[int, int] = {}  # of a node's segment, by its id
        self._ends: dict[int, int] = {}

    def take(self, kind: str, frame: Frame, index: int) -> int:
        """Make the `index`th prefill or replay of `frame` a pass, without segments where there are not so many; returns its number."""
        if kind == "prefill":
            nodes = frame.prefills[index] if index < len(frame.prefills) else []
            self.passes.append(Pass(segments=tuple(self._node(node) for node in nodes)))
            return len(self.passes) - 1
        units = frame.replays[index] if index < len(frame.replays) else []
        samples = [s for unit in units for s in unit]
        # Siblings side by side in the row, whatever the order of the loss.
        order = sorted(range(len(samples)), key=lambda i: (self._segment_of(self._parent[samples[i]]), i))
        tails = [self._tail(samples[i]) for i in order]
        self.passes.append(Pass(segments=tuple(t for t in tails if t is not None), samples=tuple(samples)))
        return len(self.passes) - 1

    def plan(self, steps: Sequence[tuple[str, int]]) -> Plan:
        return Plan(
            segments=tuple(self.segments),
            passes=tuple(self.passes),
            steps=tuple(Step(kind=kind, number=number) for kind, number in steps),  # type: ignore[arg-type]
            ends=self._ends,
            capacity=self._capacity,
            tokens=sum(self._lengths[s] for s in self._ends),
            unit=self._together,
        )

    def _segment_of(self, node: Node) -> int:
        return self._number.get(id(node), -1)

    def _node(self, node: Node) -> int:
        start = min(self._prompt_lengths[s] for s in node.samples)
        parent = self._segment_of(self._above[id(node)])
        self._number[id(node)] = self._add(node.samples[0], node.start, node.stop, parent, start, len(node.samples))
        return self._number[id(node)]

    def _tail(self, sample: int) -> int | None:
        parent = self._parent[sample]
        above, length = self._segment_of(parent), self._lengths[sample]
        if parent.stop == length:
            self._ends[sample] = above
            return None
        self._ends[sample] = self._add(sample, parent.stop, length, above, self._prompt_lengths[sample], 1)
        return self._ends[sample]

    def _add(self, sample: int, start: int, stop: int, parent: int, scored_from: int, count: int) -> int:
        scored_from = min(max(scored_from, start), stop)
        self.segments.append(Segment(sample=sample, start=start, stop=stop, parent=None if parent < 0 else parent, scored_from=scored_from, count=count))
        return len(self.segments) - 1
