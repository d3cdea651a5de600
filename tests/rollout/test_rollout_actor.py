"""A group's faults inside the rollout actor, with an engine that fails on cue."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from miles.core.model.config import ModelConfig
from rollout import actor as actor_module
from rollout.actor import GroupResult, GroupTask, RolloutActor, RolloutSpec
from rollout.config import RewardConfig, RolloutConfig
from rollout.engines.contracts import EngineError, EngineHealth, Request, SamplingParams
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


def results(engine: Hanging, model: Path, monkeypatch: pytest.MonkeyPatch) -> list[GroupResult]:
    monkeypatch.setattr(actor_module, "_build_engine", lambda spec: engine)
    spec = RolloutSpec(model=ModelConfig(path=str(model)), rollout=RolloutConfig(), reward=RewardConfig(), log_folder="", name="engine-0")
    sampling = (SamplingParams(max_new_tokens=2),) * 2

    async def run() -> list[GroupResult]:
        actor = RolloutActor(spec)
        wave = [GroupTask(claim_id=c, prompt=prompt(c), sampling=sampling, timeout_s=0.05) for c in (3, 4)]
        return [result async for result in actor.run_groups(wave)]

    return asyncio.run(run())


def test_a_group_past_its_deadline_is_counted_and_leaves_nothing_in_the_engine(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Hanging(broken=False)
    assert [(r.kind, r.message) for r in results(engine, tiny_model, monkeypatch)] == [("timed_out", "no result within 0.05 s")] * 2
    assert sorted(engine.aborted) == ["3/0", "3/1", "4/0", "4/1"]


def test_an_engine_that_hangs_and_cannot_abort_is_a_dead_engine_and_not_the_end_of_the_run(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [r.kind for r in results(Hanging(broken=True), tiny_model, monkeypatch)] == ["engine_died"] * 2
