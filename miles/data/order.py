"""The endless, shuffled order of a data set: position -> row, a pure function, so that one integer is the whole cursor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from miles.config import ConfigError


class EpochOrder:
    """Row of each position in an endless stream over `size` rows; every epoch (each `size` positions) holds every row once.

    Example: size 3 without shuffling gives 0 1 2 0 1 2 ...; with it, each epoch is a new permutation drawn from (seed, epoch).
    """

    def __init__(self, size: int, seed: int, shuffle: bool) -> None:
        assert size >= 1
        self.size = size
        self._seed = seed
        self._shuffle = shuffle
        # Batches and claims in flight cross an epoch's end, so two epochs are in use at once.
        self._permutation = lru_cache(maxsize=2)(self._draw)

    def __getitem__(self, position: int) -> int:
        assert position >= 0
        epoch, place = divmod(position, self.size)
        return int(self._permutation(epoch)[place]) if self._shuffle else place

    def fingerprint(self, rows: Iterable[NDArray[np.int64]]) -> str:
        """Of the order and of the token ids of its rows: two are equal where every position means the same tokens, so that a
        position kept in a checkpoint still means what it meant."""
        digest = hashlib.sha256(f"{self.size} {self._seed if self._shuffle else None}".encode())
        for row in rows:
            digest.update(len(row).to_bytes(8, "little") + row.tobytes())
        return digest.hexdigest()[:16]

    def _draw(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng([self._seed, epoch]).permutation(self.size)


def refuse_other_data(kept: str, here: str) -> None:
    """Raises ConfigError where a resumed run's data has not the fingerprint that its checkpoint has kept."""
    if kept != here:
        raise ConfigError(
            "--resume: the data or its order is not what the checkpoint's position was counted in, so the run would repeat some rows and skip others. "
            "Set the command, run.seed, batch_size, model.context, rollout.max_new_tokens, everything under data, and the files themselves back to what they "
            "were, or name a new run.folder"
        )
