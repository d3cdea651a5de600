"""A folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from miles.core.checkpoint.store import PARTIAL


def check_new(folder: Path) -> None:
    """Raises ValueError where there is something at `folder` already, a link that leads nowhere included, or no folder can be made."""
    if folder.exists() or folder.is_symlink():
        raise ValueError(f"{str(folder)!r} is there already: name another target, or remove it first")
    parent = next(p for p in folder.absolute().parents if p.exists())
    if not parent.is_dir():
        raise ValueError(f"{str(folder)!r} lies below {str(parent)!r}, which is a file: name another target")
    if not os.access(parent, os.W_OK):
        raise ValueError(f"{str(folder)!r} cannot be written: you may not write to {str(parent)!r}; name another target")


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """An empty folder to write into. When the block ends it takes the place of `folder`, and of what was there.

    A block that raises, or whose process is killed, leaves `folder` as it was; what it wrote stays beside it, and the next one removes it.
    """
    partial = folder.with_name(folder.name + PARTIAL)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    yield partial
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(partial, folder)
