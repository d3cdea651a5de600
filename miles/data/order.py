"""The endless, shuffled order of a data set: position -> row, a pure function, so that one integer is the whole cursor."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


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

    def _draw(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng([self._seed, epoch]).permutation(self.size)
