"""Who works on which prompt: the one owner of progress. Its low-water mark is the data cursor.

A claim is a position in the endless stream of prompts. It is handed out in order, may be tried several times, and ends exactly once.
Only open claims are kept, so memory follows what is in flight and not the length of the run: a number below `next` that is not open
has ended.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """How a claim ended."""

    TRAINED = "trained"  # an update used its group
    FILTERED = "filtered"  # its group teaches nothing
    EXHAUSTED = "exhausted"  # given up after max_attempts


class Claims:
    """Progress over the stream of prompts, with plain integers for a checkpoint.

    Example: with max_attempts = 2, `claim()` gives 0, then 1; `retry(0)` is True (its second attempt), a second `retry(0)` is
    False and ends it as exhausted; `end(1, Outcome.TRAINED)` ends the other, and the low-water mark is 2.
    """

    def __init__(self, max_attempts: int) -> None:
        assert max_attempts >= 1
        self._max_attempts = max_attempts
        self._next = 0
        self._attempts: dict[int, int] = {}
        self._ended: Counter[Outcome] = Counter()

    def claim(self) -> int:
        """The next claim, in its first attempt."""
        claim_id = self._next
        self._next += 1
        self._attempts[claim_id] = 1
        return claim_id

    def retry(self, claim_id: int) -> bool:
        """The attempt came to nothing. True: the claim stays open for another; False: it was the last, the claim ended as exhausted."""
        assert claim_id in self._attempts, f"claim {claim_id} is not open"
        if self._attempts[claim_id] >= self._max_attempts:
            self.end(claim_id, Outcome.EXHAUSTED)
            return False
        self._attempts[claim_id] += 1
        return True

    def end(self, claim_id: int, outcome: Outcome) -> None:
        """End an open claim; a second end, or that of a claim never made, is a fault of ours."""
        assert claim_id in self._attempts, f"claim {claim_id} is not open and cannot end as {outcome}"
        del self._attempts[claim_id]
        self._ended[outcome] += 1
        assert self._ended.total() + len(self._attempts) == self._next, "a claim was lost or doubled"

    def in_flight(self) -> list[int]:
        """Open claims, rising."""
        return sorted(self._attempts)

    @property
    def low_water(self) -> int:
        """Every claim below it has ended: the data cursor."""
        return min(self._attempts, default=self._next)

    @property
    def ended(self) -> dict[Outcome, int]:
        """How many claims ended in each way."""
        return {outcome: self._ended[outcome] for outcome in Outcome}

    def state_dict(self) -> dict[str, Any]:
        """JSON: everything, open claims with their attempts."""
        return {
            "next": self._next,
            "open": [[claim_id, self._attempts[claim_id]] for claim_id in self.in_flight()],
            "ended": {str(outcome): count for outcome, count in self.ended.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over `state`. Open claims stay in flight, in the attempt they were in: an interruption is not the prompt's fault."""
        self._next = state["next"]
        self._attempts = dict(state["open"])
        self._ended = Counter({Outcome(name): count for name, count in state["ended"].items()})
        assert self._ended.total() + len(self._attempts) == self._next, "the checkpoint's claims do not add up"
