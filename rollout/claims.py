"""Progress of the one loop over its prompts. The low-water mark is the data cursor.

A claim is a position in the endless stream of prompts. It is handed out in order, may be tried several times, and ends exactly once: a task of
a claim table whose only owner is the loop. The table lives in memory, because these claims must go back with the weights: its file is the
checkpoint. Ended claims are forgotten, so memory follows what is in flight and not the length of the run: a number below `next` that is not
open has ended.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from rollout.claim_table import Claim, ClaimTable, Outcome, State

_LOOP = "loop"


class Claims:
    """Progress over the stream of prompts, with plain integers for a checkpoint.

    Example: with max_attempts = 2, `claim()` gives 0, then 1; `retry(0)` is True (its second attempt), a second `retry(0)` is
    False and ends it; `end(1, Outcome.TRAINED)` ends the other, and the low-water mark is 2.
    """

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._table = ClaimTable(max_attempts=max_attempts)
        self._next = 0
        self._open: dict[int, Claim] = {}
        self._ended: Counter[Outcome] = Counter()

    def claim(self) -> int:
        """The next claim, in its first attempt."""
        claim_id = self._next
        self._next += 1
        self._table.add([claim_id])
        self._take(claim_id)
        return claim_id

    def retry(self, claim_id: int, last: Outcome) -> bool:
        """The attempt came to nothing. True: the claim stays open for another; False: that was the last, and it ended as `last` says."""
        word = self._table.release(self._claim_of(claim_id), last)
        if word.state is State.COMMITTED:
            self._forget(claim_id, last)
            return False
        self._take(claim_id)
        return True

    def end(self, claim_id: int, outcome: Outcome) -> None:
        """End an open claim; a second end, or that of a claim never made, is a fault of ours."""
        ended = self._table.end(self._claim_of(claim_id), outcome)
        assert ended, f"claim {claim_id} is another's"
        self._forget(claim_id, outcome)

    def in_flight(self) -> list[int]:
        """Open claims, rising."""
        return sorted(self._open)

    @property
    def low_water(self) -> int:
        """Every claim below it has ended: the data cursor."""
        return min(self._open, default=self._next)

    @property
    def ended(self) -> dict[Outcome, int]:
        """How many claims ended in each way."""
        return {outcome: self._ended[outcome] for outcome in Outcome}

    def state_dict(self) -> dict[str, Any]:
        """JSON: everything, open claims with their attempts."""
        return {
            "next": self._next,
            "open": [[claim_id, self._table.word(claim_id).attempts] for claim_id in self.in_flight()],
            "ended": {str(outcome): count for outcome, count in self.ended.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over `state`. Open claims stay in flight, in the attempt they were in: an interruption is not the prompt's fault."""
        self._table = ClaimTable(max_attempts=self._max_attempts)
        self._next, self._open = state["next"], {}
        for claim_id, attempts in state["open"]:
            self._table.add([claim_id], attempts=attempts - 1)
            self._take(claim_id)
        self._ended = Counter({Outcome(name): count for name, count in state["ended"].items()})
        assert self._ended.total() + len(self._open) == self._next, "the checkpoint's claims do not add up"

    def _take(self, claim_id: int) -> None:
        claim = self._table.claim(_LOOP, claim_id)
        assert claim is not None, f"claim {claim_id} is another's"
        self._open[claim_id] = claim

    def _claim_of(self, claim_id: int) -> Claim:
        assert claim_id in self._open, f"claim {claim_id} is not open"
        return self._open[claim_id]

    def _forget(self, claim_id: int, outcome: Outcome) -> None:
        del self._open[claim_id]
        self._table.forget(claim_id)
        self._ended[outcome] += 1
        assert self._ended.total() + len(self._open) == self._next, "a claim was lost or doubled"
