from __future__ import annotations

import time
from multiprocessing.connection import Connection

from tests.forks import CONTEXT
from weight_sync.transports.p2p import Agent


def waiting(pipe: Connection) -> None:
    agent = Agent(loopback=True)
    before = time.process_time()
    time.sleep(1)
    pipe.send((agent.nixl.name, time.process_time() - before))


def test_an_agent_that_waits_for_peers_does_not_take_a_core() -> None:
    """CPU-seconds of the whole process in one second in which nobody asks: a thread that polls without waiting takes all of it."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=waiting, args=(theirs,))
    process.start()
    assert ours.poll(60)
    _, used = ours.recv()
    process.join()
    assert used < 0.3
