"""Real processes for weight-sync tests: trainer ranks on gloo and engines, each behind a socket, that can be told to fail or to die."""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from tests.forks import CONTEXT

DEADLINE_S = 60.0

# The default executor of two cores has six threads; calls to a hung engine would use them up.
THREADS = ThreadPoolExecutor(64)


class Process:
    """A process that holds `factory(*args)` and answers `call(method, ...)`, from several callers at once."""

    def __init__(self, factory: Callable[..., Any], *args: Any) -> None:
        self.address = str(Path(tempfile.mkdtemp(prefix="miles-test-")) / "socket")
        self._process = CONTEXT.Process(target=_serve, args=(self.address, factory, args), daemon=True)
        self._process.start()

    def call(self, method: str, *args: Any) -> Any:
        return remote_call(self.address, method, *args)

    def arm(self, method: str, how: str, nth: int = 1) -> None:
        """At the `nth` next call of `method`: `raise`, `kill` (SIGKILL) or `hang`."""
        self.call("__arm__", method, how, nth)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(DEADLINE_S)
        shutil.rmtree(Path(self.address).parent, ignore_errors=True)

    @property
    def alive(self) -> bool:
        """Whether it answers. A killed process closes its files one by one, so its socket may refuse before multiprocessing hears of its end."""
        if self._process.is_alive() and _listens(self.address):
            return True
        self._process.join(DEADLINE_S)
        return False


def _listens(address: str) -> bool:
    with socket.socket(socket.AF_UNIX) as caller:
        try:
            caller.connect(address)
        except ConnectionRefusedError:
            return False
        except FileNotFoundError:  # still starting
            return True
    return True


def remote_call(address: str, method: str, *args: Any) -> Any:
    """One call over a connection of its own; raises what the method raised, ConnectionError when the process is gone."""
    end = time.monotonic() + DEADLINE_S
    while True:
        try:
            connection = Client(address, "AF_UNIX")
            break
        except FileNotFoundError:  # the process is still starting
            if time.monotonic() > end:
                raise
            time.sleep(0.01)
    with connection:
        connection.send((method, args))
        if not connection.poll(DEADLINE_S):
            raise TimeoutError(f"{method} did not answer")
        try:
            ok, result = connection.recv()
        except EOFError as error:
            raise ConnectionError("the process died") from error
    if ok:
        return result
    raise result


class EngineProcesses:
    """The `Engines` of weight_sync over engine processes or their addresses."""

    def __init__(self, processes: dict[int, Process] | dict[int, str]) -> None:
        self.processes: dict[int, Any] = dict(processes)

    @property
    def engine_ids(self) -> Sequence[int]:
        return sorted(self.processes)

    async def call(self, engine_id: int, method: str, *args: Any) -> Any:
        process = self.processes[engine_id]
        address = process if isinstance(process, str) else process.address
        return await asyncio.get_running_loop().run_in_executor(THREADS, remote_call, address, method, *args)


class TrainerProcesses:
    """The `Trainer` of weight_sync over rank processes or their addresses."""

    def __init__(self, processes: Sequence[Process] | Sequence[str]) -> None:
        self.processes: list[Any] = list(processes)

    async def run_on_ranks(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        addresses = [p if isinstance(p, str) else p.address for p in self.processes]
        loop = asyncio.get_running_loop()
        return list(await asyncio.gather(*(loop.run_in_executor(THREADS, remote_call, a, "run", fn, *args) for a in addresses)))


def _serve(address: str, factory: Callable[..., Any], args: tuple[Any, ...]) -> None:
    # Renamed once it listens: before that a caller would be refused, which must mean that the process is dead.
    listener = Listener(address + ".new", "AF_UNIX", backlog=64)
    os.rename(address + ".new", address)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    target = factory(*args)
    armed: dict[str, tuple[str, int]] = {}
    while True:
        threading.Thread(target=_answer, args=(listener.accept(), target, loop, armed), daemon=True).start()


def _answer(connection: Connection, target: Any, loop: asyncio.AbstractEventLoop, armed: dict[str, tuple[str, int]]) -> None:
    with connection:
        try:
            method, args = connection.recv()
        except EOFError:  # one that only asked whether somebody listens
            return
        try:
            if method == "__arm__":
                armed[args[0]] = args[1:]
                result = None
            else:
                _fail_if_armed(method, armed)
                result = getattr(target, method)(*args)
                if inspect.isawaitable(result):
                    result = asyncio.run_coroutine_threadsafe(_wait_for(result), loop).result()
        except Exception as error:  # noqa: BLE001 (the caller gets it)
            connection.send((False, error))
        else:
            connection.send((True, result))


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


def _fail_if_armed(method: str, armed: dict[str, tuple[str, int]]) -> None:
    how, nth = armed.get(method, ("", 0))
    if nth > 1:
        armed[method] = (how, nth - 1)
        return
    armed.pop(method, None)
    if how == "raise":
        raise RuntimeError(f"injected at {method}")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        threading.Event().wait(DEADLINE_S)
