"""Learning from a data set that is there beforehand: the one loop of `miles sft`, `miles prefer` and `miles reward`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from algorithms.preference.config import PairConfig
from miles.core.checkpoint.store import CheckpointStore
from miles.core.model.load import longest_sequence
from miles.data.types import Sample
from miles.run.clock import Clock
from miles.run.cluster import cluster
from miles.run.demands import trainer_demands
from miles.run.folder import held
from miles.run.held_out import HeldOut
from miles.run.live import Live
from miles.run.recipe import SupervisedRecipe, lora_of
from miles.run.resume import first_step, position
from miles.tracking.tracker import Tracker
from trainer.actor import TrainerGroup
from trainer.contracts import StepResult

Step = Callable[[TrainerGroup, list[Sample]], Awaitable[StepResult]]
"""A method of `TrainerGroup` that takes one optimizer step on a batch."""


class Stream(Protocol):
    """Batches without end, each a pure function of its step."""

    def batch(self, step: int, batch_size: int) -> list[Sample]: ...

    @property
    def fingerprint(self) -> str: ...


@dataclass(kw_only=True)
class SupervisedRun:
    """The parts of a run. `version` counts the steps behind the current weights; `fingerprint` is of the batches:
    a step of a checkpoint means the same batch only where it is equal."""

    recipe: SupervisedRecipe
    folder: Path
    trainer: TrainerGroup
    step: Step
    stream: Stream
    fingerprint: str
    checkpoints: CheckpointStore
    tracker: Tracker
    live: Live
    held_out: HeldOut | None = None
    version: int = 0

    async def evaluate(self) -> dict[str, float]:
        """Measures on held-out pairs, where the recipe says that it is time for them."""
        if self.held_out is None or not self.held_out.due(self.version, self.recipe.run.steps):
            return {}
        return await self.trainer.evaluate_pairs(self.held_out.samples)

    async def checkpoint(self) -> None:
        """Start writing a checkpoint when it is time and there is none of this version."""
        if self.checkpoints.due(self.version, every=self.recipe.checkpoint.every, last=self.recipe.run.steps):
            await self.trainer.save(self.checkpoints.begin(self.version), position(self.recipe, self.version) | {"stream": self.fingerprint})


async def train(run: SupervisedRun) -> None:
    """Train from `run.version` to the recipe's last step."""
    recipe, steps = run.recipe, run.recipe.run.steps
    if run.version == 0 and (at_start := await run.evaluate()):
        run.tracker.log(0, at_start)
        run.live.update(0, at_start)
    while run.version < steps:
        clock = Clock()
        with clock("checkpoint"):  # of what the last step reached, now that its record is written
            await run.checkpoint()
        batch = run.stream.batch(run.version, recipe.batch_size)
        with clock("train"):
            trained = await run.step(run.trainer, batch)
        run.version += 1
        with clock("evaluate"):
            evaluation = await run.evaluate()
        metrics = clock.metrics() | trained.metrics | evaluation | {"version/trained": float(run.version)}
        metrics["throughput/trained_tokens_per_s"] = sum(len(s.tokens) for s in batch) / metrics["seconds/train"]
        run.tracker.log(run.version, metrics)
        run.live.update(run.version, metrics)
    await run.checkpoint()
    await run.trainer.wait_saved()
    if recipe.checkpoint.export:
        await run.trainer.export(run.folder / "model")
        if lora_of(recipe) is not None:
            await run.trainer.export_adapter(run.folder / "adapter")


def supervise(
    kind: str,
    config: SupervisedRecipe,
    stream: Stream,
    step: Step,
    *,
    pairs: PairConfig | None = None,
    held_out: HeldOut | None = None,
    resume: bool = False,
) -> int:
    """Start the trainer, train by `step` on `stream`, leave nothing running. Returns the exit code.

    Args:
        kind: the command, as the progress line names it.
        pairs: the objective of a `step` on pairs. held_out: what it is measured on.
    """
    folder = Path(config.run.folder)
    checkpoints = CheckpointStore(folder / "checkpoints", keep=config.checkpoint.keep)
    fingerprint = f"{config.batch_size} x {stream.fingerprint}"
    with ExitStack() as parts:
        parts.enter_context(held(config.run))
        begin = first_step(config, checkpoints, fingerprint) if resume else None
        places = parts.enter_context(cluster(config.cluster, trainer_demands(config.trainer), one_node=False))
        tracker = parts.enter_context(Tracker(config.tracking, folder, config.model_dump(mode="json"), begin))
        live = parts.enter_context(Live(kind, config.run.steps))
        trainer = TrainerGroup(
            model=config.model,
            trainer=config.trainer,
            algorithm=None,
            checkpoint=config.checkpoint,
            temperature=1.0,
            max_new_tokens=longest_sequence(config.model),
            seed=config.run.seed,
            total_steps=config.run.steps,
            places=places.of("trainer rank"),
            pairs=pairs,
            lora=lora_of(config),
        )
        run = SupervisedRun(
            recipe=config,
            folder=folder,
            trainer=trainer,
            step=step,
            stream=stream,
            fingerprint=fingerprint,
            checkpoints=checkpoints,
            tracker=tracker,
            live=live,
            held_out=held_out,
        )
        asyncio.run(_train_and_close(run, resume))
    return 0


async def _train_and_close(run: SupervisedRun, resume: bool) -> None:
    try:
        await run.trainer.start()
        latest = run.checkpoints.latest() if resume else None
        if latest is not None:
            state = await run.trainer.load(latest)
            run.version = int(state["version"])
        await train(run)
    finally:
        await run.trainer.close()
