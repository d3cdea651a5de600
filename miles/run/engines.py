"""How many engines a run has while it goes on: `miles engines` says it, the run comes to it between steps.

What is wanted stands in a file of the run folder, since nothing else is shared by the command and the run. It is for the run that is at work:
one that starts or is resumed begins with its recipe's number.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from miles.config import ConfigError
from miles.run.folder import LOCK
from rollout.actor import RolloutSpec
from rollout.fleet import Fleet

logger = logging.getLogger(__name__)

WANTED = "engines"


def ask(folder: Path, count: int) -> None:
    """Want `count` engines of the run at work in `folder`. Raises ConfigError where none is, or `count` cannot be meant."""
    if count < 1:
        raise ConfigError(f"{count} engines cannot answer anything: ask for at least 1")
    if not (folder / LOCK).is_file() or not _is_held(folder / LOCK):
        raise ConfigError(f"no run is at work in {str(folder)!r}: the number of engines to begin with is rollout.engines in its recipe")
    partial = folder / f"{WANTED}.partial"
    partial.write_text(f"{count}\n", encoding="ascii")
    os.replace(partial, folder / WANTED)


def _is_held(lock: Path) -> bool:
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class Staff:
    """Brings `fleet` to the number that is wanted.

    Args:
        spec: of engine number i. node: on which all actors must be; None: any that has room.
        catch_up: brings an engine to the current weights; what it died of, or None. The trainer must be idle.
    """

    def __init__(self, folder: Path, fleet: Fleet, spec: Callable[[int], RolloutSpec], node: str | None, catch_up: Callable[[int], Awaitable[str | None]]):
        self._file, self._fleet, self._spec, self._node, self._catch_up = folder / WANTED, fleet, spec, node, catch_up
        self._file.unlink(missing_ok=True)
        self._refused: int | None = None

    async def settle(self) -> None:
        """Begin what was asked for since, and take in and let go of whoever is ready for it. The trainer must be idle."""
        fleet = self._fleet
        wanted = int(self._file.read_text(encoding="ascii")) if self._file.is_file() else len(fleet.staying)
        while len(fleet.staying) < wanted and self._room(wanted):
            place = "DEFAULT" if self._node is None else NodeAffinitySchedulingStrategy(self._node, soft=False)
            engine_id = fleet.join(self._spec(fleet.size), place)
            logger.warning("engine %d is asked to join", engine_id)
        for engine_id in fleet.staying[wanted:]:
            fleet.leave(engine_id)
            logger.warning("engine %d is asked to leave", engine_id)
        for engine_id in fleet.arrived:
            if (why := await self._catch_up(engine_id)) is None:
                fleet.admit(engine_id)
                logger.warning("engine %d has joined", engine_id)
            else:
                fleet.leave(engine_id)
                logger.warning("engine %d does not join, it died while it took up the weights: %s", engine_id, why)
        for engine_id in fleet.part():
            logger.warning("engine %d has left", engine_id)

    def _room(self, wanted: int) -> bool:
        """Whether the cluster has what one engine more needs; said once if not."""
        spec, free = self._spec(0), ray.available_resources()
        needs = {"CPU": float(spec.rollout.threads), "GPU": float(spec.rollout.gpus_per_engine)}
        lacking = [f"{need:g} {kind}s, of which {free.get(kind, 0.0):g} are free" for kind, need in needs.items() if need > free.get(kind, 0.0)]
        if lacking and self._refused != wanted:
            cure = "a cluster that is started for a run has cluster.cpus to share out"
            logger.warning("%d engines are wanted and %d are there: one more needs %s; %s", wanted, len(self._fleet.staying), ", ".join(lacking), cure)
            self._refused = wanted
        return not lacking
