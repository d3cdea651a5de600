"""A group's faults inside the rollout actor, with an engine that fails on cue."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles.core.model.config import ModelConfig
from miles.data.types import Status
from rollout import actor as actor_module
from rollout.actor import GroupResult, GroupTask, RolloutActor, RolloutSpec
from rollout.config import RewardConfig, RewardItem, RolloutConfig
from rollout.engines.contracts import EngineError, EngineHealth, Generation, Request, SamplingParams
from tests.rollout.groups_for_tests import prompt


class Hanging:
    """Never answers `generate`; `broken` says that it does not answer anything else either."""

    def __init__(self, broken: bool) -> None:
        self.broken = broken
        self.aborted: list[str] = []

    def hold(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def generate(self, requests: Sequence[Request]) -> Any:
        await asyncio.Event().wait()

    async def abort(self, request_ids: Sequence[str]) -> None:
        if self.broken:
            raise EngineError("no answer to /abort_request")
        self.aborted += request_ids

    async def health(self) -> EngineHealth:
        return EngineHealth(ok=not self.broken, weight_version=0, running=0, waiting=0, tokens_generated=0, seconds_busy=0.0)


class AbortsTwice(Hanging):
    """Makes token 10, 11, 12, ... of a response at one version each; every call ends after three of them, the last one by the stop token 18."""

    def __init__(self) -> None:
        super().__init__(broken=False)
        self.calls: list[tuple[int, ...]] = []

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        self.calls.append(tuple(len(request.generated) for request in requests))
        return [self._go_on(request, len(request.generated)) for request in requests]

    def _go_on(self, request: Request, start: int) -> Generation:
        places = np.arange(start, start + 3)
        return Generation(
            request_id=request.request_id,
            tokens=10 + places,
            logprobs=-places / 8.0,
            weight_versions=np.full(3, len(self.calls)),
            finish="stop" if start == 6 else "abort",
        )


class OneAtATime(Hanging):
    """Never answers the first call; the others as soon as that was aborted."""

    def __init__(self) -> None:
        super().__init__(broken=False)
        self.calls = 0
        self.free = asyncio.Event()

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        self.calls += 1
        await (asyncio.Event() if self.calls == 1 else self.free).wait()
        one = {"tokens": np.array([7]), "logprobs": np.zeros(1), "weight_versions": np.zeros(1, np.int32)}
        return [Generation(request_id=request.request_id, finish="length", **one) for request in requests]

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids
        self.free.set()


def results(engine: Hanging, model: Path, monkeypatch: pytest.MonkeyPatch, timeout_s: float = 0.05, **rollout: Any) -> list[GroupResult]:
    monkeypatch.setattr(actor_module, "_build_engine", lambda spec, base: engine)
    config = RolloutConfig(**rollout)
    rewards = RewardConfig(functions=[RewardItem(name="length", args={"max_tokens": 100, "buffer": 10})])
    spec = RolloutSpec(model=ModelConfig(path=str(model)), rollout=config, reward=rewards, log_folder="", name="engine-0")
    sampling = (SamplingParams(max_new_tokens=2),) * 2

    async def run() -> list[GroupResult]:
        actor = RolloutActor(spec)
        wave = [GroupTask(claim_id=c, prompt=prompt(c), sampling=sampling, timeout_s=timeout_s) for c in (3, 4)]
        return [result async for result in actor.run_groups(wave)]

    return asyncio.run(run())


def test_a_group_past_its_deadline_is_counted_and_leaves_nothing_in_the_engine(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Hanging(broken=False)
    assert [(r.kind, r.message) for r in results(engine, tiny_model, monkeypatch)] == [("timed_out", "no result within 0.05 s")] * 2
    assert sorted(engine.aborted) == ["3/0", "3/1", "4/0", "4/1"]


def test_the_time_that_a_group_waits_behind_others_is_not_counted(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of two at an engine with room for one: the second would be past a deadline that began together with the first's."""
    found = results(OneAtATime(), tiny_model, monkeypatch, timeout_s=0.4, max_running=2)
    assert {result.claim_id: result.kind for result in found} == {3: "timed_out", 4: "done"}


def test_an_engine_that_hangs_and_cannot_abort_is_a_dead_engine_and_not_the_end_of_the_run(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [r.kind for r in results(Hanging(broken=True), tiny_model, monkeypatch)] == ["engine_died"] * 2


def test_a_response_that_was_aborted_twice_is_one_whose_parts_agree(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AbortsTwice()
    monkeypatch.setattr(actor_module, "_build_engine", lambda spec, base: engine)
    rewards = RewardConfig(functions=[RewardItem(name="length", args={"max_tokens": 100, "buffer": 10})])
    spec = RolloutSpec(model=ModelConfig(path=str(tiny_model)), rollout=RolloutConfig(), reward=rewards, log_folder="", name="engine-0")
    task = GroupTask(claim_id=3, prompt=prompt(3), sampling=(SamplingParams(max_new_tokens=20),), timeout_s=10)

    async def run() -> list[GroupResult]:
        return [result async for result in RolloutActor(spec).run_groups([task])]

    group = asyncio.run(run())[0].group
    assert group is not None
    (sample,) = group.samples
    assert engine.calls == [(0,), (3,), (6,)]
    assert sample.response_tokens.tolist() == [10, 11, 12, 13, 14, 15, 16, 17, 18]
    assert sample.logprobs.tolist() == [-i / 8 for i in range(9)]
    assert sample.weight_versions.tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert sample.loss_mask.all()
    assert sample.status is Status.COMPLETED


def test_groups_that_nobody_wants_any_more_end_as_aborted_and_leave_nothing_in_the_engine(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = OneAtATime()
    monkeypatch.setattr(actor_module, "_build_engine", lambda spec, base: engine)
    spec = RolloutSpec(
        model=ModelConfig(path=str(tiny_model)),
        rollout=RolloutConfig(),
        reward=RewardConfig(functions=[RewardItem(name="length", args={"max_tokens": 9, "buffer": 1})]),
        log_folder="",
        name="",
    )

    async def run() -> list[GroupResult]:
        made = RolloutActor(spec)
        groups = made.run_groups([GroupTask(claim_id=c, prompt=prompt(c), sampling=(SamplingParams(max_new_tokens=1),), timeout_s=60.0) for c in (0, 1)])
        following = asyncio.ensure_future(anext(groups))
        await asyncio.sleep(0.05)
        await made.abort_groups([0, 7])
        found = [await following, await anext(groups)]
        await made.abort_groups([0, 1])
        return found

    found = {result.claim_id: result for result in asyncio.run(run())}
    assert found[0].kind == "aborted"
    assert engine.aborted == ["0/0"]
    assert found[1].kind == "done"
