"""Plans in two parts: prompts first, the answers later."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.core.planning.hardware import CPU_CORE
from miles.core.planning.workload import Workload
from trainer.contracts import ClaimedPrompt
from trainer.split_forward.ahead import Ahead

WORKLOAD = Workload(layers=4, weights=3_000_000, hidden=256, vocabulary=512, heads=4, width=64)
LONGEST = 6

waves = st.lists(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=4), min_size=1, max_size=3)


def made(given_waves: list[list[list[int]]], world: int, capacity: int, *, apart: bool = False, kept: set[int] | None = None) -> tuple[Ahead, list[int]]:
    """The claims that are still open when a wave comes are those in `kept`."""
    ahead = Ahead(WORKLOAD, CPU_CORE, world=world, capacity=capacity, longest=LONGEST, apart=apart)
    claims: list[int] = []
    for prompts in given_waves:
        if kept is not None:
            ahead.let_go(kept)
        new = range(len(claims), len(claims) + len(prompts))
        ahead.add([ClaimedPrompt(claim_id=c, tokens=np.array(tokens), count=3) for c, tokens in zip(new, prompts, strict=True)])
        claims += new
    return ahead, claims


@settings(max_examples=150, deadline=None)
@given(waves, st.integers(1, 3), st.sampled_from([20, 40, 1000]), st.booleans(), st.data())
def test_plans_are_valid_and_begin_with_what_ran_early(given_waves: Any, world: int, capacity: int, apart: bool, data: Any) -> None:
    kept = set(data.draw(st.lists(st.integers(0, 12), max_size=6)))
    ahead, claims = made(given_waves, world, capacity, apart=apart, kept=kept)
    live = [slot for c in claims if c in kept for slot in ahead.slot(c) if data.draw(st.booleans())]
    ahead.let_go({c for c in claims if not {*ahead.slot(c)}.isdisjoint(live)})
    prompts = [len(tokens) for wave in ahead.waves for tokens in wave.tokens]
    lengths = [prompts[slot] + (data.draw(st.integers(0, LONGEST)) if slot in live else 0) for slot in range(len(prompts))]
    plans, early = ahead.plan({slot: lengths[slot] for slot in live})
    assert sorted(s for plan in plans for s in plan.ends) == sorted(live), "each answer on one rank"
    for rank, plan in enumerate(plans):
        plan.validate(lengths)
        assert [step.kind for step in plan.steps] == [step.kind for step in plans[0].steps]
        assert [step.number for step in plan.steps[: len(early)]] == list(early)
        for number, (wave, before) in early.items():
            told, now = (
                [(p.segments[s].start, p.segments[s].stop) for s in p.passes[n].segments] for p, n in ((ahead.waves[wave].plans[rank], before), (plan, number))
            )
            assert told == now, "the same row, early or late"


@settings(max_examples=100, deadline=None)
@given(waves, st.integers(1, 3), st.sampled_from([20, 40, 1000]))
def test_early_prompts_take_half_of_the_room_at_most_unless_one_alone_takes_more(given_waves: Any, world: int, capacity: int) -> None:
    ahead, _ = made(given_waves, world, capacity)
    for rank in range(world):
        held = sum(wave.held(rank) for wave in ahead.waves)
        alone = any(len(plan.passes[0].segments) <= 1 for wave in ahead.waves for plan in [wave.plans[rank]] if wave.early)
        assert held <= capacity // 2 or alone


def test_a_dropped_prompt_alone_in_its_pass_is_let_go_and_one_beside_others_is_not() -> None:
    prompts = [[[0, 0, 0, 0], [1, 1, 1, 1]]]
    assert len(made(prompts, 1, 100, apart=True)[0].let_go({0})) == 1
    assert made(prompts, 1, 100)[0].let_go({0}) == []
    assert len(made(prompts, 1, 100)[0].let_go(set())) == 1


def test_prompts_that_do_not_fit_beside_those_before_come_late() -> None:
    ahead, _ = made([[[0] * 9], [[1] * 9]], 1, 30)
    assert [wave.early for wave in ahead.waves] == [1, 0]
    _, early = ahead.plan({0: 12, 3: 12})
    assert list(early.values()) == [(0, 0)]
