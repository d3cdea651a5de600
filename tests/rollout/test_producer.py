"""The rollout side of the loop with a fleet whose answers come when the test says: what is in flight, what is taken, how claims end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

from miles.config import ConfigError
from miles.data.prompts import PromptDataset, PromptReport, PromptStream
from miles.data.types import Prompt
from rollout.actor import GroupResult, GroupTask
from rollout.buffer import Buffer
from rollout.claim_table import Outcome
from rollout.claims import Claims
from rollout.engines.contracts import SamplingParams
from rollout.producer import Producer
from tests.rollout.groups_for_tests import group

N = 4
TEACHES, SAME = [0.0, 1.0], [1.0, 1.0]
Answer = Callable[[int], GroupResult]


class Fleet:
    """Keeps what was asked until the test answers it."""

    def __init__(self) -> None:
        self.engine_ids, self.dead_ids = [0], list[int]()
        self.asked: dict[int, asyncio.Future[GroupResult]] = {}
        self.prompts: dict[int, int] = {}  # what was asked for each claim, in order

    def submit(self, tasks: Sequence[GroupTask], *, balanced: bool) -> list[asyncio.Future[GroupResult]]:
        for task in tasks:
            assert task.claim_id not in self.asked, f"claim {task.claim_id} is in flight twice"
            self.asked[task.claim_id] = asyncio.get_running_loop().create_future()
            self.prompts[task.claim_id] = task.prompt.prompt_id
        return [self.asked[task.claim_id] for task in tasks]

    async def answer(self, claim_ids: Sequence[int], answer: Answer) -> None:
        for claim_id in claim_ids:
            self.asked.pop(claim_id).set_result(answer(claim_id))
        await settle()

    def abort(self, claim_ids: Sequence[int]) -> None:
        for claim_id in claim_ids:
            self.asked.pop(claim_id).set_result(GroupResult(claim_id=claim_id, group=None, kind="aborted"))

    async def answer_all_for_ever(self, answer: Answer) -> None:
        while True:
            await self.answer(list(self.asked), answer)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def at(version: int, rewards: Sequence[float | None] = TEACHES) -> Answer:
    return lambda claim_id: GroupResult(claim_id=claim_id, group=group(claim_id, [version] * len(rewards), list(rewards)))


def failed(claim_id: int) -> GroupResult:
    return GroupResult(claim_id=claim_id, group=None, kind="failed", message="the tool is down")


def stream(size: int = 6, seed: int = 0) -> PromptStream:
    prompts = [Prompt(prompt_id=i, tokens=np.array([i + 1]), text="", columns={}) for i in range(size)]
    report = PromptReport(rows=size, blank_lines=0, too_long=0, kept=size, max_tokens=9, longest=1)
    return PromptStream(PromptDataset(prompts, report, shuffle=True), seed)


PROMPTS = stream()


def producer(fleet: Fleet, *, max_staleness: int = 0, dynamic_sampling: bool = False, prompts: PromptStream | None = None, extra_prompts: int = 0) -> Producer:
    async def heal() -> None:
        fleet.dead_ids, fleet.engine_ids = [], [0]

    return Producer(
        stream=prompts or PROMPTS,
        claims=Claims(max_attempts=2),
        buffer=Buffer(),
        fleet=fleet,  # type: ignore[arg-type]
        sampler=lambda claim_id: (SamplingParams(max_new_tokens=1),) * 2,
        prompts_per_step=N,
        max_staleness=max_staleness,
        timeout_s=10.0,
        dynamic_sampling=dynamic_sampling,
        max_sampling_rounds=3,
        extra_prompts=extra_prompts,
        heal=heal,
    )


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(bounded())


def test_at_0_a_batch_is_the_next_claims_in_whatever_order_they_come_and_nothing_runs_while_the_trainer_works() -> None:
    async def test() -> None:
        fleet = Fleet()
        made = producer(fleet)
        for version, order in enumerate([[2, 0, 3, 1], [5, 7, 6, 4]]):
            taking = asyncio.ensure_future(made.take(version))
            await settle()
            await fleet.answer(order, at(version))
            taken = await taking
            assert [g.claim_id for g in taken.groups] == sorted(order)
            assert not fleet.asked
            made.trained(taken.groups)
        assert made.claims.ended[Outcome.TRAINED] == 8

    run(test)


def test_a_failed_group_is_tried_again_then_given_up_and_another_takes_its_place() -> None:
    async def test() -> None:
        fleet = Fleet()
        made = producer(fleet)
        taking = asyncio.ensure_future(made.take(0))
        await settle()
        await fleet.answer([0, 1, 3], at(0))
        await fleet.answer([2], failed)
        await fleet.answer([2], failed)
        await fleet.answer([4], at(0))
        taken = await taking
        assert [g.claim_id for g in taken.groups] == [0, 1, 3, 4]
        assert (taken.counts["groups/failed"], taken.counts["groups/exhausted"]) == (2.0, 1.0)
        assert (made.claims.in_flight(), made.claims.ended[Outcome.FAILED]) == ([0, 1, 3, 4], 1)

    run(test)


def test_nothing_but_failures_ends_the_run_with_the_last_message() -> None:
    async def test() -> None:
        fleet = Fleet()
        answering = asyncio.ensure_future(fleet.answer_all_for_ever(failed))
        with pytest.raises(RuntimeError, match="32 groups failed in a row, the last one with: the tool is down"):
            await producer(fleet).take(0)
        answering.cancel()

    run(test)


@pytest.mark.parametrize("every_other_fails", [False, True])
def test_dynamic_sampling_that_finds_nothing_ends_after_its_rounds_with_a_diagnosis(every_other_fails: bool) -> None:
    async def test() -> None:
        fleet = Fleet()
        answer: Answer = lambda claim_id: failed(claim_id) if every_other_fails and claim_id % 2 else at(0, SAME)(claim_id)  # noqa: E731
        answering = asyncio.ensure_future(fleet.answer_all_for_ever(answer))
        with pytest.raises(RuntimeError, match=r"max_sampling_rounds = 3 batches of 4 groups.*with all rewards equal to 1"):
            await producer(fleet, dynamic_sampling=True).take(0)
        answering.cancel()

    run(test)


def test_dynamic_sampling_refills_only_what_is_missing_and_ends_the_claims_it_dropped() -> None:
    async def test() -> None:
        fleet = Fleet()
        made = producer(fleet, dynamic_sampling=True)
        taking = asyncio.ensure_future(made.take(0))
        await settle()
        await fleet.answer([0, 2], at(0, SAME))
        assert sorted(fleet.asked) == [1, 3], "a round is refilled when it is over"
        await fleet.answer([1, 3], at(0))
        assert sorted(fleet.asked) == [4, 5]
        await fleet.answer([4, 5], at(0))
        taken = await taking
        assert [g.claim_id for g in taken.groups] == [1, 3, 4, 5]
        assert (taken.counts["groups/filtered"], made.claims.ended[Outcome.FILTERED]) == (2.0, 2)

    run(test)


def test_a_group_without_a_single_reward_is_trained_as_it_is_and_not_waited_for() -> None:
    async def test() -> None:
        fleet = Fleet()
        answering = asyncio.ensure_future(fleet.answer_all_for_ever(at(0, [None, None])))
        assert len((await producer(fleet).take(0)).groups) == N
        answering.cancel()

    run(test)


def test_at_1_one_batch_is_ahead_and_what_grew_too_old_is_generated_again() -> None:
    async def test() -> None:
        fleet = Fleet()
        made = producer(fleet, max_staleness=1)
        taking = asyncio.ensure_future(made.take(3))
        await settle()
        assert sorted(fleet.asked) == list(range(2 * N))
        await fleet.answer(range(N), at(3))
        made.trained((await taking).groups)
        assert sorted(fleet.asked) == [4, 5, 6, 7], "no more than one batch while the trainer works"
        await fleet.answer([4, 5], at(3))
        taking = asyncio.ensure_future(made.take(5))  # two versions later: 4 and 5 are too old
        await settle()
        await fleet.answer([4, 5, 6, 7], at(5))
        taken = await taking
        assert [g.claim_id for g in taken.groups] == [4, 5, 6, 7]
        assert taken.counts["groups/refused_stale"] == 2.0

    run(test)


def test_at_4_the_engines_are_four_batches_ahead_and_a_group_that_was_slow_is_trained_as_long_as_it_is_young_enough() -> None:
    async def test() -> None:
        fleet = Fleet()
        made = producer(fleet, max_staleness=4)
        trained: list[int] = []
        for version in range(6):
            taking = asyncio.ensure_future(made.take(version))
            await settle()
            assert len(fleet.asked) == 5 * N
            await fleet.answer([c for c in sorted(fleet.asked) if c >= 2][:N], at(version))  # 0 and 1 were begun at version 0 and hang
            taken = await taking
            made.trained(taken.groups)
            trained += [g.claim_id for g in taken.groups]
        assert 0 not in trained
        taking = asyncio.ensure_future(made.take(6))
        await settle()
        await fleet.answer([0], at(1))  # 5 versions old
        await fleet.answer([1], at(2))  # 4 versions old
        await fleet.answer([c for c in sorted(fleet.asked) if c > 1][: N - 1], at(6))
        taken = await taking
        assert (taken.groups[0].claim_id, taken.counts["groups/refused_stale"]) == (1, 1.0)
        assert taken.counts["length/refused_mean"] > 0

    run(test)


def test_a_dead_fleet_is_healed_before_it_is_asked() -> None:
    async def test() -> None:
        fleet = Fleet()
        fleet.engine_ids, fleet.dead_ids = [], [0]
        answering = asyncio.ensure_future(fleet.answer_all_for_ever(at(0)))
        assert len((await producer(fleet).take(0)).groups) == N
        answering.cancel()

    run(test)


def test_what_an_actor_raises_is_raised_to_the_loop() -> None:
    async def test() -> None:
        fleet = Fleet()
        taking = asyncio.ensure_future(producer(fleet).take(0))
        await settle()
        fleet.asked.pop(1).set_exception(RuntimeError("reward function 'mine' failed 64 times in a row"))
        with pytest.raises(RuntimeError, match="failed 64 times in a row"):
            await taking

    run(test)


def test_a_fault_of_our_own_ends_the_run_and_does_not_leave_it_waiting() -> None:
    async def test() -> None:
        fleet = Fleet()
        taking = asyncio.ensure_future(producer(fleet).take(0))
        await settle()
        await fleet.answer([0, 1], lambda claim_id: at(0)(1))  # the same group twice
        with pytest.raises(AssertionError, match="claim 1 is in the buffer already"):
            await taking

    run(test)


def test_a_killed_and_resumed_run_asks_again_for_what_was_in_flight_and_for_nothing_else() -> None:
    """Killed with a batch trained, two groups of the next one buffered and two in flight. The epoch ends within that batch."""

    async def test() -> None:
        fleet = Fleet()
        made = producer(fleet, max_staleness=1)
        taking = asyncio.ensure_future(made.take(0))
        await settle()
        await fleet.answer(range(N), at(0))
        made.trained((await taking).groups)
        await fleet.answer([5, 6], at(0))
        state = json.loads(json.dumps(made.state_dict()))

        fleet = Fleet()
        resumed = producer(fleet, max_staleness=1)
        resumed.load_state_dict(state)
        taking = asyncio.ensure_future(resumed.take(1))
        await settle()
        assert fleet.prompts == {claim: made.stream.prompt(claim).prompt_id for claim in (4, 7, 8, 9, 10, 11)}
        await fleet.answer([4, 7], at(1))
        groups = (await taking).groups
        assert [g.claim_id for g in groups] == [4, 5, 6, 7]
        assert [g.prompt for g in groups[1:3]] == [made.stream.prompt(claim) for claim in (5, 6)]

    run(test)


def test_a_resumed_run_of_other_rewards_or_another_temperature_generates_again_what_waits() -> None:
    async def test() -> None:
        fleet = Fleet()
        made = producer(fleet, max_staleness=1)
        made.made_by = "temperature 1"
        taking = asyncio.ensure_future(made.take(0))
        await settle()
        await fleet.answer(range(N), at(0))
        made.trained((await taking).groups)
        await fleet.answer([5, 6], at(0))
        state = json.loads(json.dumps(made.state_dict()))

        fleet = Fleet()
        resumed = producer(fleet, max_staleness=1)
        resumed.made_by = "temperature 0.7"
        resumed.load_state_dict(state)
        taking = asyncio.ensure_future(resumed.take(1))
        await settle()
        assert sorted(fleet.asked) == [4, 5, 6, 7, 8, 9, 10, 11]
        await fleet.answer([4, 5, 6, 7], at(1))
        assert [g.oldest_version for g in (await taking).groups] == [1, 1, 1, 1]

    run(test)


@pytest.mark.parametrize("other", [{"seed": 1}, {"size": 7}])
def test_a_run_is_not_resumed_on_other_data_or_in_another_order(other: dict[str, int]) -> None:
    state = producer(Fleet()).state_dict()
    with pytest.raises(ConfigError, match=r"run\.seed"):
        producer(Fleet(), prompts=stream(**other)).load_state_dict(state)


def test_with_extra_prompts_the_first_to_finish_are_the_batch_and_the_tail_comes_again_until_it_is_exhausted() -> None:
    async def test() -> None:
        fleet = Fleet()
        made = producer(fleet, extra_prompts=2)
        taking = asyncio.ensure_future(made.take(0))
        await settle()
        assert sorted(fleet.asked) == [0, 1, 2, 3, 4, 5]
        await fleet.answer([5, 1, 4, 3], at(0))
        taken = await taking
        assert [g.claim_id for g in taken.groups] == [1, 3, 4, 5]
        assert taken.counts["groups/aborted"] == 2
        assert taken.counts["groups/failed"] == 0
        assert not fleet.asked, "the engines are idle while the trainer works"
        made.trained(taken.groups)
        taking = asyncio.ensure_future(made.take(1))
        await settle()
        assert sorted(fleet.asked) == [0, 2, 6, 7, 8, 9]
        await fleet.answer([0, 6, 7, 9], at(1))
        taken = await taking
        made.trained(taken.groups)
        assert taken.counts["groups/aborted"] == 2
        assert taken.counts["groups/exhausted"] == 1, "claim 2 had its two attempts"
        assert made.claims.in_flight() == [8]
        assert made.claims.ended == {Outcome.TRAINED: 8, Outcome.FILTERED: 0, Outcome.FAILED: 0, Outcome.EXHAUSTED: 1}

    run(test)


def test_a_group_that_was_done_while_the_tail_was_aborted_is_too_old_for_the_next_version_and_not_lost() -> None:
    async def test() -> None:
        fleet = Fleet()
        made = producer(fleet, extra_prompts=1)
        taking = asyncio.ensure_future(made.take(0))
        await settle()
        await fleet.answer([0, 1, 2, 3, 4], at(0))
        taken = await taking
        assert [g.claim_id for g in taken.groups] == [0, 1, 2, 3]
        made.trained(taken.groups)
        taking = asyncio.ensure_future(made.take(1))
        await settle()
        assert sorted(fleet.asked) == [4, 5, 6, 7, 8]
        await fleet.answer([4, 5, 6, 7], at(1))
        taken = await taking
        assert [g.claim_id for g in taken.groups] == [4, 5, 6, 7]
        assert taken.counts["groups/refused_stale"] == 1

    run(test)
