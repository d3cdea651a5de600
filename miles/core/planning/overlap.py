"""How long a synchronous step of reinforcement learning takes when prompts are computed beside decoding, and when they are not. Arithmetic.

serial          generate, then prefix, then the rest: each phase has all devices
overlapped      generate beside prefix on the same devices, which slow each other down; then the rest
disaggregated   generate on some devices, prefix and the rest on the others; those wait for these, since the step is synchronous
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Seconds of one step where each phase has all devices to itself.

    Attributes:
        generate: prompts and answers by the engines. prefix: the forward of the prompts by the reference and the policy.
        rest: the answers' forwards, all backwards, the optimizer and the publication.
        early: the share of `prefix` that memory has room for while the engines work.
    """

    generate: float
    prefix: float
    rest: float
    early: float = 1.0

    @property
    def serial(self) -> float:
        return self.generate + self.prefix + self.rest

    def overlapped(self, slower_generate: float, slower_prefix: float) -> float:
        """Seconds where both phases run side by side so many times slower (1: as fast as alone) until one of them ends.

        Example: generate 10, prefix 4, rest 6, 1.2 and 1.5: the prefix takes 6 s, in which 5 of the 10 s of generation are done;
        6 + 5 + 6 = 17 against 20.
        """
        assert min(slower_generate, slower_prefix) >= 1, "a neighbour makes nothing faster"
        work = self.prefix * self.early
        both = min(work * slower_prefix, self.generate * slower_generate)
        generate_left = self.generate - both / slower_generate
        prefix_left = work - both / slower_prefix + self.prefix * (1 - self.early)
        return both + generate_left + prefix_left + self.rest

    def disaggregated(self, engines: float) -> float:
        """Seconds where the engines have the share `engines` of the devices for themselves."""
        return self.generate / engines + (self.prefix + self.rest) / (1 - engines)
