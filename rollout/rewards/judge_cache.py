"""A judge's verdicts on disk, one small file each, named by the content of the request."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

logger = logging.getLogger(__name__)

_FAILING: set[Path] = set()
"""Folders of which that has been said."""
_LOCKS: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()


class JudgeCache:
    """Several processes may share a folder: files appear whole, and whoever writes a name last wrote the same kind of verdict."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    @staticmethod
    def name(url: str, request: dict[str, Any]) -> str:
        """SHA-256 of everything that decides the verdict, in hex. The key that was sent is no part of it."""
        return hashlib.sha256(json.dumps([url, request], sort_keys=True).encode()).hexdigest()

    def lock(self, name: str) -> asyncio.Lock:
        """Held while `name` is asked for: equal responses of one group wait for the first verdict, and the judge is asked once."""
        return _LOCKS.setdefault((str(self._folder), name), asyncio.Lock())

    def get(self, name: str) -> str | None:
        """The words that were kept, or None."""
        try:
            return self._path(name).read_text(encoding="utf-8", errors="surrogatepass")
        except OSError:  # not there; what keeps others from being read is said when this one cannot be kept
            return None

    def put(self, name: str, words: str) -> None:
        """Keep `words`; they are on disk whole or not at all. Where there is no room, say, they are not: the verdict itself is none the worse."""
        path = self._path(name)
        part = path.with_name(f".{uuid.uuid4().hex}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(words, encoding="utf-8", errors="surrogatepass")
            os.replace(part, path)
        except OSError as error:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            if self._folder not in _FAILING:
                logger.warning("judge: verdicts are not kept in %s: %s; those that are judged again are asked for again", self._folder, error)
            _FAILING.add(self._folder)
        else:
            _FAILING.discard(self._folder)

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / f"{name}.txt"
