"""`run.prefix_overlap` (Rollplex): the trainer computes a batch's prompts while engines still answer them.

    publish version v -> { engines: prefill and decode | trainer: prompts by reference and policy } -> answers -> optimizer -> publish v + 1

Strictly synchronous: engines and prompts read version v, and the optimizer moves the weights when no reader of it is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from miles.run import machine
from miles.run.machine import MIB
from rollout.producer import Producer
from trainer.actor import TrainerGroup
from trainer.contracts import ClaimedPrompt

T = TypeVar("T")
logger = logging.getLogger(__name__)


class PrefixOverlap:
    """Tells the trainer of every wave of prompts that engines are given.

    Args:
        samples: answers to each prompt. version: of the weights that engines and trainer have now.
    """

    def __init__(self, trainer: TrainerGroup, producer: Producer, samples: int, version: Callable[[], int]):
        self._trainer, self._producer, self._samples, self._version = trainer, producer, samples, version
        self._met = self._drawn = False
        self._announced: set[int] = set()
        self._running: list[asyncio.Task[None]] = []
        self._failure: asyncio.Future[Any] | None = None

    def submitted(self, claim_ids: Sequence[int]) -> None:
        """Engines were given these. A claim that comes again has its prompt already."""
        new = sorted(set(claim_ids) - self._announced)
        self._announced.update(new)
        prompts = [ClaimedPrompt(claim_id=c, tokens=self._producer.stream.prompt(c).tokens, count=self._samples) for c in new]
        # Ray runs a rank's calls in the order in which they are made.
        task = asyncio.ensure_future(self._trainer.prefill(prompts, set(self._producer.claims.in_flight()), self._version()))
        task.add_done_callback(self._ended)
        self._running.append(task)

    async def beside(self, taking: Coroutine[Any, Any, T]) -> T:
        """`taking`'s batch. Raises at once what the trainer raises meanwhile."""
        batch, failure = asyncio.ensure_future(taking), asyncio.get_running_loop().create_future()
        self._failure = failure
        try:
            await asyncio.wait({batch, failure}, return_when=asyncio.FIRST_COMPLETED)
            return failure.result() if failure.done() else batch.result()
        finally:
            self._failure = None
            batch.cancel()

    async def ended(self) -> None:
        """Wait for what the trainer still computes of the prompts. Afterwards nothing reads the current version but the step itself."""
        await asyncio.gather(*self._running)
        self._running.clear()
        self._announced.clear()
        self._met = True
        assert not self._producer.in_flight, f"engines answer {self._producer.in_flight} groups with version {self._version()}, which is about to end"

    async def draw_memory(self, folder: Path) -> None:
        """Write `memory.svg`, what rank 0 held and when, once a step has been made. On a CPU the budget is what the machine has free now."""
        if self._drawn or not self._met:
            return
        self._drawn = True
        from miles.run.report import memory  # matplotlib takes a second

        residency = await self._trainer.residency(machine.free_memory())
        if residency is not None:
            peak = residency.peak
            memory.draw(residency, "memory of trainer rank 0 in one step").savefig(folder / "memory.svg")
            logger.info("a trainer rank holds %.0f MiB at most, at %r: %s", residency.at(peak) / MIB, residency.moments[peak], folder / "memory.svg")

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._failure is not None and not self._failure.done() and not task.cancelled() and (error := task.exception()):
            self._failure.set_exception(error)
