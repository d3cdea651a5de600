"""One pass of a plan as indices: its row of tokens, whose keys and values it reads, what it scores, and where each sample's log-probs are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby

import numpy as np
import torch
from torch import Tensor

from miles.core.planning.plan import Plan, Segment
from miles.core.sequence_parallel.segments import Lane, SegmentLayout, cross_blocks, own_blocks

FILLER = 2
"""Tokens of the row of a pass without segments. Its second token is scored, for nobody."""


class Places:
    """Where a plan's segments are: each one's pass, its row there, and its number in it."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.of_pass = {s: number for number, one in enumerate(plan.passes) for s in one.segments}
        self.replays = {step.number for step in plan.steps if step.kind == "replay"}
        self.first: dict[int, int] = {}
        self.number: dict[int, int] = {}
        for one in plan.passes:
            start = 0
            for number, s in enumerate(one.segments):
                self.first[s], self.number[s] = start, number
                start += plan.segments[s].length

    def alone(self, number: int) -> bool:
        """Whether pass `number` is a replay all of whose samples' scored tokens are its own."""
        plan, samples = self.plan, self.plan.passes[number].samples
        chains = {s for sample in samples for s in plan.chain(plan.ends[sample])}
        return number in self.replays and all(self.of_pass[s] == number for s in chains if plan.segments[s].scored)

    def lengths(self, number: int) -> list[int]:
        return [self.plan.segments[s].length for s in self.plan.passes[number].segments] or [FILLER]

    def sources(self, number: int) -> list[int]:
        """Passes whose keys and values this one reads, in order."""
        parents = {p for s in self.plan.passes[number].segments if (p := self.plan.segments[s].parent) is not None}
        return sorted({self.of_pass[s] for p in parents for s in self.plan.chain(p)})

    def lanes(self, number: int) -> list[Lane]:
        plan, sources = self.plan, self.sources(number)
        offset = dict(zip(sources, accumulate((sum(self.lengths(p)) for p in sources), initial=0), strict=False))
        found, first = [], 0
        for parent, group in groupby(plan.passes[number].segments, key=lambda s: plan.segments[s].parent):
            queries = sum(plan.segments[s].length for s in group)
            if parent is not None:
                starts = [offset[self.of_pass[s]] + self.first[s] for s in plan.chain(parent)]
                prefix = tuple(range(start, start + plan.segments[s].length) for start, s in zip(starts, plan.chain(parent), strict=True))
                found.append(Lane(first, queries, prefix))
            first += queries
        return found


def scores_of(places: Places, number: int) -> int:
    """Query-key pairs a head that a pass computes, with padding and with what the causal mask hides."""
    own = sum(rows * length**2 for rows, length in own_blocks(places.lengths(number)))
    return own + sum(len(block.lanes) * block.queries * block.keys for block in cross_blocks(places.lanes(number)))


class PassLayout:
    """On the device.

    Attributes:
        tokens_T, positions_T: the row. segment_T: the number of the segment, in this pass, that each of its tokens is of.
        keep_K: places of hidden states that go to the head: `own` of them are scored, the others end the segments of a prefill.
        targets_N: tokens that are scored: `own` of them by this row's hidden states, then those that begin a segment, by the last hidden state
            of the segment before: of the passes `before`, laid end to end, at `before_F`.
        attention, sources: as `SegmentLayout`, and the passes whose keys and values it reads.
        values_from, value_N: for each scored token of the samples, in the order of the loss, its place in the scored values of those passes
            (this one's own are last), laid end to end. None in a prefill.
    """

    def __init__(self, places: Places, number: int, tokens: Sequence[np.ndarray], prompt_lengths: Sequence[int], device: torch.device):
        plan, one = places.plan, places.plan.passes[number]
        segments = [plan.segments[s] for s in one.segments]
        rows = [tokens[s.sample][s.start : s.stop] for s in segments] or [np.zeros(FILLER, np.int64)]
        positions = [np.arange(s.start, s.stop) for s in segments] or [np.arange(FILLER)]
        self.replay = number in places.replays
        starts = [places.first[s] for s in one.segments] or [0]
        ends = [start + len(row) - 1 for start, row in zip(starts, rows, strict=True)]
        inner = [np.arange(max(s.scored_from, s.start + 1), s.stop) - s.start + a for s, a in zip(segments, starts, strict=False)] or [np.ones(1, int)]
        inner_N = np.concatenate(inner)
        begins = [(s, a) for s, a in zip(one.segments, starts, strict=False) if scores_its_first(plan.segments[s])]
        row_T = np.concatenate(rows)
        self.own = len(inner_N)
        parents = [p for s, _ in begins if (p := plan.segments[s].parent) is not None]
        assert len(parents) == len(begins)
        self.before = sorted({places.of_pass[p] for p in parents})
        offset = dict(zip(self.before, accumulate((len(plan.passes[p].segments) for p in self.before), initial=0), strict=False))
        self.before_F = _moved([offset[places.of_pass[p]] + places.number[p] for p in parents], device)
        self.tokens_T, self.positions_T = _moved(row_T, device), _moved(np.concatenate(positions), device)
        self.keep_K = _moved(np.concatenate((inner_N - 1, [] if self.replay else ends)), device)
        self.targets_N = _moved(np.concatenate((row_T[inner_N], row_T[[a for _, a in begins]] if begins else [])), device)
        self.ends = len(ends)
        self.segment_T = _moved(np.repeat(np.arange(len(rows)), [len(row) for row in rows]), device)
        self.sources = places.sources(number)
        self.attention = SegmentLayout(places.lengths(number), places.lanes(number), device)
        self.values_from: list[int] = []
        self.value_N: Tensor | None = None
        if self.replay:
            self._collect(places, number, prompt_lengths, device)

    def _collect(self, places: Places, number: int, prompt_lengths: Sequence[int], device: torch.device) -> None:
        plan, one = places.plan, places.plan.passes[number]
        chains = {sample: plan.chain(plan.ends[sample]) for sample in one.samples}
        passes = sorted({places.of_pass[s] for chain in chains.values() for s in chain if plan.segments[s].scored} - {number})
        self.values_from = [*passes, number]
        slots: dict[int, np.ndarray] = {}
        start = 0
        for p in self.values_from:
            found, size = _scored_slots(plan, p)
            slots |= {s: slot + start for s, slot in found.items()}
            start += size
        parts = []
        for sample in one.samples:
            for s in chains[sample]:
                segment = plan.segments[s]
                parts.append(slots[s][max(prompt_lengths[sample] - segment.scored_from, 0) :] if segment.scored else np.zeros(0, np.int64))
        self.value_N = _moved(np.concatenate(parts) if one.samples else np.zeros(1), device)


def _scored_slots(plan: Plan, number: int) -> tuple[dict[int, np.ndarray], int]:
    """By segment of a pass: where the values of its scored tokens are, in the order of the tokens; and the number of all."""
    segments = plan.passes[number].segments
    if not segments:
        return {}, 1
    begins = [s for s in segments if scores_its_first(plan.segments[s])]
    inner = {s: plan.segments[s].stop - max(plan.segments[s].scored_from, plan.segments[s].start + 1) for s in segments}
    starts = dict(zip(segments, accumulate(inner.values(), initial=0), strict=False))
    total = sum(inner.values())
    first = {s: total + i for i, s in enumerate(begins)}
    return {s: np.concatenate(([first[s]] if s in first else [], starts[s] + np.arange(inner[s]))).astype(np.int64) for s in segments}, total + len(begins)


def scores_its_first(segment: Segment) -> bool:
    """By the hidden state behind the segment before."""
    return segment.scored_from == segment.start < segment.stop and segment.start > 0


def _moved(values: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.asarray(values, np.int64)).to(device, non_blocking=True)
