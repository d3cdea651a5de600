"""The fleet against actors that misbehave on cue: whatever an actor does, every future ends, and no successor is blamed for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ObjectLostError, RayActorError

from rollout import fleet as fleet_module
from rollout.actor import GroupResult, GroupTask
from rollout.config import RolloutConfig
from rollout.engines.contracts import SamplingParams
from rollout.fleet import Fleet
from tests.rollout.groups_for_tests import group, prompt

Script = Callable[[Sequence[GroupTask]], AsyncIterator[Awaitable[GroupResult]]]


class Actor:
    """Stands where the Ray actor would, and runs a script for a wave. Scripts need no process, so each fault comes when it is wanted."""

    def __init__(self, script: Script, starts: Callable[[], Awaitable[None]]) -> None:
        self.start = self.close = SimpleNamespace(remote=starts)
        self.run_groups = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=script))


async def at_once() -> None:
    return None


async def answers(wave: Sequence[GroupTask]) -> AsyncIterator[Awaitable[GroupResult]]:
    for task in wave:
        yield done(task)


async def done(task: GroupTask) -> GroupResult:
    return GroupResult(claim_id=task.claim_id, group=group(task.claim_id, [0]))


def raises(error: Exception) -> Script:
    async def script(wave: Sequence[GroupTask]) -> AsyncIterator[Awaitable[GroupResult]]:
        yield done(wave[0])
        raise error

    return script


async def hangs(wave: Sequence[GroupTask]) -> AsyncIterator[Awaitable[GroupResult]]:
    await asyncio.Event().wait()
    yield done(wave[0])


async def forgets(wave: Sequence[GroupTask]) -> AsyncIterator[Awaitable[GroupResult]]:
    yield done(wave[0])


@pytest.fixture
def make_fleet(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Fleet]:
    """`make_fleet(script, ...)`: a fleet of one place whose actor, and each successor, follows the next script."""

    def make(*scripts: Script, starts: Callable[[], Awaitable[None]] = at_once) -> Fleet:
        actors: Iterator[Actor] = iter([Actor(script, starts) for script in scripts])
        monkeypatch.setattr(fleet_module.OwnActors, "spawn", lambda self, spec, place: next(actors))
        monkeypatch.setattr(fleet_module.ray, "kill", lambda actor: None)
        spec: Any = SimpleNamespace(log_folder="runs/run/logs", rollout=RolloutConfig())
        return Fleet([spec], [None])  # type: ignore[list-item]

    return make


def tasks(*claim_ids: int, timeout_s: float = 30.0) -> list[GroupTask]:
    return [GroupTask(claim_id=c, prompt=prompt(c), sampling=(SamplingParams(max_new_tokens=1),), timeout_s=timeout_s) for c in claim_ids]


async def outcome(fleet: Fleet, wave: list[GroupTask]) -> list[Any]:
    async with asyncio.timeout(10):
        return await asyncio.gather(*fleet.submit(wave), return_exceptions=True)


@pytest.mark.parametrize("error", [RayActorError(), ObjectLostError("0" * 40, "127.0.0.1", "stack")], ids=["actor", "node"])
def test_groups_of_an_actor_or_node_that_died_come_back_as_such(make_fleet: Callable[..., Fleet], error: Exception) -> None:
    async def run() -> None:
        fleet = make_fleet(raises(error))
        await fleet.start()
        assert [r.kind for r in await outcome(fleet, tasks(0, 1, 2))] == ["done", "engine_died", "engine_died"]
        assert fleet.dead_ids == [0]

    asyncio.run(run())


def test_an_error_nobody_foresaw_reaches_whoever_waits(make_fleet: Callable[..., Fleet]) -> None:
    async def run() -> None:
        fleet = make_fleet(raises(ImportError("cannot unpickle")))
        await fleet.start()
        first, second = await outcome(fleet, tasks(0, 1))
        assert first.kind == "done"
        assert isinstance(second, ImportError)

    asyncio.run(run())


def test_a_claim_that_is_never_answered_is_an_error_and_no_wait(make_fleet: Callable[..., Fleet]) -> None:
    async def run() -> None:
        fleet = make_fleet(forgets)
        await fleet.start()
        _, second = await outcome(fleet, tasks(0, 1))
        assert "engine 0 gave no result for claims [1]" in str(second)

    asyncio.run(run())


def test_an_actor_that_hangs_past_its_own_deadline_is_taken_for_dead(make_fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "WAVE_GRACE_S", 0.05)

    async def run() -> None:
        fleet = make_fleet(hangs)
        await fleet.start()
        (result,) = await outcome(fleet, tasks(0, timeout_s=0.05))
        assert (result.kind, result.message) == ("engine_died", "engine died: it has not answered within 0.1 s")

    asyncio.run(run())


def test_an_actor_that_gave_a_result_may_be_silent_as_long_again(make_fleet: Callable[..., Fleet]) -> None:
    """Groups wait for their turn at an engine, so a wave may take many deadlines."""

    async def run() -> None:
        ends: list[float | None] = []

        async def looks(wave: Sequence[GroupTask]) -> AsyncIterator[Awaitable[GroupResult]]:
            for task in wave:
                ends.extend(watch.when() for watch in fleet._members[0].watches)
                yield done(task)

        fleet = make_fleet(looks)
        await fleet.start()
        await outcome(fleet, tasks(0, 1))
        first, second = ends
        assert first is not None
        assert second is not None
        assert second > first
        assert not fleet._members[0].watches

    asyncio.run(run())


def test_late_news_of_an_old_actors_death_does_not_take_out_its_successor(make_fleet: Callable[..., Fleet]) -> None:
    async def run() -> None:
        news = asyncio.Event()

        async def dies_late(wave: Sequence[GroupTask]) -> AsyncIterator[Awaitable[GroupResult]]:
            await news.wait()
            yield done(wave[0])
            raise RayActorError

        fleet = make_fleet(dies_late, answers)
        await fleet.start()
        old = fleet.submit(tasks(0))
        await asyncio.sleep(0)
        fleet.mark_dead(0, "it did not commit")
        await fleet.replace(0)
        fleet.admit(0)
        new = fleet.submit(tasks(0))
        news.set()
        async with asyncio.timeout(10):
            assert [(await f).kind for f in (*old, *new)] == ["engine_died", "done"]
        await asyncio.sleep(0.01)
        assert fleet.engine_ids == [0]

    asyncio.run(run())


def test_an_engine_that_does_not_come_up_is_named_with_where_to_look(make_fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "START_TIMEOUT_S", 0.05)

    async def never() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match=r"engine 0 did not come up within 0\.05 s: look into runs/run/logs"):
        asyncio.run(make_fleet(answers, starts=never).start())


async def joined(fleet: Fleet) -> None:
    """A second engine, at work."""
    await fleet.start()
    fleet.join(another(), None)
    await asyncio.sleep(0)
    assert fleet.arrived == [1]
    fleet.admit(1)


def another() -> Any:
    return SimpleNamespace(log_folder="runs/run/logs", rollout=RolloutConfig())


def test_an_engine_that_joined_works_once_it_was_admitted(make_fleet: Callable[..., Fleet]) -> None:
    async def run() -> None:
        fleet = make_fleet(answers, answers)
        await fleet.start()
        number = fleet.join(another(), None)
        assert (number, fleet.arrived, fleet.engine_ids, fleet.dead_ids) == (1, [], [0], [])
        await asyncio.sleep(0)
        assert fleet.arrived == [1]
        assert fleet.engine_ids == [0], "it has the weights of version 0"
        fleet.admit(1)
        assert (fleet.arrived, fleet.engine_ids, fleet.staying) == ([], [0, 1], [0, 1])
        assert [r.kind for r in await outcome(fleet, tasks(0, 1, 2, 3))] == ["done"] * 4

    asyncio.run(run())


def test_one_that_does_not_come_up_is_given_up_and_healed_by_nobody(make_fleet: Callable[..., Fleet], caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        fleet = make_fleet(answers)
        await fleet.start()

        async def never() -> None:
            raise RayActorError

        fleet._actors = SimpleNamespace(spawn=lambda spec, place: Actor(answers, never), end=lambda actor: None)  # type: ignore[assignment]
        fleet.join(another(), None)
        await asyncio.sleep(0)
        assert (fleet.arrived, fleet.dead_ids, fleet.engine_ids, fleet.staying) == ([], [], [0], [0])
        assert "engine 1 does not join" in caplog.text

    asyncio.run(run())


def test_an_engine_that_leaves_answers_what_it_has_and_takes_part_in_updates_until_then(make_fleet: Callable[..., Fleet]) -> None:
    async def run() -> None:
        go_on = asyncio.Event()

        async def waits(wave: Sequence[GroupTask]) -> AsyncIterator[Awaitable[GroupResult]]:
            await go_on.wait()
            for task in wave:
                yield done(task)

        fleet = make_fleet(answers, waits)
        await joined(fleet)
        running = asyncio.ensure_future(outcome(fleet, tasks(1)))
        await asyncio.sleep(0)
        fleet.leave(1)
        assert (fleet.part(), fleet.engine_ids, fleet.staying) == ([], [0, 1], [0])
        assert [r.kind for r in await outcome(fleet, tasks(3, 5))] == ["done", "done"], "engine 0 has them, engine 1 would not answer"
        go_on.set()
        assert [r.kind for r in await running] == ["done"]
        assert (fleet.part(), fleet.engine_ids, fleet.dead_ids) == ([1], [0], [])

    asyncio.run(run())


def test_an_engine_that_dies_while_it_leaves_is_not_replaced(make_fleet: Callable[..., Fleet]) -> None:
    async def run() -> None:
        fleet = make_fleet(answers, hangs)
        await joined(fleet)
        running = asyncio.ensure_future(outcome(fleet, tasks(1)))
        await asyncio.sleep(0)
        fleet.leave(1)
        fleet.mark_dead(1, "killed")
        assert [r.kind for r in await running] == ["engine_died"]
        assert fleet.dead_ids == []
        assert fleet.part() == [1]

    asyncio.run(run())
