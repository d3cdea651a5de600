"""Ranks that stay up for a whole test session: real processes joined by gloo, which run functions of test modules in step."""

from __future__ import annotations

import shutil
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.forks import CONTEXT

DEADLINE_S = 90.0


class Pool:
    """`world` processes; `run(function, *args)` calls `function(rank, world, *args)` in each and returns the results by rank."""

    def __init__(self, world: int):
        self.world = world
        self._folder = Path(tempfile.mkdtemp(prefix="miles-pool-"))
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(rank, world, str(self._folder / "store"), theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, args))
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(DEADLINE_S):
                self.close()
                raise TimeoutError(f"rank {rank} did not answer {function.__name__} within {DEADLINE_S:g} s")
            results.append(pipe.recv())
        for rank, (ok, value) in enumerate(results):
            if not ok:
                raise RuntimeError(f"rank {rank}:\n{value}")
        return [value for _, value in results]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        shutil.rmtree(self._folder, ignore_errors=True)  # a pool that ran into its deadline is closed twice


def _serve(rank: int, world: int, rendezvous: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(rendezvous, world), rank=rank, world_size=world)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(rank, world, *args)))
        except Exception:  # noqa: BLE001 - the parent raises it
            pipe.send((False, traceback.format_exc()))
