"""Worker processes for reward functions that may hang: a call has a deadline, and a worker that misses it is killed and replaced."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from queue import SimpleQueue

from rollout.rewards.registry import RewardFunction
from rollout.rewards.values import Answer, Failure
from rollout.rewards.worker import READY, Call

START_TIMEOUT_S = 120.0
"""Importing the functions on a busy machine. It is no part of a call's deadline."""


class WorkerPool:
    """`size` processes and as many threads that wait for them; the event loop is never blocked. Nothing is left after `close`."""

    def __init__(self, functions: Sequence[RewardFunction], size: int) -> None:
        self._workers = [_Worker(functions) for _ in range(size)]
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            worker.start()
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="reward")

    async def call(self, message: Call, timeout_s: float) -> Answer | Failure:
        """Run a function. The deadline counts from when a worker takes the call, not the time it waits for one."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._call, message, timeout_s)

    def stop(self) -> None:
        """Kill every worker, also in the middle of a call. Calls that run or wait come back at once, as `crashed`. Idempotent."""
        for worker in self._workers:
            worker.stop()

    def close(self) -> None:
        """`stop`, and end the threads. Idempotent."""
        self.stop()
        self._threads.shutdown(wait=True)

    def _call(self, message: Call, timeout_s: float) -> Answer | Failure:
        worker = self._idle.get()
        try:
            return worker.call(message, timeout_s)
        finally:
            self._idle.put(worker)


class _Worker:
    """One process, replaced as needed. `call` runs in one thread at a time; `stop` may come from another."""

    def __init__(self, functions: Sequence[RewardFunction]) -> None:
        self._targets = [(f.target, f.args) for f in functions]
        self._lock = threading.Lock()  # held while a process begins or ends, so that none begins after `stop`
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._ready = False
        self._stopped = False

    def start(self) -> None:
        """Begin the process; `call` waits until it is ready."""
        with self._lock:
            if self._stopped:
                return
            ours, theirs = socket.socketpair()
            command = [sys.executable, "-P", "-m", "rollout.rewards.worker", str(theirs.fileno()), str(os.getpid())]
            with theirs:
                # A session of its own, so that what the function itself starts can be killed with it.
                self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=_environment(), start_new_session=True)
            self._connection = Connection(ours.detach())
            self._ready = False

    def call(self, message: Call, timeout_s: float) -> Answer | Failure:
        """The function's answer, or why there is none; after a failure of the process itself the next call gets a new one."""
        if self._connection is None:
            self.start()
        connection = self._connection
        if connection is None:
            return Failure("crashed", "the rewards were closed")
        try:
            if not self._ready and (failure := self._wait_ready(connection)) is not None:
                self._replace(connection, grace_s=0)
                return failure
            connection.send(message)
            if connection.poll(timeout_s):
                return connection.recv()
        except (EOFError, OSError):
            code = self._replace(connection, grace_s=1)
            return Failure("crashed", f"its process ended with exit code {code}")
        self._replace(connection, grace_s=0)
        return Failure("timeout", f"it did not come back within {timeout_s:g} s; its process was killed and is replaced")

    def stop(self) -> None:
        """Kill the process for good. A call that waits for it sees the end of the connection and answers `crashed`."""
        with self._lock:
            self._stopped = True
            self._kill(grace_s=0)

    def _wait_ready(self, connection: Connection) -> Failure | None:
        connection.send(self._targets)
        if not connection.poll(START_TIMEOUT_S):
            return Failure("crashed", f"its process was not ready within {START_TIMEOUT_S:g} s")
        answer = connection.recv()
        self._ready = answer == READY
        return None if self._ready else answer

    def _replace(self, connection: Connection, grace_s: float) -> int | None:
        with self._lock:
            code = self._kill(grace_s)
            self._connection = None
        connection.close()
        return code

    def _kill(self, grace_s: float) -> int | None:
        """End the process and all that it started; its exit code. One that is ending by itself gets `grace_s` to tell its own code."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=grace_s)
        with contextlib.suppress(ProcessLookupError):  # it and its children have ended already
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def _environment() -> dict[str, str]:
    """The parent's, with what it can import: a worker shall find the same modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
