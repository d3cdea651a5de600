"""Seconds of an overlapped step, against a clock that ticks."""

from __future__ import annotations

import pytest

from miles.core.planning.overlap import Phases


def ticked(phases: Phases, slower_generate: float, slower_prefix: float, tick: float = 1e-4) -> float:
    generate, prefix, clock = phases.generate, phases.prefix * phases.early, 0.0
    while generate > 0 or prefix > 0:
        beside = generate > 0 and prefix > 0
        generate -= tick / (slower_generate if beside else 1)
        prefix -= tick / (slower_prefix if beside else 1)
        clock += tick
    return clock + phases.prefix * (1 - phases.early) + phases.rest


@pytest.mark.parametrize(("generate", "prefix"), [(1.0, 0.4), (0.3, 1.0), (0.5, 0.0)])
@pytest.mark.parametrize("early", [1.0, 0.5])
def test_two_phases_side_by_side(generate: float, prefix: float, early: float) -> None:
    phases = Phases(generate=generate, prefix=prefix, rest=0.2, early=early)
    for slower in ((1.0, 1.0), (1.3, 1.7), (2.0, 2.0)):
        # A phase that ended during a tick was not beside the other for all of it.
        assert phases.overlapped(*slower) == pytest.approx(max(ticked(phases, *slower), generate + 0.2), abs=1e-3)


def test_neighbours_that_halve_each_other_gain_nothing() -> None:
    phases = Phases(generate=3.0, prefix=1.0, rest=2.0)
    assert phases.overlapped(2.0, 2.0) == pytest.approx(phases.serial)


def test_devices_that_wait_for_others() -> None:
    assert Phases(generate=3.0, prefix=1.0, rest=2.0).disaggregated(0.5) == 12.0
