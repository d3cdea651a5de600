"""A worker process: runs reward functions in its main thread, one call at a time. Started by `rollout.rewards.pool`."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection

from miles.data.types import Prompt, Sample
from rollout.rewards.registry import PREPARATIONS, import_function
from rollout.rewards.values import Failure, answered

Start = list[tuple[str, dict[str, object]]]
"""First message to a worker: module:function and arguments of each function."""
Call = tuple[int, Sample, Prompt, str, list[str] | None]
"""Later messages: index of the function, sample, prompt, text, texts of the steps for a function that takes them. The answer is an Answer
or a Failure."""
READY = "ready"


def main() -> None:
    """Arguments: the connection's file descriptor, and the parent's process id."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(descriptor, False)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    with Connection(descriptor) as connection:
        try:
            _serve(connection)
        except (EOFError, ConnectionError):
            return  # the parent closed the connection or is gone


def _serve(connection: Connection) -> None:
    start: Start = connection.recv()
    try:
        functions = [(import_function(target), args) for target, args in start]
        for target, args in start:
            if target in PREPARATIONS:
                import_function(PREPARATIONS[target])(**args)
    except ValueError as error:
        connection.send(Failure("crashed", str(error)))
        return
    connection.send(READY)
    while True:
        call: Call = connection.recv()
        index, sample, prompt, text, steps = call
        function, args = functions[index]
        given = {} if steps is None else {"steps": steps}
        try:
            answer = answered(function(sample, prompt=prompt, text=text, **given, **args), steps)
        except Exception:  # noqa: BLE001 - a user's function may raise anything; the failure is counted and carries the traceback
            answer = Failure("raised", traceback.format_exc())
        connection.send(answer)


def _end_with_parent(parent: int) -> None:
    """A function that hangs never sees the closed connection, so a killed parent is noticed here."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    main()
