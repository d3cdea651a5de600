"""What is in memory when: each resident from the moment its producer runs to the moment its last consumer has, against a budget.

Example: moments answers, replay, optimizer; weights of 4 bytes in all of them, a prompt of 6 from 0 to 1, gradients of 4 from 1 to 2:
10, 14 and 8 bytes. The peak is 14, at the replay, and a budget of 12 is refused with the largest residents of that moment.
"""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Resident:
    """`bytes` that exist from moment `first` to moment `last`, both included. Residents of one `kind` are drawn in one colour."""

    name: str
    kind: str
    bytes: int
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class Residency:
    """One device. `budget`: bytes that it may hold; None where that is not known."""

    moments: tuple[str, ...]
    residents: tuple[Resident, ...]
    budget: int | None = None

    def at(self, moment: int) -> int:
        return sum(r.bytes for r in self.residents if r.first <= moment <= r.last)

    @property
    def peak(self) -> int:
        """The first moment at which most is held."""
        return max(range(len(self.moments)), key=lambda moment: (self.at(moment), -moment))

    def of_kind(self, kind: str) -> list[int]:
        """Bytes of that kind at each moment."""
        return [sum(r.bytes for r in self.residents if r.kind == kind and r.first <= moment <= r.last) for moment in range(len(self.moments))]

    def check(self) -> None:
        """Raises ValueError where the peak is above the budget, with what is there then."""
        moment = self.peak
        if self.budget is None or self.at(moment) <= self.budget:
            return
        there = sorted((r for r in self.residents if r.first <= moment <= r.last), key=lambda r: -r.bytes)
        largest = ", ".join(f"{r.name} {r.bytes / _MIB:.0f}" for r in there[:4])
        raise ValueError(
            f"{self.at(moment) / _MIB:.0f} MiB are needed at {self.moments[moment]!r}, above the budget of {self.budget / _MIB:.0f} MiB; the largest: "
            f"{largest} MiB. Lower trainer.max_tokens_per_microbatch, which bounds what prompts and answers hold"
        )
