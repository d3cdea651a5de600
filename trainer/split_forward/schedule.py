"""In which passes a tree is computed, and in which order: prefills by levels, replays between them and their backwards.

A `Frame` is computed as written: its prefills, its replays, its inner frames, and the backwards of its prefills last first. All that a
frame and those around it hold at one moment keeps to a number of tokens, so that sharing needs no more memory than packed rows did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from trainer.split_forward.tree import Node

Unit = tuple[int, ...]
"""Samples whose loss is taken together, such as the answers of a pair."""


@dataclass(eq=False)
class Frame:
    """`prefills`: the nodes of each pass. `replays`: the units of each pass, which has `room` for so many tokens of theirs."""

    prefills: list[list[Node]] = field(default_factory=list)
    replays: list[list[Unit]] = field(default_factory=list)
    inner: list[Frame] = field(default_factory=list)
    room: int = 0


@dataclass(eq=False)
class _Bundle:
    """Subtrees, and samples that share nothing here, which units tie together: scheduled as one."""

    nodes: list[Node]
    units: list[Unit]
    held: int  # tokens of the subtrees
    longest: int  # tokens of the longest unit's tails


def frames(root: Node, units: Sequence[Unit], tail: Callable[[int], int], capacity: int) -> list[Frame]:
    """The frames of what is below `root`.

    Args:
        units: every sample below the root is in one. tail: tokens that a sample alone computes.
        capacity: tokens at one moment. It is exceeded only where one path through the tree, or one unit, is longer.
    """
    chunks: list[list[_Bundle]] = []
    for bundle in _bundles(root, units, tail):
        if chunks and _fit([*chunks[-1], bundle], capacity):
            chunks[-1].append(bundle)
        else:
            chunks.append([bundle])
    return [_frame(chunk, tail, capacity) for chunk in chunks]


def refilled(given: Sequence[Frame], tails: Mapping[int, int], taken: int) -> list[Frame]:
    """`given` with the samples of `tails` alone (units of one), packed anew by the tokens that each computes for itself; prefills stay as they are.

    Args:
        taken: tokens that exist besides those of the frames.
    """
    found = []
    for frame in given:
        units = [unit for row in frame.replays for unit in row if unit[0] in tails]
        replays = _replays(units, lambda sample: tails[sample], frame.room - taken)
        found.append(replace(frame, replays=replays, inner=refilled(frame.inner, tails, taken)))
    return found


def flatten(columns: Sequence[Sequence[Frame]], take: Callable[[str, list[Frame], int], int | None], steps: list[tuple[str, int]]) -> None:
    """The steps of the frames of all ranks side by side, appended to `steps` as (kind, pass number).

    `take(kind, frames, index)` makes the `index`th prefill or replay of the ranks' frames a pass, of which some ranks may have none; it
    returns None where that is left out.
    """
    for beside in zip_longest(*columns, fillvalue=Frame()):
        row = list(beside)
        opened = _numbers(take("prefill", row, i) for i in range(max(len(f.prefills) for f in row)))
        steps.extend(("prefill", number) for number in opened)
        steps.extend(("replay", number) for number in _numbers(take("replay", row, i) for i in range(max(len(f.replays) for f in row))))
        flatten([f.inner for f in row], take, steps)
        steps.extend(("backward", number) for number in reversed(opened))


def _numbers(passes: Iterable[int | None]) -> list[int]:
    return [number for number in passes if number is not None]


def _fit(chunk: list[_Bundle], capacity: int) -> bool:
    """Half is left for replays, which are many, unless there is nothing to hold."""
    held = sum(bundle.held for bundle in chunk)
    return held <= capacity // 2 and held + max(bundle.longest for bundle in chunk) <= capacity


def _frame(chunk: list[_Bundle], tail: Callable[[int], int], capacity: int) -> Frame:
    nodes = [node for bundle in chunk for node in bundle.nodes]
    held = sum(bundle.held for bundle in chunk)
    too_large = held + max(bundle.longest for bundle in chunk) > capacity
    if too_large and len(nodes) == 1:
        # One subtree at a time. A unit that has samples in two of them ties those together again, below.
        node = nodes[0]
        return Frame(prefills=[[node]], inner=frames(node, [unit for bundle in chunk for unit in bundle.units], tail, max(1, capacity - node.length)))
    levels: list[list[Node]] = []
    level = nodes
    while level:
        levels.append(level)
        level = [child for node in level for child in node.children]
    return Frame(prefills=levels, replays=_replays([unit for bundle in chunk for unit in bundle.units], tail, capacity - held), room=capacity - held)


def _replays(units: Sequence[Unit], tail: Callable[[int], int], room: int) -> list[list[Unit]]:
    """Neighbours together, since they share most."""
    packs: list[list[Unit]] = []
    free = 0
    for unit in units:
        length = sum(tail(sample) for sample in unit)
        if not packs or length > free:
            packs.append([])
            free = room
        packs[-1].append(unit)
        free -= length
    return packs


def _bundles(root: Node, units: Sequence[Unit], tail: Callable[[int], int]) -> list[_Bundle]:
    home: dict[int, int] = {sample: number for number, node in enumerate(root.children) for sample in node.samples}
    joined: dict[int, int] = {}

    def top(number: int) -> int:
        while joined.get(number, number) != number:
            number = joined[number]
        return number

    for unit in units:
        first, *others = {top(home[sample]) for sample in unit if sample in home} or {-1}
        for other in others:
            joined[max(first, other)] = min(first, other)
            first = min(first, other)
    found: dict[tuple[int, int], _Bundle] = {}
    for number, node in enumerate(root.children):
        bundle = found.setdefault((top(number), 0), _Bundle([], [], 0, 0))
        bundle.nodes.append(node)
        bundle.held += sum(n.length for n in node.subtree())
    for place, unit in enumerate(units):
        homes = [home[sample] for sample in unit if sample in home]
        bundle = found.setdefault((top(homes[0]), 0) if homes else (-1, place), _Bundle([], [], 0, 0))
        bundle.units.append(unit)
        bundle.longest = max(bundle.longest, sum(tail(sample) for sample in unit))
    return list(found.values())
