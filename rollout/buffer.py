"""Finished groups that wait to be trained. Each is admitted or refused by its staleness at the moment it is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miles.data.codec import sample_from_json, sample_to_json
from miles.data.types import Group, Prompt


class Buffer:
    """Groups by claim, handed out lowest claim first, so that what is taken depends on what is there and not on when it came."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._refused: list[Group] = []

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, group: Group) -> None:
        assert group.claim_id not in self._groups, f"claim {group.claim_id} is in the buffer already"
        self._groups[group.claim_id] = group

    def take(self, n: int, version: int, max_staleness: int) -> list[Group]:
        """At most `n` groups for the update that trains version `version`, rising by claim; they leave the buffer.

        Staleness is `version` minus the version of a group's oldest trained token. Groups beyond `max_staleness` can only grow older,
        so all of them leave the buffer now, taken or not, and wait in `drain_refused`.
        """
        for claim_id in sorted(self._groups):
            age = staleness(self._groups[claim_id], version)
            assert age >= 0, f"claim {claim_id} has tokens of a version after {version}"
            if age > max_staleness:
                self._refused.append(self._groups.pop(claim_id))
        return [self._groups.pop(claim_id) for claim_id in sorted(self._groups)[:n]]

    def drain_refused(self) -> list[Group]:
        """Groups refused since the last call, each once: their claims are to be retried."""
        refused, self._refused = self._refused, []
        return refused

    def state_dict(self) -> dict[str, Any]:
        """JSON: the waiting groups. Prompts are left out, since a claim's prompt is found again from its id."""
        assert not self._refused, "refused groups must be drained before a checkpoint, or their claims would be lost"
        return {"groups": [[claim_id, [sample_to_json(s) for s in self._groups[claim_id].samples]] for claim_id in sorted(self._groups)]}

    def load_state_dict(self, state: dict[str, Any], prompt: Callable[[int], Prompt]) -> None:
        """Take over `state`; `prompt` maps a claim to its prompt."""
        self._groups = {
            claim_id: Group(claim_id=claim_id, prompt=prompt(claim_id), samples=tuple(sample_from_json(s) for s in samples))
            for claim_id, samples in state["groups"]
        }

    def claim_ids(self) -> list[int]:
        """Claims of the waiting groups, rising."""
        return sorted(self._groups)


def staleness(group: Group, version: int) -> int:
    """Weight versions between the group's oldest trained token and an update from `version`; 0 where no token is trained."""
    oldest = group.oldest_version
    return 0 if oldest is None else version - oldest
