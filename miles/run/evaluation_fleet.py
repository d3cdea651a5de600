"""Evaluation on engines of its own, while training goes on: always at one version, and the record says which and how late it is.

The trainer sends its weights to these engines when an evaluation is due, between two of its steps, and does not wait for the answers. They are
recorded with the first step that finds them finished. Where the next evaluation is due before, it waits for the last one: none is left out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from miles.run.evaluate import Evaluation, Evaluator
from rollout.fleet import Fleet

logger = logging.getLogger(__name__)

CatchUp = Callable[[int], Awaitable[str | None]]
"""Number of an engine -> None once it serves the trainer's weights, or what it died of."""


FIRST_APART = 1000
"""Number of the first engine that only evaluates."""


class BothFleets:
    """The engines as weight sync sees them: those that roll out take part in every update, those behind them only catch up.

    Example: engine 0 of `apart` is number `FIRST_APART`, however many others join.
    """

    def __init__(self, rollout: Fleet, apart: Fleet | None, first: int) -> None:
        self._rollout, self._apart, self._first = rollout, apart, first

    @property
    def engine_ids(self) -> Sequence[int]:
        return self._rollout.engine_ids

    async def call(self, engine_id: int, method: str, *args: Any) -> Any:
        if engine_id < self._first:
            return await self._rollout.call(engine_id, method, *args)
        assert self._apart is not None
        return await self._apart.call(engine_id - self._first, method, *args)


class EvaluationFleet:
    """One evaluation at a time, on `fleet`, whose engines are numbers `first` and up to `catch_up`."""

    def __init__(self, evaluator: Evaluator, fleet: Fleet, first: int, catch_up: CatchUp) -> None:
        self._evaluator, self.fleet, self._first, self._catch_up = evaluator, fleet, first, catch_up
        self._running: asyncio.Task[Evaluation | None] | None = None
        self._version = 0

    @property
    def owed(self) -> int | None:
        """The version whose evaluation has begun and is not collected yet. A checkpoint says so: a run that goes on from it begins anew."""
        return None if self._running is None else self._version

    async def make_up(self, owed: int, version: int) -> None:
        """Begin the evaluation that a checkpoint of `version` was still owed, before any other. Fresh engines hold version 0; the weights of any other
        version before the checkpoint's are gone, and the checkpoint's are then evaluated in their place, which the record says."""
        if owed not in (0, version):
            logger.warning("the evaluation of version %d had not ended, and its weights are gone: version %d is evaluated in its place", owed, version)
        await self.begin(0 if owed == 0 else version)

    async def begin(self, version: int) -> Evaluation | None:
        """Start to evaluate the trainer's weights, which are `version`; returns when they have been sent. The evaluation before it, if it was
        not collected yet. The trainer must be idle."""
        last = await self.end(version)
        for index in range(self.fleet.size):
            await self._prepare(index, version)
        if self.fleet.engine_ids:
            self._version = version
            self._running = asyncio.create_task(self._evaluate(version))
        else:
            logger.warning("version %d is not evaluated: no engine for it came up", version)
        return last

    def finished(self, version: int) -> Evaluation | None:
        """The evaluation that has ended since it was asked for last; the trainer is at `version` by now. Raises what it raised."""
        if self._running is None or not self._running.done():
            return None
        found, self._running = self._running.result(), None
        if found is None:
            return None
        return replace(found, metrics=found.metrics | {"eval/late": float(version - self._version)})

    async def end(self, version: int) -> Evaluation | None:
        """As `finished`, when it has ended."""
        if self._running is not None:
            await asyncio.wait({self._running})
        return self.finished(version)

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        await self.fleet.close()

    async def _evaluate(self, version: int) -> Evaluation | None:
        """None where every engine died over it: that says nothing about the model, and training need not end for it."""
        try:
            return await self._evaluator.run(self.fleet, _nobody_heals)
        except RuntimeError as error:
            if self.fleet.engine_ids:
                raise
            logger.warning("version %d is not evaluated: its engines died (%s); fresh ones are started when the next evaluation is due", version, error)
            return None

    async def _prepare(self, index: int, version: int) -> None:
        """The engine serves `version`; one that died, unnoticed while it was idle or on the way there, is replaced once."""
        if index in self.fleet.engine_ids and await self._brought(index, version):
            return
        await self.fleet.replace(index)
        if await self._brought(index, version):
            self.fleet.admit(index)

    async def _brought(self, index: int, version: int) -> bool:
        """To `version`; a fresh engine is at 0."""
        if version == 0 or (why := await self._catch_up(self._first + index)) is None:
            return True
        self.fleet.mark_dead(index, why)
        logger.warning("an engine for evaluations died before it had taken up version %d: %s", version, why)
        return False


async def _nobody_heals() -> None:
    """Weights come from the trainer, which is at work: an engine that died is replaced when the next evaluation is due."""
