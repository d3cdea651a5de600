"""Supervised fine-tuning: batches of conversations, one optimizer step each."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from miles.config import Resolved
from miles.core.checkpoint.store import CheckpointStore
from miles.core.model.load import longest_sequence, tokenizer_of
from miles.data.order import refuse_other_data
from miles.data.sft import SFTDataset, SFTStream
from miles.run.clock import Clock
from miles.run.cluster import cluster, trainer_demands
from miles.run.live import Live
from miles.run.preflight import check_sft
from miles.run.recipe import SFTRecipe
from miles.run.resume import first_step
from miles.tracking.tracker import Tracker
from trainer.actor import TrainerGroup


@dataclass(kw_only=True)
class SFTRun:
    """The parts of a run. `version` counts the steps behind the current weights."""

    recipe: SFTRecipe
    folder: Path
    trainer: TrainerGroup
    stream: SFTStream
    checkpoints: CheckpointStore
    tracker: Tracker
    live: Live
    version: int = 0

    @property
    def fingerprint(self) -> str:
        """Of the batches: a step of a checkpoint means the same batch only where it is equal."""
        return f"{self.recipe.batch_size} x {self.stream.fingerprint}"

    async def checkpoint(self) -> None:
        """Start writing a checkpoint when it is time and there is none of this version."""
        if self.checkpoints.due(self.version, every=self.recipe.checkpoint.every, last=self.recipe.run.steps):
            await self.trainer.save(self.checkpoints.begin(self.version), {"version": self.version, "stream": self.fingerprint})


async def train(run: SFTRun) -> None:
    """Train from `run.version` to the recipe's last step."""
    recipe, steps = run.recipe, run.recipe.run.steps
    while run.version < steps:
        clock = Clock()
        with clock("checkpoint"):  # of what the last step reached, now that its record is written
            await run.checkpoint()
        batch = run.stream.batch(run.version, recipe.batch_size)
        with clock("train"):
            trained = await run.trainer.step_sft(batch)
        run.version += 1
        metrics = clock.metrics() | trained.metrics | {"version/trained": float(run.version)}
        metrics["throughput/trained_tokens_per_s"] = sum(len(s.tokens) for s in batch) / metrics["seconds/train"]
        run.tracker.log(run.version, metrics)
        run.live.update(run.version, metrics)
    await run.checkpoint()
    await run.trainer.wait_saved()
    if recipe.checkpoint.export:
        await run.trainer.export(run.folder / "model")


def run(recipe: Resolved[SFTRecipe], *, resume: bool = False) -> int:
    """`miles sft`: check, read the data, start the trainer, train, leave nothing running. Returns the exit code."""
    config = recipe.config
    check_sft(recipe, resume=resume)
    folder = Path(config.run.folder)
    limit = longest_sequence(config.model)
    stream = SFTStream(SFTDataset.load(config.data, tokenizer_of(config.model), limit), config.run.seed)
    checkpoints = CheckpointStore(folder / "checkpoints", keep=config.checkpoint.keep)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        cluster(config.cluster, trainer_demands(config.trainer), one_node=False) as places,
        Tracker(config.tracking, folder, config.model_dump(mode="json"), first_step(checkpoints, resume)) as tracker,
        Live("sft", config.run.steps) as live,
    ):
        trainer = TrainerGroup(
            model=config.model,
            trainer=config.trainer,
            algorithm=None,
            checkpoint=config.checkpoint,
            temperature=1.0,
            max_new_tokens=limit,
            seed=config.run.seed,
            total_steps=config.run.steps,
            places=places.of("trainer rank"),
        )
        sft = SFTRun(recipe=config, folder=folder, trainer=trainer, stream=stream, checkpoints=checkpoints, tracker=tracker, live=live)
        asyncio.run(_train_and_close(sft, resume))
    return 0


async def _train_and_close(run: SFTRun, resume: bool) -> None:
    try:
        await run.trainer.start()
        latest = run.checkpoints.latest() if resume else None
        if latest is not None:
            state = await run.trainer.load(latest)
            refuse_other_data(state["stream"], run.fingerprint)
            run.version = int(state["version"])
        await train(run)
    finally:
        await run.trainer.close()
