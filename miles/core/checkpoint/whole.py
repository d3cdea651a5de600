"""A folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from miles.core.checkpoint.store import PARTIAL


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
