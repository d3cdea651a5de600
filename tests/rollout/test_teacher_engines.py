"""The teacher's engines as Ray actors: what they score, and what becomes of it when one dies."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from miles.core.model.config import ModelConfig
from rollout.config import TeacherEngineConfig
from rollout.engines.contracts import EngineError
from rollout.engines.scoring import ScoreRequest
from rollout.engines.torch_scorer import TorchScorer
from rollout.teacher import engines
from rollout.teacher.actor import TeacherActor, TeacherSpec
from rollout.teacher.engines import TeacherEngines

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("ray_cluster")]  # the gate has such a death in tests/run/test_distill_engines.py


def requests(count: int) -> list[ScoreRequest]:
    return [ScoreRequest(tokens=np.random.default_rng(i).integers(9, 53, 6 + i % 4), start=3, top_k=2) for i in range(count)]


class Mortal(TeacherActor):
    """Dies of its first calls, as many as `lives`; a file counts them."""

    lives = 0

    async def score(self, asked):  # type: ignore[no-untyped-def]
        calls = Path(self._folder) / "calls"
        with calls.open("a") as file:
            file.write(".")
        if calls.stat().st_size <= self.lives:
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().score(asked)

    def __init__(self, spec: TeacherSpec) -> None:
        super().__init__(spec)
        self._folder = spec.log_folder
        Path(self._folder).mkdir(exist_ok=True)


class DiesOnce(Mortal):
    lives = 1


class AlwaysDies(Mortal):
    lives = 1000


@pytest.fixture
def spec(tiny_model: Path, tmp_path: Path) -> TeacherSpec:
    return TeacherSpec(model=ModelConfig(path=str(tiny_model)), engine=TeacherEngineConfig(), temperature=1.0, log_folder=str(tmp_path))


def scored(spec: TeacherSpec, asked: list[ScoreRequest]) -> list[np.ndarray]:
    async def run() -> list[np.ndarray]:
        teachers = TeacherEngines(spec, ["DEFAULT"])  # type: ignore[list-item]
        try:
            await teachers.start()
            return [answer.logprobs for answer in await teachers.score(asked)]
        finally:
            await teachers.close()
            await teachers.close()

    return asyncio.run(run())


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[np.ndarray]:
    scorer = TorchScorer(ModelConfig(path=str(tiny_model)), temperature=1.0, threads=1)
    return [answer.logprobs for answer in asyncio.run(scorer.score(requests(150)))]


def test_an_engine_that_dies_is_started_again_and_every_answer_is_in_its_place(
    spec: TeacherSpec, expected: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "TeacherActor", DiesOnce)
    found = scored(spec, requests(150))
    assert len(found) == 150
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_engines_that_keep_dying_end_it_by_name(spec: TeacherSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "TeacherActor", AlwaysDies)
    monkeypatch.setattr(engines, "ATTEMPTS", 2)
    with pytest.raises(EngineError, match="the teacher's engine died 2 times in a row over the same 1 parts of a batch"):
        scored(spec, requests(2))


def test_what_the_engine_refuses_is_raised_and_not_tried_again(spec: TeacherSpec) -> None:
    with pytest.raises(ValueError, match="do not fit a vocabulary of 53"):
        scored(spec, [ScoreRequest(tokens=np.array([9, 99]), start=1)])
