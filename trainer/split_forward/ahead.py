"""Plans in two parts, for prompts that are known before their answers: which prefills to run while engines decode, and the rest of the plan
once the answers are back.

A wave is the prompts that engines were given together. Its prefills depend on the prompts alone, so whether they run early or late, the same
row goes through the same operators; a plan of the answers begins with those passes. Behind its prompt each answer is computed alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from miles.core.planning.hardware import HardwareSpec
from miles.core.planning.plan import Plan
from miles.core.planning.workload import Workload
from miles.data.common import Tokens
from trainer.contracts import ClaimedPrompt
from trainer.split_forward.planner import THRESHOLDS, Batch, Builder, parts_of, predict, tails_of, take_pass, units_of
from trainer.split_forward.schedule import Frame, flatten, frames, refilled
from trainer.split_forward.tree import Node, build_tree

Early = tuple[int, int]
"""A prefill that can run early: its wave, and its number in the wave's plans."""


@dataclass(eq=False, kw_only=True)
class Wave:
    """Prompts on all ranks. A slot is the place of one answer, numbered over all waves of a step.

    Attributes:
        slots: by claim. roots, columns, plans: by rank; the plans have answers of the longest length.
        early: so many prefills, the first of each plan, run while the answers are made.
        wholly: there are no others.
    """

    slots: dict[int, range]
    tokens: list[Tokens]
    roots: list[Node]
    columns: list[list[Frame]]
    plans: list[Plan]
    early: int = 0
    wholly: bool = True
    _nodes: list[list[list[Node]]] = field(default_factory=list)

    @property
    def first(self) -> int:
        """The first of its slots."""
        return next(iter(self.slots.values())).start

    def held(self, rank: int) -> int:
        """Tokens of its early prefills on a rank."""
        plan = self.plans[rank]
        return sum(plan.segments[s].length for one in plan.passes[: self.early] for s in one.segments)

    def needed(self, number: int, slots: Set[int]) -> bool:
        """Whether an early prefill has a token of any of `slots`, on any rank."""
        return any(not slots.isdisjoint(node.samples) for nodes in self._nodes[number] for node in nodes)


class Ahead:
    """The waves of one step, on all ranks. Pure arithmetic: every rank makes the same.

    Args:
        capacity: as in `planner.plan`; early prefills take half of it at most, unless one prompt alone takes more.
        longest: tokens of the longest answer.
        apart: each prompt in a pass of its own, so that it can be let go of alone.
    """

    def __init__(
        self,
        workload: Workload,
        hardware: HardwareSpec,
        *,
        world: int,
        capacity: int,
        longest: int,
        apart: bool = False,
        thresholds: Sequence[int] = THRESHOLDS,
    ):
        self._workload, self._hardware, self._world = workload, hardware, world
        self._capacity, self._longest, self._apart, self._thresholds = capacity, longest, apart, thresholds
        self.waves: list[Wave] = []
        self._gone: set[Early] = set()

    def add(self, prompts: Sequence[ClaimedPrompt]) -> Wave:
        """Plan a wave, whose early prefills fit beside those that are still needed."""
        first = sum(len(wave.tokens) for wave in self.waves)
        slots: dict[int, range] = {}
        tokens: list[Tokens] = []
        for prompt in prompts:
            slots[prompt.claim_id] = range(first + len(tokens), first + len(tokens) + prompt.count)
            tokens += [prompt.tokens] * prompt.count
        wave = min(
            (self._wave(slots, tokens, first, threshold) for threshold in self._thresholds),
            key=lambda wave: max(predict(plan, self._workload, self._hardware).seconds for plan in wave.plans),
        )
        if not self._fits(wave):
            wave.early, wave.wholly = 0, False
        self.waves.append(wave)
        return wave

    def let_go(self, claims: Set[int]) -> list[Early]:
        """Early prefills that nobody needs any more, now that only `claims` will be trained; each is named once."""
        slots = self._slots(claims)
        gone = {(w, n) for w, wave in enumerate(self.waves) for n in range(wave.early) if not wave.needed(n, slots)} - self._gone
        self._gone |= gone
        return sorted(gone)

    def slot(self, claim: int) -> range:
        return next(wave.slots[claim] for wave in self.waves if claim in wave.slots)

    def plan(self, lengths: Mapping[int, int]) -> tuple[list[Plan], dict[int, Early]]:
        """The plans of all ranks for answers in some slots, and which of their passes may have run early.

        Args:
            lengths: tokens of the prompt and its answer, by slot.
        """
        prompts = {slot: len(tokens) for wave in self.waves for slot, tokens in enumerate(wave.tokens, wave.first)}
        forests = [[wave.roots[rank] for wave in self.waves] for rank in range(self._world)]
        builders = [Builder(forest, lengths, prompts, self._capacity, 1) for forest in forests]
        steps: list[tuple[str, int]] = []
        early: dict[int, Early] = {}
        for number, wave in enumerate(self.waves):
            count = 0

            def take(kind: str, row: list[Frame], index: int, number: int = number, wave: Wave = wave) -> int | None:
                nonlocal count
                if kind == "prefill":
                    count += 1
                    if not any(not lengths.keys().isdisjoint(node.samples) for frame in row for node in _nodes(frame, index)):
                        return None
                made = take_pass(builders, kind, row, index)
                if kind == "prefill" and count <= wave.early:
                    early[made] = number, count - 1
                return made

            behind = [sum(other.held(rank) for other in self.waves[number + 1 :]) for rank in range(self._world)]
            columns = [
                refilled(column, {slot: tail for slot, tail in tails_of(root, _or_zero(lengths, root)).items() if slot in lengths}, taken)
                for column, root, taken in zip(wave.columns, wave.roots, behind, strict=True)
            ]
            flatten(columns, take, steps)
        steps = [("prefill", made) for made in early] + [step for step in steps if step[0] != "prefill" or step[1] not in early]
        return [builder.plan(steps) for builder in builders], early

    def _wave(self, slots: dict[int, range], tokens: list[Tokens], first: int, threshold: int) -> Wave:
        """All slots are answered at the longest length, which bounds what follows on the prefills."""
        batch = Batch(tokens=tokens, prompt_lengths=[len(t) for t in tokens], places=range(len(tokens)))
        units = units_of(batch)
        parts = parts_of(batch, units, self._workload, self._world, threshold, self._longest)
        placed = dict(enumerate(tokens, first))
        lengths = {slot: len(t) + self._longest for slot, t in placed.items()}
        prompts = {slot: len(t) for slot, t in placed.items()}
        roots: list[Node] = []
        columns: list[list[Frame]] = []
        for part in parts:
            own = [units[i][0] + first for i in part]
            root = build_tree(placed, own, threshold, equal=True)
            made = frames(root, [(slot,) for slot in own], tails_of(root, lengths).__getitem__, self._capacity)
            roots.append(root)
            columns.append([_apart(frame) for frame in made] if self._apart else made)
        builders = [Builder([root], lengths, prompts, self._capacity, 1) for root in roots]
        steps: list[tuple[str, int]] = []
        nodes: list[list[list[Node]]] = []

        def take(kind: str, row: list[Frame], index: int) -> int:
            if kind == "prefill":
                nodes.append([_nodes(frame, index) for frame in row])
            return take_pass(builders, kind, row, index)

        flatten(columns, take, steps)
        early = next((number for number, (kind, _) in enumerate(steps) if kind != "prefill"), len(steps))
        plans = [builder.plan(steps) for builder in builders]
        return Wave(slots=slots, tokens=tokens, roots=roots, columns=columns, plans=plans, early=early, wholly=early == len(nodes), _nodes=nodes)

    def _fits(self, wave: Wave) -> bool:
        """A wave's own first frames fit by themselves. Beside others' they must leave as much room for replays."""
        before = [n for n, other in enumerate(self.waves) if any((n, number) not in self._gone for number in range(other.early)) or not other.wholly]
        if not before:
            return True
        if not all(self.waves[n].wholly for n in before):
            return False
        held = [wave.held(rank) + sum(self.waves[n].held(rank) for n in before) for rank in range(self._world)]
        return all(h <= self._capacity // 2 and h + self._longest <= self._capacity for h in held)

    def _slots(self, claims: Set[int]) -> set[int]:
        return {slot for wave in self.waves for claim, slots in wave.slots.items() if claim in claims for slot in slots}


def _nodes(frame: Frame, index: int) -> list[Node]:
    return frame.prefills[index] if index < len(frame.prefills) else []


def _apart(frame: Frame) -> Frame:
    return replace(frame, prefills=[[node] for nodes in frame.prefills for node in nodes], inner=[_apart(inner) for inner in frame.inner])


def _or_zero(lengths: Mapping[int, int], root: Node) -> dict[int, int]:
    return {slot: lengths.get(slot, 0) for slot in root.samples}
