"""Bytes that autograd holds, each storage once, now and at most."""

from __future__ import annotations

from collections import Counter

from torch import Tensor


class Ledger:
    """Attributes:
    now, peak: bytes of the storages that somebody holds, and the most there were since `reset`.
    """

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._holders: Counter[int] = Counter()

    def reset(self) -> None:
        """The peak begins anew at what is held now."""
        self.peak = self.now

    def touch(self, size: int) -> None:
        """So many bytes exist for a moment beside what is held."""
        self.peak = max(self.peak, self.now + size)

    def enter(self, key: int, size: int) -> None:
        self._holders[key] += 1
        if self._holders[key] == 1:
            self.now += size
            self.touch(0)

    def leave(self, key: int, size: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.now -= size


class Held:
    """A tensor that counts until this object is let go."""

    __slots__ = ("_key", "_ledger", "_size", "tensor")

    def __init__(self, ledger: Ledger, tensor: Tensor):
        storage = tensor.untyped_storage()
        self.tensor, self._ledger = tensor, ledger
        self._key, self._size = storage._cdata, storage.nbytes()
        ledger.enter(self._key, self._size)

    def __del__(self) -> None:
        self._ledger.leave(self._key, self._size)
