"""A plan: which tokens are computed once, in which passes, in which order, and what that is predicted to cost. A planner makes it, one
executor runs it, meters measure it.

Example: samples 0 = [1 2 3 7] and 1 = [1 2 3 8 9], whose responses begin at place 3. Segments: A = [1 2 3] of both, B = [7] after A,
C = [8 9] after A. Schedule: prefill(A), replay(B and C: their loss is taken and differentiated), backward(A).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["prefill", "replay", "backward"]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Tokens `start` to `stop` of a sequence, computed once for all `count` sequences that have them.

    Attributes:
        sample: one of those sequences. parent: the segment that ends where this one starts; None at 0.
        scored_from: the first place whose token's log-prob is wanted; `stop` where none is.
    """

    sample: int
    start: int
    stop: int
    parent: int | None
    scored_from: int
    count: int = 1

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def scored(self) -> int:
        return self.stop - self.scored_from


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One forward of the model over one packed row. No segments: the rank has nothing to do, and takes part with a dummy.

    Attributes:
        segments: in the order of the row; those with one parent are neighbours.
        samples: whose loss is taken on this pass, in the order of the loss; () for a prefill.
    """

    segments: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Step:
    """`prefill`: forward, and the graph stays. `replay`: forward, loss and backward. `backward`: of an earlier prefill."""

    kind: Kind
    number: int
    """Of the pass."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What running a plan costs on one rank.

    Attributes:
        seconds: forward and backward. flops: by operator, `matmul` and `attention`, a multiply-add counted as two.
        saved_bytes: the most that autograd holds at one moment, parameters left out.
        collectives, collective_bytes: by name, `all_gather` and `reduce_scatter`; bytes of the whole tensors.
    """

    seconds: float = 0.0
    flops: dict[str, int] = field(default_factory=dict)
    saved_bytes: int = 0
    collectives: dict[str, int] = field(default_factory=dict)
    collective_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One rank's plan. Plans of all ranks have steps of equal kinds in equal order, since collectives must pair up.

    Attributes:
        capacity: tokens whose graph may exist at one moment. One sequence alone may need more, and so may the samples of a unit.
        tokens: of the samples, each counted in full. computed: of the segments.
        ends: by sample of this rank, its last segment.
        unit: samples whose loss is taken together.
    """

    segments: tuple[Segment, ...]
    passes: tuple[Pass, ...]
    steps: tuple[Step, ...]
    ends: dict[int, int]
    capacity: int
    tokens: int
    unit: int = 1
    predicted: Prediction = field(default_factory=Prediction)

    @property
    def computed(self) -> int:
        return sum(segment.length for segment in self.segments)

    def chain(self, segment: int | None) -> list[int]:
        """The segments from the first token on that lead to `segment`, itself the last."""
        found: list[int] = []
        while segment is not None:
            found.append(segment)
            segment = self.segments[segment].parent
        return found[::-1]

    def validate(self, lengths: Sequence[int]) -> None:
        """Raises AssertionError for a plan that cannot be run as it stands. `lengths`: tokens of each sample, by its index."""
        ends = self.ends
        where = {s: number for number, one in enumerate(self.passes) for s in one.segments}
        assert sorted(where) == list(range(len(self.segments))), "a segment is in no pass, or in two"
        taken = [s for one in self.passes for s in one.samples]
        assert sorted(taken) == sorted(ends), "a sample's loss is never taken, or twice"
        assert sum(lengths[sample] for sample in ends) == self.tokens, "tokens are not those of its samples"
        for sample, end in ends.items():
            place = 0
            for number in self.chain(end):
                assert self.segments[number].start == place, f"sample {sample} has a gap at {place}"
                place = self.segments[number].stop
            assert place == lengths[sample], f"sample {sample} ends at {place} of {lengths[sample]}"
        self._validate_steps(where)

    def _validate_steps(self, where: dict[int, int]) -> None:
        alive: set[int] = set()
        kept: list[int] = []
        seen: set[int] = set()
        for step in self.steps:
            one = self.passes[step.number]
            if step.kind == "backward":
                above = {p for other in kept if other != step.number for s in self.passes[other].segments if (p := self.segments[s].parent) is not None}
                assert not above & set(one.segments), "a prefill's backward runs before that of one that builds on it"
                kept.remove(step.number)
                alive.difference_update(one.segments)
                continue
            assert step.number not in seen, f"pass {step.number} runs twice"
            seen.add(step.number)
            needed = {p for s in one.segments if (p := self.segments[s].parent) is not None}
            needed |= {p for sample in one.samples for p in self.chain(self.ends[sample]) if where[p] != step.number}
            assert needed <= alive, f"pass {step.number} needs segments that do not exist at this moment"
            tokens = sum(self.segments[s].length for s in alive | set(one.segments))
            assert tokens <= self.capacity or self._inseparable(alive, one), f"pass {step.number}: {tokens} tokens at once, above {self.capacity}"
            if step.kind == "prefill":
                kept.append(step.number)
                alive.update(one.segments)
        assert not kept, "a prefill has no backward"
        assert seen == set(range(len(self.passes))), "a pass is never run"

    def _inseparable(self, alive: set[int], one: Pass) -> bool:
        """Whether what exists during a pass is one path through the tree, or one unit with what its samples share."""
        if self.unit > 1 and len(one.samples) <= self.unit:
            return True
        return any(alive | set(one.segments) <= set(self.chain(s)) for s in one.segments or sorted(alive))
