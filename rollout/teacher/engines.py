"""The teacher's engines seen from the driver: it shares out what is to be scored, and starts an engine again that died over it.

A teacher never changes, so a fresh engine can answer what the dead one was asked, and nothing is lost but time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollout.engines.contracts import EngineError
from rollout.engines.scoring import Scored, ScoreRequest
from rollout.teacher.actor import TeacherActor, TeacherSpec, actor_options

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
ATTEMPTS = 3
PART = 64
"""Sequences of one call: enough for an engine to batch, and few to ask again."""


class TeacherEngines:
    """A `ScoringEngine` made of several. All methods run on the driver's event loop."""

    def __init__(self, spec: TeacherSpec, places: Sequence[PlacementGroupSchedulingStrategy]) -> None:
        self._spec, self._places = spec, places
        self._actors = [self._spawn(place) for place in places]

    async def start(self) -> None:
        await asyncio.gather(*(self._started(actor) for actor in self._actors))

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Scored]:
        """See `ScoringEngine.score`.

        Raises:
            EngineError: engines died over the same sequences ATTEMPTS times in a row.
        """
        parts = [list(requests[start : start + PART]) for start in range(0, len(requests), PART)]
        answers: dict[int, list[Scored]] = {}
        for attempt in range(1, ATTEMPTS + 1):
            missing = [number for number in range(len(parts)) if number not in answers]
            outcomes = await asyncio.gather(*(self._ask(number % len(self._actors), parts[number]) for number in missing))
            dead = {}
            for number, outcome in zip(missing, outcomes, strict=True):
                if isinstance(outcome, str):
                    dead[number % len(self._actors)] = outcome
                else:
                    answers[number] = outcome
            if not dead:
                return [scored for number in range(len(parts)) for scored in answers[number]]
            why = next(iter(dead.values()))
            if attempt == ATTEMPTS:
                raise EngineError(f"the teacher's engine died {ATTEMPTS} times in a row over the same {len(missing)} parts of a batch, the last time by: {why}")
            logger.warning("teacher engine %s is out and started again: %s", ", ".join(map(str, dead)), why)
            await asyncio.gather(*(self._replace(index) for index in dead))
        raise AssertionError("at least one attempt")

    async def close(self) -> None:
        """End every actor and what it started. Idempotent."""
        actors, self._actors = self._actors, []
        closing = [actor.close.remote() for actor in actors]
        if closing:
            await asyncio.to_thread(ray.wait, closing, num_returns=len(closing), timeout=10.0)
        for actor in actors:
            ray.kill(actor)

    async def _ask(self, index: int, part: list[ScoreRequest]) -> list[Scored] | str:
        """The answer, or what the engine died of. Raises what it refused the part for."""
        try:
            async with asyncio.timeout(self._spec.engine.timeout_s):
                answer: list[Scored] = await self._actors[index].score.remote(part)
                return answer
        except TimeoutError:
            return f"it has not answered within {self._spec.engine.timeout_s:g} s"
        except RayTaskError as error:
            cause = error.as_instanceof_cause()
            if isinstance(cause, EngineError):
                return str(cause)
            raise cause from error
        except RayError as error:
            return str(error).splitlines()[0]

    async def _replace(self, index: int) -> None:
        ray.kill(self._actors[index])
        self._actors[index] = self._spawn(self._places[index])
        await self._started(self._actors[index])

    async def _started(self, actor: Any) -> None:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await actor.start.remote()
        except TimeoutError as error:
            raise RuntimeError(f"the teacher's engine did not come up within {START_TIMEOUT_S:g} s: look into {self._spec.log_folder}") from error

    def _spawn(self, place: PlacementGroupSchedulingStrategy) -> Any:
        return ray.remote(TeacherActor).options(scheduling_strategy=place, **actor_options(self._spec)).remote(self._spec)
