"""Evaluation beside training: what a checkpoint is owed while one runs, and which version a resumed run evaluates for it."""

from __future__ import annotations

import asyncio

import pytest

from miles.run.evaluate import Evaluation
from miles.run.evaluation_fleet import EvaluationFleet


class Fleet:
    """One engine, and the version that it serves; None: it was killed."""

    size = 1

    def __init__(self) -> None:
        self.version: int | None = 0
        self.engine_ids = [0]

    def mark_dead(self, index: int, why: str) -> None:
        self.engine_ids = []

    async def replace(self, index: int) -> None:
        self.version = 0

    def admit(self, index: int) -> None:
        self.engine_ids = [0]


class Evaluator:
    """Ends when the test says so."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def run(self, fleet: Fleet, heal: object) -> Evaluation:
        version = fleet.version
        assert version is not None, "it cannot answer"
        await self.may_end.wait()
        return Evaluation({"eval/version": float(version)}, ())


def apart(trainer_version: int) -> tuple[EvaluationFleet, Evaluator]:
    fleet, evaluator = Fleet(), Evaluator()

    async def catch_up(engine_id: int) -> str | None:
        assert engine_id == 2
        if fleet.version is None:
            return "killed"
        fleet.version = trainer_version
        return None

    return EvaluationFleet(evaluator, fleet, 2, catch_up), evaluator  # type: ignore[arg-type]


def test_an_evaluation_is_owed_from_its_begin_until_it_is_collected() -> None:
    async def case() -> list[int | None]:
        evaluation, evaluator = apart(4)
        owed = [evaluation.owed]
        await evaluation.begin(4)
        owed.append(evaluation.owed)
        evaluator.may_end.set()
        await asyncio.wait({evaluation._running})  # type: ignore[type-var, arg-type]
        owed.append(evaluation.owed)
        assert evaluation.finished(5) == Evaluation({"eval/version": 4.0, "eval/late": 1.0}, ())
        return [*owed, evaluation.owed]

    assert asyncio.run(case()) == [None, 4, 4, None]


@pytest.mark.parametrize(("owed", "evaluated", "told"), [(6, 6, False), (4, 6, True), (0, 0, False)])
def test_a_resumed_run_makes_up_for_what_its_checkpoint_was_owed(owed: int, evaluated: int, told: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Fresh engines hold version 0, whatever the checkpoint's; other weights before it are gone."""

    async def case() -> Evaluation | None:
        evaluation, evaluator = apart(6)
        evaluator.may_end.set()
        await evaluation.make_up(owed, 6)
        return await evaluation.end(7)

    assert asyncio.run(case()) == Evaluation({"eval/version": float(evaluated), "eval/late": float(7 - evaluated)}, ())
    assert ("version 4 had not ended, and its weights are gone: version 6 is evaluated in its place" in caplog.text) == told


def test_an_engine_that_was_killed_while_it_was_idle_costs_no_evaluation() -> None:
    async def case() -> Evaluation | None:
        evaluation, evaluator = apart(4)
        evaluator.may_end.set()
        evaluation.fleet.version = None  # type: ignore[attr-defined]
        await evaluation.begin(4)
        return await evaluation.end(4)

    assert asyncio.run(case()) == Evaluation({"eval/version": 4.0, "eval/late": 0.0}, ())
