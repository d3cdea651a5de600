"""Who takes part in an update, as the driver sees them: the trainer's ranks, the engines, and the transport between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weight_sync.contracts import Manifest, WeightSyncError


class Trainer(Protocol):
    """The trainer's ranks."""

    async def run_on_ranks(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `fn(backend, rank, *args)` on every rank at once, `backend` being that rank's WeightSource; results in rank order.
        Calls are carried out one after another. `fn` is a function of a module, so that it travels by name."""
        ...


class Engines(Protocol):
    """The engines, each by a number."""

    @property
    def engine_ids(self) -> Sequence[int]:
        """Engines that are up and take part in the next update."""
        ...

    async def call(self, engine_id: int, method: str, *args: Any) -> Any:
        """Run one method of an engine (`WeightReceiver`, `pause`, `resume`); raises what it raised, or when the engine is gone."""
        ...


@dataclass(frozen=True)
class Sent:
    """What a transport sent: xxh3 of every tensor by name, or {} where none was asked for, and the bytes that left the trainer."""

    digests: dict[str, str]
    bytes: int


class Transport(Protocol):
    """Moves the bytes of one update. A new transport implements these three and gets a line in `transports/registry.py`."""

    async def setup(self, engine_ids: Sequence[int], manifest: Manifest) -> None:
        """Be ready to send `manifest` to exactly these engines, and do what needs no engine: they still generate. Called before every
        update; cheap when nothing changed."""
        ...

    async def send(self, manifest: Manifest, digests: bool) -> Sent:
        """Gather every bucket on the trainer and have every engine receive it (`weights_receive`). Raises at the first engine or rank
        that fails, without waiting for the others."""
        ...

    async def close(self) -> None:
        """End what is in flight and leave nothing behind. Called after a failed update and at the end; `setup` may follow."""
        ...


async def call_each(engines: Engines, engine_ids: Sequence[int], timeout_s: float, method: str, *args: Any) -> dict[int, Any]:
    """Call `method` on every engine at once and wait for all, each at most `timeout_s`. An engine that failed has its exception as result."""

    async def one(engine_id: int) -> Any:
        async with asyncio.timeout(timeout_s):
            return await engines.call(engine_id, method, *args)

    results = await asyncio.gather(*(one(engine_id) for engine_id in engine_ids), return_exceptions=True)
    return dict(zip(engine_ids, results, strict=True))


async def call_all(engines: Engines, engine_ids: Sequence[int], timeout_s: float, method: str, *args: Any) -> dict[int, Any]:
    """As `call_each`, but the first engine that failed is an error that names it."""
    results = await call_each(engines, engine_ids, timeout_s, method, *args)
    for engine_id, result in results.items():
        if isinstance(result, BaseException):
            raise WeightSyncError(f"engine {engine_id} failed at {method}: {reason(result)}") from result
    return results


async def call_one(engines: Engines, engine_id: int, timeout_s: float, method: str, *args: Any) -> Any:
    """One engine's answer, or an error that names it."""
    return (await call_all(engines, [engine_id], timeout_s, method, *args))[engine_id]


async def call_trainer(trainer: Trainer, timeout_s: float, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """`fn` on every rank within `timeout_s`; whatever goes wrong is a WeightSyncError that says in which function."""
    try:
        async with asyncio.timeout(timeout_s):
            return await trainer.run_on_ranks(fn, *args)
    except Exception as error:  # raised on, whatever it was, with the place it came from
        raise WeightSyncError(f"the trainer failed at {fn.__name__}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """An error in one line. Actors wrap what was raised in them: a WeightSyncError inside says it best, else the first that is no remote traceback."""
    whose: list[str] = []
    for inner in causes(error):
        if isinstance(inner, WeightSyncError):
            return " ".join(str(inner).split())
    for inner in causes(error):
        lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
        if any(line.startswith(_REMOTE) for line in lines[:2]):
            whose = whose or [line.rstrip(":") for line in lines[:1] if not line.startswith(_REMOTE)]
            last = lines[-1]
        elif isinstance(inner, TimeoutError) and not lines:
            return ": ".join([*whose, "no answer in time"])
        else:
            return ": ".join([*whose, type(inner).__name__, *lines[:2]])
    return ": ".join([*whose, last])


_REMOTE = "\x1b["
"""What Ray begins the header of a remote traceback with, a colour. Its last line is the error."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """`error` and what it came from, outermost first."""
    inner: BaseException | None = error
    while inner is not None:
        yield inner
        cause = getattr(inner, "cause", None)  # Ray's own link to the original
        inner = cause if isinstance(cause, BaseException) else inner.__cause__


async def until_first_failure(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait for all `tasks`, or raise as soon as one fails, the earlier in the sequence first. The others go on; should they fail
    later, that is taken as a consequence and not reported."""
    take_as_consequences(tasks)
    await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for error in failures(tasks):
        raise error


def failures(tasks: Sequence[asyncio.Task[Any]]) -> list[BaseException]:
    """What those of `tasks` that failed so far raised, in order."""
    return [error for task in tasks if task.done() and not task.cancelled() and (error := task.exception()) is not None]


def take_as_consequences(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Keep asyncio from reporting failures of `tasks` that nobody asks for."""
    for task in tasks:
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
