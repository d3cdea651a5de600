"""Several tenants in one run: the loop of `miles.run.rl` for each, side by side, on one set of engines and trainer ranks with one base model.

A tenant has adapters, optimizer, data, rewards, weight versions, checkpoints and records of its own, as if it were alone, and what it trains is
what it would train alone, bit for bit on torch engines at `max_staleness` 0. One that fails ends; the others go on.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack

from miles.config import Resolved
from miles.run.assemble import RLRun, Shared, assemble, placed
from miles.run.preflight import check_rl
from miles.run.recipe import RLRecipe
from miles.run.rl import train_and_close
from rollout.tenants import Hosts
from trainer.actor import TrainerRanks

logger = logging.getLogger(__name__)


class TenantsFailed(RuntimeError):
    """Of some tenants, after the others have ended. Its cause is what the first of them died of."""


def run(recipe: Resolved[RLRecipe], *, resume: bool = False) -> int:
    """`miles rl` with `[tenants]`. Returns the exit code.

    Raises:
        ConfigError: something is wrong with the recipe or a tenant's data, before anything starts.
        TenantsFailed: one or more tenants did not reach their last step; all others did.
    """
    check_rl(recipe, resume=resume)
    with ExitStack() as parts:
        places = parts.enter_context(placed(recipe.config))
        ranks = TrainerRanks(recipe.config.trainer, places.of("trainer rank"))
        parts.callback(ranks.close)
        hosts = Hosts()
        parts.callback(hosts.close)
        runs = {}
        for name, config in recipe.config.of_tenants().items():
            shared = Shared(tenant=name, places=places, ranks=ranks, engines=hosts.of(name))
            runs[name] = parts.enter_context(assemble(Resolved(config, recipe.origins), resume=resume, shared=shared))
        asyncio.run(_side_by_side(runs))
    return 0


async def _side_by_side(runs: dict[str, RLRun]) -> None:
    failed = dict(zip(runs, await asyncio.gather(*(_one(name, run) for name, run in runs.items())), strict=True))
    failed = {name: error for name, error in failed.items() if error is not None}
    if failed:
        first = next(iter(failed.values()))
        raise TenantsFailed(f"{len(failed)} of {len(runs)} tenants failed, the others are done: " + ", ".join(failed)) from first


async def _one(name: str, run: RLRun) -> Exception | None:
    """What the tenant died of, or None."""
    try:
        await train_and_close(run)
    except Exception as error:  # noqa: BLE001 - said now, and raised when the others have ended
        logger.error("tenant %s failed, the others go on: %s: %s", name, type(error).__name__, error)
        return error
    return None
