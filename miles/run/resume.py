"""Where a run begins to record: anew, or behind its last checkpoint."""

from __future__ import annotations

import logging

from miles.core.checkpoint.store import CheckpointStore

logger = logging.getLogger(__name__)


def first_step(checkpoints: CheckpointStore, resume: bool) -> int | None:
    """The first step that a resumed run records; None for a run that begins anew, which a resumed one without a checkpoint does too."""
    latest = checkpoints.latest_step() if resume else None
    if resume and latest is None:
        logger.warning("--resume: there is no complete checkpoint in %s, so the run begins anew; checkpoint.every writes some on the way", checkpoints.root)
    return None if latest is None else latest + 1
