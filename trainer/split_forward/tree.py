"""Which tokens several samples share: a tree of segments, built from token ids alone.

Whatever is shared is computed once: a prompt by its group, a chat template's opening by all groups, the first turns by the branches of an
agent's tree, equal answers by their samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from miles.data.common import Tokens, common_length, in_order


@dataclass(eq=False)
class Node:
    """Tokens `start` to `stop` that all of `samples` have. `tails`: of them, those that share nothing more with anyone."""

    start: int
    stop: int
    samples: list[int]
    children: list[Node] = field(default_factory=list)
    tails: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.stop - self.start

    def subtree(self) -> list[Node]:
        """This node and all below it, parents first, level by level."""
        found = [self]
        for node in found:
            found.extend(node.children)
        return found


def build_tree(tokens: Sequence[Tokens] | Mapping[int, Tokens], samples: Sequence[int], min_saved: int = 1, *, equal: bool = False) -> Node:
    """The tree of the samples at `samples`, below a root without tokens.

    Args:
        min_saved: tokens that a node must save, its length times its samples but one; what saves less is left to be computed by each.
        equal: sequences that are equal, as a prompt's copies are, end in a node of theirs whatever it saves.
    """
    order = [samples[i] for i in in_order([tokens[s] for s in samples])]
    common = [common_length(tokens[a], tokens[b]) for a, b in itertools.pairwise(order)]
    root = Node(0, 0, order)
    pending = [(0, len(order), root)] if order else []
    while pending:
        first, last, parent = pending.pop()
        if last - first == 1:
            parent.tails.append(order[first])
            continue
        shared = min(common[first : last - 1])
        node = parent
        alike = equal and shared == len(tokens[order[first]]) == len(tokens[order[last - 1]])
        if shared > parent.stop and (alike or (last - first - 1) * (shared - parent.stop) >= min_saved):
            node = Node(parent.stop, shared, order[first:last])
            parent.children.append(node)
        cuts = [first, *(i + 1 for i in range(first, last - 1) if common[i] == shared), last]
        # The last is taken from the stack first.
        pending.extend((a, b, node) for a, b in reversed(list(itertools.pairwise(cuts))))
    return root
