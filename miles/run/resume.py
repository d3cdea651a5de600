"""Where a resumed run goes on: behind its last checkpoint, on the same data, and saying what else is another than it was."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

from miles.core.checkpoint.store import CheckpointStore, read_manifest
from miles.data.order import refuse_other_data
from miles.run.recipe import RLRecipe, SupervisedRecipe
from miles.tracking.redact import redact
from miles.tracking.tracker import CONFIG_FILE

logger = logging.getLogger(__name__)

_NOTHING = "not there"


def first_step(recipe: RLRecipe | SupervisedRecipe, checkpoints: CheckpointStore, fingerprint: str) -> int | None:
    """The first step that the resumed run records; None where there is no checkpoint, so that it begins anew.

    Options that changed since the run began are named: most may change, but whoever did not mean to will want to know.

    Args:
        fingerprint: of the data and its order.
    Raises:
        ConfigError: the checkpoint's position was counted in other data.
    """
    latest = checkpoints.latest()
    if latest is None:
        logger.warning("--resume: there is no complete checkpoint in %s, so the run begins anew; checkpoint.every writes some on the way", checkpoints.root)
        return None
    manifest = read_manifest(latest)
    extra = manifest["extra"]
    refuse_other_data(extra["producer"]["stream"] if "producer" in extra else extra["stream"], fingerprint)
    kept = checkpoints.root.parent / CONFIG_FILE
    if kept.is_file():
        before, now = json.loads(kept.read_text(encoding="utf-8")), redact(recipe.model_dump(mode="json"))
        if changes := list(_changes(before, now, "")):
            logger.warning("--resume: other options than before: %s", "; ".join(changes))
    reached, steps = int(extra["version"]), recipe.run.steps
    if reached >= steps:
        logger.warning("--resume: the checkpoint is of step %d and run.steps = %d, so there is nothing left to train", reached, steps)
    return reached + 1


def _changes(before: Any, now: Any, key: str) -> Iterator[str]:
    """`trainer.lr = 0.01, was 0.1`, for every leaf that differs."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted(before.keys() | now.keys()):
            yield from _changes(before.get(name, _NOTHING), now.get(name, _NOTHING), f"{key}.{name}" if key else name)
    elif before != now:
        yield f"{key} = {now}, was {before}"
