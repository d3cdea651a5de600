"""The run folder: may this run have it, and is it alone in it."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from miles.config import ConfigError
from miles.run.recipe import RunConfig

LOCK = ".lock"
"""Held for as long as a run works in its folder, and left behind: removing it would let a third run lock another file of that name."""

logger = logging.getLogger(__name__)


def check(run: RunConfig, *, resume: bool) -> None:
    """Raises ConfigError where a new run would mix with what is there, a resumed one has nothing to go on with, or nothing can be written."""
    folder = Path(run.folder)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run.folder = {run.folder!r} is a file; name a new folder")
    content = content_of(run)
    if content and not resume:
        shown = ", ".join(content[:3]) + (", ..." if len(content) > 3 else "")
        raise ConfigError(f"run.folder = {run.folder!r} is not empty (it holds {shown}): name a new folder, or go on with that run by --resume")
    if resume and not content:
        raise ConfigError(f"run.folder = {run.folder!r} holds no run to go on with: leave --resume out, or name the folder of the run")
    parent = next(p for p in [folder.absolute(), *folder.absolute().parents] if p.exists())
    if not parent.is_dir():
        raise ConfigError(f"run.folder = {run.folder!r} lies below {str(parent)!r}, which is a file; name a new folder")
    if not os.access(parent, os.W_OK):
        raise ConfigError(f"run.folder = {run.folder!r} cannot be written: you may not write to {str(parent)!r}; name another folder")


def content_of(run: RunConfig) -> list[str]:
    """Names of what a run has left in its folder."""
    folder = Path(run.folder)
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK) if folder.is_dir() else []


@contextmanager
def held(run: RunConfig) -> Iterator[Path]:
    """The run folder, made where it is missing, and held: a second run in it would overwrite this one's records and checkpoints.

    Raises:
        ConfigError: the folder cannot be made, or another run is at work in it.
    """
    folder = Path(run.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a")
    except OSError as error:
        raise ConfigError(f"run.folder = {run.folder!r} cannot be written: {error.strerror}; name another folder") from error
    with lock:  # the lock ends with the file, and so with this process, however it ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"run.folder = {run.folder!r}: another run is at work in it; wait until it has ended, or name a new folder") from None
        except OSError as error:  # network file systems without locks
            logger.warning("run.folder = %r: its file system keeps no locks (%s), so a second run in it would not be noticed", run.folder, error.strerror)
        yield folder
