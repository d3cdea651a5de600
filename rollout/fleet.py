"""The fleet: rollout actors seen from the driver. It hands out waves of groups, notices the dead, and replaces them.

An engine that died is replaced by a fresh one at version 0 that takes no work until `ready` says that it holds the current weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollout.actor import GroupResult, GroupTask, RolloutActor, RolloutSpec, actor_options

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0


@dataclass
class Member:
    """One place in the fleet and the actor that fills it now."""

    spec: RolloutSpec
    place: PlacementGroupSchedulingStrategy
    actor: Any
    ready: bool = False
    restarts: int = 0
    outstanding: dict[int, asyncio.Future[GroupResult]] = field(default_factory=dict)


class Fleet:
    """All methods run on the driver's event loop."""

    def __init__(self, specs: Sequence[RolloutSpec], places: Sequence[PlacementGroupSchedulingStrategy]) -> None:
        self._members = [Member(spec, place, _spawn(spec, place)) for spec, place in zip(specs, places, strict=True)]
        self._waves: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Bring every engine up, all at once. Raises what the first one that failed raised."""
        async with asyncio.timeout(START_TIMEOUT_S):
            await asyncio.gather(*(member.actor.start.remote() for member in self._members))
        for member in self._members:
            member.ready = True

    @property
    def engine_ids(self) -> list[int]:
        """Places whose engine is up and holds the current weights."""
        return [index for index, member in enumerate(self._members) if member.ready]

    @property
    def dead_ids(self) -> list[int]:
        return [index for index, member in enumerate(self._members) if not member.ready]

    async def call(self, engine_id: int, method: str, *args: Any) -> Any:
        """Run one engine method on one engine; raises what it raised, with its traceback."""
        return await self._members[engine_id].actor.call.remote(method, *args)

    def submit(self, tasks: Sequence[GroupTask]) -> list[asyncio.Future[GroupResult]]:
        """Start one wave. Claims are dealt out by number, so that the same claims meet the same engine in every run.

        A task whose engine dies resolves to a failed result with message `engine died`; a RewardError is raised from every future.
        """
        ready = self.engine_ids
        if not ready:
            raise RuntimeError("no engine is up")
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[GroupResult]] = []
        waves: dict[int, list[GroupTask]] = {}
        for task in tasks:
            engine_id = ready[task.claim_id % len(ready)]
            future: asyncio.Future[GroupResult] = loop.create_future()
            self._members[engine_id].outstanding[task.claim_id] = future
            waves.setdefault(engine_id, []).append(task)
            futures.append(future)
        for engine_id, wave in waves.items():
            runner = asyncio.ensure_future(self._run_wave(engine_id, wave))
            self._waves.add(runner)
            runner.add_done_callback(self._waves.discard)
        return futures

    def mark_dead(self, engine_id: int, reason: str) -> None:
        """Take an engine out; its unfinished groups resolve as failed."""
        member = self._members[engine_id]
        if member.ready:
            logger.warning("engine %d is out: %s", engine_id, reason)
        member.ready = False
        for claim_id, future in list(member.outstanding.items()):
            _resolve(future, GroupResult(claim_id=claim_id, group=None, kind="failed", message=f"engine died: {reason}"))
        member.outstanding.clear()

    async def replace(self, engine_id: int) -> None:
        """Put a fresh actor in a dead one's place. It serves only after the caller has brought it to the current weights and said `admit`."""
        member = self._members[engine_id]
        ray.kill(member.actor)
        member.actor = _spawn(member.spec, member.place)
        member.restarts += 1
        async with asyncio.timeout(START_TIMEOUT_S):
            await member.actor.start.remote()

    def admit(self, engine_id: int) -> None:
        self._members[engine_id].ready = True

    async def close(self) -> None:
        """End every actor and what it started. Idempotent."""
        for wave in list(self._waves):
            wave.cancel()
        closing = [member.actor.close.remote() for member in self._members]
        ray.wait(closing, num_returns=len(closing), timeout=10.0)
        for member in self._members:
            ray.kill(member.actor)

    async def _run_wave(self, engine_id: int, wave: list[GroupTask]) -> None:
        member = self._members[engine_id]
        try:
            async for ref in member.actor.run_groups.options(num_returns="streaming").remote(wave):
                result: GroupResult = await ref
                if result.kind == "engine_died":
                    self.mark_dead(engine_id, result.message)
                    return
                future = member.outstanding.pop(result.claim_id, None)
                if future is not None:
                    _resolve(future, result)
        except RayTaskError as error:
            for task in wave:
                future = member.outstanding.pop(task.claim_id, None)
                if future is not None and not future.done():
                    future.set_exception(error.as_instanceof_cause())
        except RayActorError as error:
            self.mark_dead(engine_id, str(error).splitlines()[0])


def _spawn(spec: RolloutSpec, place: PlacementGroupSchedulingStrategy) -> Any:
    return ray.remote(RolloutActor).options(scheduling_strategy=place, **actor_options(spec)).remote(spec)


def _resolve(future: asyncio.Future[GroupResult], result: GroupResult) -> None:
    if not future.done():
        future.set_result(result)
