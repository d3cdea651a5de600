"""Reinforcement learning: the one loop.

    prompts -> rollout (engines, rewards) -> buffer -> trainer -> weight_sync -> rollout

`max_staleness` is how many weight versions may pass between a group's oldest token and the update that trains on it. At 0 the loop is
synchronous and on-policy: the engines answer batch v at version v while the trainer waits. At 1 they already answer batch v+1 while
the trainer trains batch v; at k they are up to k batches ahead, and a group that grew older than k is generated again. The step that
turns version v into v+1 is recorded at v+1 on the tracker's axis; 0 is the untrained policy.

On-policy distillation is this loop too: a `DistillRecipe` brings a teacher into the trainer's step, or asks one in an engine when a batch is
taken, and may do without rewards.
"""

from __future__ import annotations

import asyncio

from miles.config import Resolved
from miles.run.assemble import RLRun, assemble
from miles.run.clock import Clock
from miles.run.preflight import check_rl
from miles.run.recipe import RLRecipe


async def train(run: RLRun) -> None:
    """Train from `run.version` to `run.steps`, then write what the recipe asks for at the end."""
    if run.version == 0:
        await run.evaluate(at_start=True)
    while run.version < run.steps:
        clock = Clock()
        with clock("checkpoint"):  # of what the last step reached, now that its record is written
            await run.checkpoint()
        batch = await run.take(clock)
        with clock("train"):
            trained = await run.trainer.step_rl(batch.groups)
        run.producer.trained(batch.groups)
        run.check_on_policy(trained)
        with clock("weight_sync"):
            published = await run.publish()
        with clock("evaluate"):
            evaluation = await run.evaluate()
        run.record(clock, batch, trained, published, evaluation)
    await run.finish()


def run(recipe: Resolved[RLRecipe], *, resume: bool = False) -> int:
    """`miles rl` and `miles distill`: check everything that can be checked, start the actors, train, leave nothing running. Returns the exit code."""
    check_rl(recipe, resume=resume)
    with assemble(recipe, resume=resume) as rl_run:
        asyncio.run(train_and_close(rl_run))
    return 0


async def train_and_close(run: RLRun) -> None:
    """Start, train, and end every part, whatever happens."""
    try:
        await run.start()
        await train(run)
    finally:
        await run.close()
