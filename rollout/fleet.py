"""The fleet: rollout actors seen from the driver. It hands out waves of groups, notices the dead, and replaces them.

An engine that died is replaced by a fresh one at version 0 that takes no work until `ready` says that it holds the current weights. Engines
join and leave while a run goes on. A place keeps its number for good, and is never given to another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollout.actor import GroupResult, GroupTask, RolloutActor, RolloutSpec, actor_options

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0

WAVE_GRACE_S = 60.0
"""An actor keeps the deadline of each group itself, and some group of those it has is always at work. So one that gives no result so long
after a deadline hangs, and is taken for dead."""


Wave = list[tuple[GroupTask, "asyncio.Future[GroupResult]"]]
"""Groups that an engine was given together, each with the future that its result ends."""


@dataclass
class Member:
    """One place in the fleet and the actor that fills it now."""

    spec: RolloutSpec
    place: PlacementGroupSchedulingStrategy
    actor: Any
    ready: bool = False
    joining: asyncio.Task[None] | None = None
    """Brings a new place's engine up; until it has ended and the engine was admitted, the place is nobody's to heal."""
    leaving: bool = False
    """It answers what it has, and gets no more."""
    left: bool = False
    outstanding: dict[int, asyncio.Future[GroupResult]] = field(default_factory=dict)
    watches: dict[asyncio.Timeout, float] = field(default_factory=dict)
    """Of waves at work: how long the actor may be silent, and a group's deadline."""

    @property
    def patience_s(self) -> float:
        return max(self.watches.values()) + WAVE_GRACE_S

    def heard(self) -> None:
        """A result came, so the actor lives."""
        for watch in self.watches:
            if not watch.expired():
                watch.reschedule(asyncio.get_running_loop().time() + self.patience_s)


class Actors(Protocol):
    """Where a fleet's actors come from. What it gives is called as a Ray actor of `RolloutActor` is."""

    def spawn(self, spec: RolloutSpec, place: PlacementGroupSchedulingStrategy) -> Any: ...

    async def replace(self, actor: Any, spec: RolloutSpec, place: PlacementGroupSchedulingStrategy) -> Any:
        """A fresh one, not started, in the place of one that failed."""
        ...

    def end(self, actor: Any) -> None: ...


class OwnActors:
    """A process each."""

    def spawn(self, spec: RolloutSpec, place: PlacementGroupSchedulingStrategy) -> Any:
        return ray.remote(RolloutActor).options(scheduling_strategy=place, **actor_options(spec)).remote(spec)

    async def replace(self, actor: Any, spec: RolloutSpec, place: PlacementGroupSchedulingStrategy) -> Any:
        ray.kill(actor)
        return self.spawn(spec, place)

    def end(self, actor: Any) -> None:
        ray.kill(actor)


class Fleet:
    """All methods run on the driver's event loop."""

    def __init__(self, specs: Sequence[RolloutSpec], places: Sequence[PlacementGroupSchedulingStrategy], actors: Actors | None = None) -> None:
        self._actors = actors or OwnActors()
        self._members = [Member(spec, place, self._actors.spawn(spec, place)) for spec, place in zip(specs, places, strict=True)]
        self._waves: set[asyncio.Task[None]] = set()
        self._partings: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Bring every engine up, all at once. Raises what the first one that failed raised."""
        await asyncio.gather(*(_start(engine_id, member) for engine_id, member in enumerate(self._members)))
        for member in self._members:
            member.ready = True

    @property
    def size(self) -> int:
        """Places, whether their engines are up or not, those that were left included."""
        return len(self._members)

    @property
    def staying(self) -> list[int]:
        """Places that nobody has told to leave, whether their engines are up or not."""
        return [index for index, member in enumerate(self._members) if not member.leaving and not member.left]

    def join(self, spec: RolloutSpec, place: Any) -> int:
        """A place more, whose engine comes up beside everything else; its number. See `arrived`."""
        engine_id = len(self._members)
        member = Member(spec, place, self._actors.spawn(spec, place))
        self._members.append(member)
        member.joining = asyncio.ensure_future(_start(engine_id, member))
        return engine_id

    @property
    def arrived(self) -> list[int]:
        """Places that joined and whose engines are up, at version 0: they serve once the caller has brought them to the current weights and said
        `admit`. One that did not come up is given up here, with a warning."""
        found = []
        for engine_id, member in enumerate(self._members):
            if member.joining is None or not member.joining.done() or member.left:
                continue
            if (error := member.joining.exception()) is None:
                found.append(engine_id)
                continue
            logger.warning("engine %d does not join: %s", engine_id, error)
            self._part(member)
        return found

    def leave(self, engine_id: int) -> None:
        """It takes no more work, but part in updates for as long as it answers what it has; see `part`."""
        self._members[engine_id].leaving = True

    def part(self) -> list[int]:
        """End the engines that leave and have nothing left to answer; which."""
        gone = []
        for engine_id, member in enumerate(self._members):
            if member.leaving and not member.left and not member.outstanding:
                self._part(member)
                gone.append(engine_id)
        return gone

    def _part(self, member: Member) -> None:
        member.ready, member.left = False, True
        if member.joining is not None:
            member.joining.cancel()
        self._closing(member)

    @property
    def engine_ids(self) -> list[int]:
        """Places whose engine is up and holds the current weights."""
        return [index for index, member in enumerate(self._members) if member.ready]

    @property
    def dead_ids(self) -> list[int]:
        """Places that want a fresh engine."""
        return [index for index in self.staying if not self._members[index].ready and self._members[index].joining is None]

    async def call(self, engine_id: int, method: str, *args: Any) -> Any:
        """Run one engine method on one engine; raises what it raised, with its traceback."""
        return await self._members[engine_id].actor.call.remote(method, *args)

    def submit(self, tasks: Sequence[GroupTask], *, balanced: bool = False) -> list[asyncio.Future[GroupResult]]:
        """Start one wave. Claims are dealt out by number, so that the same claims meet the same engine in every run; `balanced`: each to
        the engine with the fewest groups at work, so that one with slow groups gets no more of them than it can do.

        Every future ends: a task whose engine dies, or no longer answers, resolves to a result of kind `engine_died`; what an actor
        raises, such as a RewardError, is raised from every future of its wave.
        """
        # Those that leave are asked once more where no other is up just now.
        ready = [engine_id for engine_id in self.engine_ids if not self._members[engine_id].leaving] or self.engine_ids
        if not ready:
            raise RuntimeError("no engine is up")
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[GroupResult]] = []
        waves: dict[int, Wave] = {}
        for task in tasks:
            idlest = min(ready, key=lambda index: len(self._members[index].outstanding))
            engine_id = idlest if balanced else ready[task.claim_id % len(ready)]
            future: asyncio.Future[GroupResult] = loop.create_future()
            self._members[engine_id].outstanding[task.claim_id] = future
            waves.setdefault(engine_id, []).append((task, future))
            futures.append(future)
        for engine_id, wave in waves.items():
            runner = asyncio.ensure_future(self._run_wave(engine_id, wave))
            self._waves.add(runner)
            runner.add_done_callback(self._waves.discard)
        return futures

    def abort(self, claim_ids: Sequence[int]) -> None:
        """Tell engines that nobody waits for these groups any more. Each still ends once: as `aborted`, or done if it was that by then."""
        for member in self._members:
            if unwanted := [claim_id for claim_id in claim_ids if claim_id in member.outstanding]:
                # Whatever comes of this call, the wave's own results say what became of the groups.
                member.actor.abort_groups.remote(unwanted)

    def mark_dead(self, engine_id: int, reason: str) -> None:
        """Take an engine out; its unfinished groups resolve as `engine_died`."""
        member = self._members[engine_id]
        if member.ready:
            logger.warning("engine %d is out: %s", engine_id, reason)
        member.ready = False
        for claim_id, future in list(member.outstanding.items()):
            _resolve(future, GroupResult(claim_id=claim_id, group=None, kind="engine_died", message=f"engine died: {reason}"))
        member.outstanding.clear()

    async def replace(self, engine_id: int) -> None:
        """Put a fresh actor in a dead one's place. It serves only after the caller has brought it to the current weights and said `admit`."""
        member = self._members[engine_id]
        member.actor = await self._actors.replace(member.actor, member.spec, member.place)
        await _start(engine_id, member)

    def admit(self, engine_id: int) -> None:
        self._members[engine_id].ready, self._members[engine_id].joining = True, None

    async def close(self) -> None:
        """End every actor and what it started. Idempotent."""
        for wave in list(self._waves):
            wave.cancel()
        there = [member for member in self._members if not member.left]
        for member in there:
            if member.joining is not None:
                member.joining.cancel()
        closing = [member.actor.close.remote() for member in there]
        ray.wait(closing, num_returns=len(closing), timeout=10.0)
        for member in there:
            self._actors.end(member.actor)
        for parting in list(self._partings):
            await asyncio.wait({parting})

    async def _run_wave(self, engine_id: int, wave: Wave) -> None:
        """Whatever happens here reaches the wave's futures: nobody else would end them, and whoever waits would wait for ever."""
        member = self._members[engine_id]
        actor = member.actor
        try:
            async with asyncio.timeout(None) as watch:
                member.watches[watch] = max(task.timeout_s for task, _ in wave)
                watch.reschedule(asyncio.get_running_loop().time() + member.patience_s)
                await self._collect(engine_id, actor, wave)
        except RayTaskError as error:
            _raise_from(member, actor, wave, error.as_instanceof_cause())
        except TimeoutError:
            self._lost(engine_id, actor, f"it has not answered within {member.patience_s:g} s")
        except RayError as error:
            self._lost(engine_id, actor, str(error).splitlines()[0])
        except Exception as error:  # noqa: BLE001 - raised from the futures, where the loop sees it
            _raise_from(member, actor, wave, error)
        finally:
            del member.watches[watch]

    async def _collect(self, engine_id: int, actor: Any, wave: Wave) -> None:
        member = self._members[engine_id]
        async for ref in actor.run_groups.options(num_returns="streaming").remote([task for task, _ in wave]):
            result: GroupResult = await ref
            if member.actor is not actor:
                return  # it was replaced, and its claims may be with its successor by now
            member.heard()
            if result.kind == "engine_died":
                self.mark_dead(engine_id, result.message)
                return
            future = member.outstanding.pop(result.claim_id, None)
            if future is not None:
                _resolve(future, result)
        # A claim may be at work again by now, in a later wave: what counts is this wave's own future.
        unanswered = [task.claim_id for task, future in wave if not future.done()]
        assert member.actor is not actor or not unanswered, f"engine {engine_id} gave no result for claims {unanswered}"

    def _closing(self, member: Member) -> None:
        """End what the actor started, then the actor; beside everything else."""

        async def end() -> None:
            with suppress(RayError, TimeoutError):
                async with asyncio.timeout(10.0):
                    await member.actor.close.remote()
            self._actors.end(member.actor)

        parting = asyncio.ensure_future(end())
        self._partings.add(parting)
        parting.add_done_callback(self._partings.discard)

    def _lost(self, engine_id: int, actor: Any, reason: str) -> None:
        """The news may be late: a successor is not to be blamed for it."""
        if self._members[engine_id].actor is actor:
            self.mark_dead(engine_id, reason)


async def _start(engine_id: int, member: Member) -> None:
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await member.actor.start.remote()
    except TimeoutError as error:
        raise RuntimeError(
            f"engine {engine_id} did not come up within {START_TIMEOUT_S:g} s: look into {member.spec.log_folder}, and whether the cluster has "
            f"{member.spec.rollout.threads} CPUs and {member.spec.rollout.gpus_per_engine:g} GPUs free for it"
        ) from error


def _raise_from(member: Member, actor: Any, wave: Wave, error: Exception) -> None:
    if member.actor is not actor:
        return
    for task, future in wave:
        if not future.done():
            member.outstanding.pop(task.claim_id, None)
            future.set_exception(error)


def _resolve(future: asyncio.Future[GroupResult], result: GroupResult) -> None:
    if not future.done():
        future.set_result(result)
