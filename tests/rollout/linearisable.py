"""Whether a recorded history of one task's calls is linearisable: a search over every order that real time allows (Wing and Gong 1993).

It shares nothing with the table: the task here is None, an owner's name, or "ended".
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """One call of `owner`: "claim" answers whether the task is its, "give_back" always True, "end" whether it ended by this call."""

    owner: str
    what: str
    answer: bool
    began: float
    ended: float


def linearisable(history: list[Call]) -> bool:
    seen: set[tuple[frozenset[int], str | None]] = set()

    def search(left: frozenset[int], task: str | None) -> bool:
        if not left:
            return True
        if (left, task) in seen:
            return False
        seen.add((left, task))
        # A call may come next unless another one ended before it began.
        frontier = min(history[i].ended for i in left)
        return any(
            search(left - {i}, after) for i in left if history[i].began <= frontier for answer, after in [_one(history[i], task)] if answer == history[i].answer
        )

    return search(frozenset(range(len(history))), None)


def _one(call: Call, task: str | None) -> tuple[bool, str | None]:
    if call.what == "claim":
        return (True, call.owner) if task in (None, call.owner) else (False, task)
    if call.what == "give_back":
        return True, None if task == call.owner else task
    return (True, "ended") if task == call.owner else (False, task)
