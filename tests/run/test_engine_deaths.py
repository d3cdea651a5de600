"""Engines that die at every moment a run does not look at them: between rollouts, in an update, in catching up, in an evaluation.

Fleet and weight sync are scripted here, so that each death comes when it is wanted; tests/conformance and test_rl.py kill real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from miles.data.types import Group, Prompt, Sample, Status
from miles.run.assemble import PUBLISH_ATTEMPTS, REVIVE_ATTEMPTS, RLRun
from miles.run.evaluate import Evaluator
from rollout.actor import GroupResult, GroupTask
from rollout.config import EvaluateConfig
from weight_sync.transaction import PublishResult, UpdateAborted


class Fleet:
    """Engines by number: alive or not, and the version each holds. `dies` is what the next waves do to engine 0."""

    def __init__(self, alive: Sequence[int], version: int, engines: int = 2) -> None:
        self.alive = set(alive)
        self.holds = dict.fromkeys(range(engines), version)
        self.dies: list[bool] = []

    @property
    def engine_ids(self) -> list[int]:
        return sorted(self.alive)

    @property
    def dead_ids(self) -> list[int]:
        return sorted(self.holds.keys() - self.alive)

    def mark_dead(self, engine_id: int, reason: str) -> None:
        self.alive.discard(engine_id)

    async def replace(self, engine_id: int) -> None:
        self.holds[engine_id] = 0

    def admit(self, engine_id: int) -> None:
        self.alive.add(engine_id)

    def submit(self, tasks: Sequence[GroupTask]) -> list[asyncio.Future[GroupResult]]:
        assert self.alive, "no engine is up"
        dies = self.dies.pop(0) if self.dies else False
        if dies:
            self.alive.discard(0)
        return [self._answer(task, dies and task.claim_id % 2 == 0) for task in tasks]

    def _answer(self, task: GroupTask, died: bool) -> asyncio.Future[GroupResult]:
        future: asyncio.Future[GroupResult] = asyncio.get_running_loop().create_future()
        done = GroupResult(claim_id=task.claim_id, group=answered(task))
        future.set_result(replace(done, group=None, kind="engine_died") if died else done)
        return future


class Sync:
    """Updates that lose engines by script: each entry is a set of engines, and whether they die before the journal or after it."""

    def __init__(self, fleet: Fleet, *deaths: tuple[set[int], str]) -> None:
        self.fleet, self.deaths = fleet, list(deaths)

    async def publish(self, version: int) -> PublishResult:
        return self._update(version, self.fleet.engine_ids)

    async def catch_up(self, engine_id: int) -> PublishResult:
        return self._update(5, [engine_id])

    def _update(self, version: int, engine_ids: Sequence[int]) -> PublishResult:
        assert engine_ids, "no engine is up to receive it"
        gone, when = self.deaths.pop(0) if self.deaths else (set(), "")
        dead = dict.fromkeys(gone & set(engine_ids), "killed")
        if when == "before":
            raise UpdateAborted("an engine died", dead)
        self.fleet.holds |= {engine_id: version for engine_id in engine_ids if engine_id not in dead}
        return PublishResult(version=version, seconds=0.0, bytes=0, digests_compared=0, dead=dead)


def answered(task: GroupTask) -> Group:
    sample = Sample(
        sample_id="", group_id="", tokens=[1, 2], prompt_length=1, loss_mask=[True], logprobs=[0.0], weight_versions=[5], status=Status.COMPLETED, reward=1.0
    )
    return Group(claim_id=task.claim_id, prompt=task.prompt, samples=(sample,) * len(task.sampling))


def run_of(fleet: Fleet, sync: Sync, version: int = 5) -> RLRun:
    parts: dict[str, Any] = dict.fromkeys(("recipe", "folder", "trainer", "producer", "evaluator", "checkpoints", "tracker", "live", "tokenizer"))
    return RLRun(**parts, fleet=fleet, sync=sync, resume=False, version=version)  # type: ignore[arg-type]


def test_every_engine_died_while_the_trainer_worked_and_the_update_brings_fresh_ones_up() -> None:
    fleet = Fleet(alive=[], version=5)
    run = run_of(fleet, Sync(fleet))
    asyncio.run(run.publish())
    assert (run.version, fleet.engine_ids, fleet.holds) == (6, [0, 1], {0: 6, 1: 6})


def test_every_engine_dies_in_the_update_and_the_next_attempt_has_fresh_ones() -> None:
    fleet = Fleet(alive=[0, 1], version=5)
    run = run_of(fleet, Sync(fleet, ({0, 1}, "before")))
    asyncio.run(run.publish())
    assert (run.version, fleet.engine_ids, fleet.holds) == (6, [0, 1], {0: 6, 1: 6})


def test_an_engine_that_did_not_commit_is_left_behind() -> None:
    fleet = Fleet(alive=[0, 1], version=5)
    run = run_of(fleet, Sync(fleet, ({1}, "after")))
    asyncio.run(run.publish())
    assert (run.version, fleet.engine_ids, fleet.dead_ids) == (6, [0], [1])


def test_engines_that_keep_dying_end_the_run_and_the_old_version_stands() -> None:
    fleet = Fleet(alive=[0, 1], version=5)
    run = run_of(fleet, Sync(fleet, *[({0, 1}, "before")] * PUBLISH_ATTEMPTS))
    with pytest.raises(UpdateAborted):
        asyncio.run(run.publish())
    assert run.version == 5


def test_an_update_that_is_refused_though_no_engine_died_is_not_tried_again() -> None:
    fleet = Fleet(alive=[0, 1], version=5)
    with pytest.raises(UpdateAborted):
        asyncio.run(run_of(fleet, Sync(fleet, (set(), "before"))).publish())


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_fresh_engine_that_dies_while_it_catches_up_serves_only_once_its_successor_has(when: str) -> None:
    """`after`: it received everything and died at commit, which is no exception but a line in the result."""
    fleet = Fleet(alive=[0], version=5)
    asyncio.run(run_of(fleet, Sync(fleet, ({1}, when))).heal())
    assert (fleet.engine_ids, fleet.holds) == ([0, 1], {0: 5, 1: 5})


def test_an_engine_that_never_catches_up_ends_the_run_by_its_number() -> None:
    fleet = Fleet(alive=[0], version=5)
    run = run_of(fleet, Sync(fleet, *[({1}, "after")] * REVIVE_ATTEMPTS))
    with pytest.raises(RuntimeError, match="engine 1 died 3 times in a row while it took up version 5, the last time by: killed"):
        asyncio.run(run.heal())
    assert fleet.engine_ids == [0]


def test_at_version_0_a_fresh_engine_has_nothing_to_take_up() -> None:
    fleet = Fleet(alive=[0], version=0)
    asyncio.run(run_of(fleet, Sync(fleet, ({1}, "before")), version=0).heal())
    assert fleet.engine_ids == [0, 1]


@pytest.mark.parametrize("engines", [1, 2])
def test_a_death_in_an_evaluation_changes_no_score(engines: int) -> None:
    """Every answer is right. Half of them are lost with engine 0, which may be the only one, and asked again."""
    prompts = [Prompt(prompt_id=i, tokens=np.array([1]), text="", columns={}) for i in range(4)]
    fleet = Fleet(alive=range(engines), version=5, engines=engines)
    fleet.dies = [True]
    run = run_of(fleet, Sync(fleet))
    evaluator = Evaluator(EvaluateConfig(greedy=True), prompts, (2,), seed=0)
    metrics = asyncio.run(evaluator.run(fleet, run.heal)).metrics  # type: ignore[arg-type]
    assert (metrics["eval/pass_at_1"], metrics["eval/greedy"], metrics["eval/failed"]) == (1.0, 1.0, 0.0)


def test_prompts_that_kill_every_engine_are_counted_and_do_not_go_on_for_ever() -> None:
    prompts = [Prompt(prompt_id=i, tokens=np.array([1]), text="", columns={}) for i in range(4)]
    fleet = Fleet(alive=[0, 1], version=5)
    fleet.dies = [True] * 9
    run = run_of(fleet, Sync(fleet))
    metrics = asyncio.run(Evaluator(EvaluateConfig(), prompts, (2,), seed=0).run(fleet, run.heal)).metrics  # type: ignore[arg-type]
    assert (metrics["eval/pass_at_1"], metrics["eval/failed"]) == (0.5, 2.0)
