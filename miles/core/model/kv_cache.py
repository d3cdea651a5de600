"""Keys and values of the tokens seen so far: one slot for each row, grown as rows need it, and attention of one new token per row.

`KVCache` attends with two batched products; `TiledKVCache` keeps keys and values in the fixed tiles of `batch_invariant`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from miles.core.model.batch_invariant import KEYS, attend_tile, check_window, queries_of, query_tiles_of
from miles.core.model.packed import PackedRows

_GROWTH = 64  # tokens; capacity is a multiple of it, and of the tile of 32 keys


class SlotCache(ABC):
    """Storage of `layers` layers for up to `max_rows` rows of up to `context` tokens; nothing is held until rows come."""

    def __init__(self, layers: int, max_rows: int, heads: int, width: int, context: int, dtype: torch.dtype, device: torch.device):
        self.heads, self.width = heads, width
        self._layers, self._max_rows, self._context = layers, max_rows, context
        self._dtype, self._device = dtype, device
        self.drop()

    def drop(self) -> None:
        """Give all memory back; every row's keys and values are lost."""
        self.rows = self.capacity = 0
        self.keys = [self._empty_keys(0, 0) for _ in range(self._layers)]
        self.values = [self._empty_values(0, 0) for _ in range(self._layers)]
        self._strips: dict[int | None, Tensor] = {}

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` slots of `length` tokens. Grows by halves, so that the copies stay rare."""
        if rows <= self.rows and length <= self.capacity:
            return
        assert rows <= self._max_rows
        assert length <= self._context
        if rows > self.rows:
            rows = min(max(rows, self.rows * 3 // 2), self._max_rows)
        if length > self.capacity:
            length = min(max(length, self.capacity * 3 // 2), self._context)
        rows, length = max(rows, self.rows), max(-(-length // _GROWTH) * _GROWTH, self.capacity)
        for layer in range(self._layers):
            self.keys[layer] = _copied_into(self._empty_keys(rows, length), self.keys[layer])
            self.values[layer] = _copied_into(self._empty_values(rows, length), self.values[layer])
        self.rows, self.capacity = rows, length
        self._strips.clear()

    def step_rows(self, positions_N: Tensor, length: int) -> StepRows:
        """The attention context of one new token in each of the slots 0 .. N-1; with it the longest row has `length` tokens."""
        return StepRows(self, positions_N, length)

    def prefill_rows(self, packed: PackedRows, slots_T: Tensor, positions_T: Tensor) -> PrefillRows:
        """The attention context of packed rows whose token t is at `positions_T[t]` of slot `slots_T[t]`."""
        return PrefillRows(self, packed, slots_T, positions_T)

    @abstractmethod
    def copy(self, source: int, slot: int, length: int) -> None:
        """Copy the first `length` tokens of slot `source` to `slot`."""

    @abstractmethod
    def write(self, layer: int, slots_T: Tensor, positions_T: Tensor, key_TGE: Tensor, value_TGE: Tensor) -> None: ...

    @abstractmethod
    def attend(self, layer: int, query_NHE: Tensor, rows: StepRows, scaling: float, window: int | None) -> Tensor:
        """Attention of one query per slot over the slot's tokens, its own included, [N, H, E]."""

    @abstractmethod
    def mask(self, positions_N: Tensor, length: int, window: int | None) -> Tensor:
        """What is added to the scores: -inf at keys that a row does not see."""

    def _mask_rows(self, positions_N: Tensor, length: int, window: int | None) -> Tensor:
        """[N * G, length]: 0 at the `window` keys up to the row's position, -inf elsewhere. Every row is a piece of one strip."""
        if window not in self._strips:
            strip = torch.full((2 * self.capacity,), -torch.inf, dtype=self._dtype, device=self._device)
            strip[max(self.capacity - (window or self.capacity), 0) : self.capacity] = 0.0
            self._strips[window] = strip
        start_B = (self.capacity - 1 - positions_N).repeat_interleave(self.heads)
        return self._strips[window].unfold(0, length, 1).index_select(0, start_B)

    @abstractmethod
    def _empty_keys(self, rows: int, length: int) -> Tensor: ...

    @abstractmethod
    def _empty_values(self, rows: int, length: int) -> Tensor: ...


class StepRows:
    """Attention context of a decoding step: writes the new token's key and value, then attends over the slot."""

    def __init__(self, cache: SlotCache, positions_N: Tensor, length: int):
        self.length = length
        self._cache = cache
        self._slots_N = torch.arange(positions_N.shape[0], device=positions_N.device)
        self._positions_N = positions_N
        self._masks: dict[int | None, Tensor] = {}

    def mask(self, window: int | None) -> Tensor:
        """Computed once for all layers with this sliding window."""
        if window not in self._masks:
            self._masks[window] = self._cache.mask(self._positions_N, self.length, window)
        return self._masks[window]

    def attend(self, layer: int, query_NHE: Tensor, key_NGE: Tensor, value_NGE: Tensor, scaling: float, dropout: float, window: int | None) -> Tensor:
        """As `PackedRows.attend`; token t is the new token of slot t."""
        self._cache.write(layer, self._slots_N, self._positions_N, key_NGE, value_NGE)
        return self._cache.attend(layer, query_NHE, self, scaling, window)


class PrefillRows:
    """Attention context of a prefill: packed attention that also writes keys and values into the slots."""

    def __init__(self, cache: SlotCache, packed: PackedRows, slots_T: Tensor, positions_T: Tensor):
        self._cache, self._packed = cache, packed
        self._slots_T, self._positions_T = slots_T, positions_T

    def attend(self, layer: int, query_THE: Tensor, key_TGE: Tensor, value_TGE: Tensor, scaling: float, dropout: float, window: int | None) -> Tensor:
        self._cache.write(layer, self._slots_T, self._positions_T, key_TGE, value_TGE)
        return self._packed.attend(layer, query_THE, key_TGE, value_TGE, scaling, dropout, window)


class KVCache(SlotCache):
    """Keys and values [slots, G, capacity, E]."""

    def copy(self, source: int, slot: int, length: int) -> None:
        for storage in (*self.keys, *self.values):
            storage[slot, :, :length] = storage[source, :, :length]

    def write(self, layer: int, slots_T: Tensor, positions_T: Tensor, key_TGE: Tensor, value_TGE: Tensor) -> None:
        self.keys[layer][slots_T, :, positions_T] = key_TGE
        self.values[layer][slots_T, :, positions_T] = value_TGE

    def attend(self, layer: int, query_NHE: Tensor, rows: StepRows, scaling: float, window: int | None) -> Tensor:
        count = query_NHE.shape[0]
        keys_BTE = self.keys[layer][:count, :, : rows.length].flatten(0, 1)
        values_BTE = self.values[layer][:count, :, : rows.length].flatten(0, 1)
        query_BRE = query_NHE.reshape(count * self.heads, -1, self.width)
        scores_BRT = torch.baddbmm(rows.mask(window), query_BRE, keys_BTE.transpose(1, 2), alpha=scaling)
        return torch.bmm(scores_BRT.softmax(-1), values_BTE).view(count, -1, self.width)

    def mask(self, positions_N: Tensor, length: int, window: int | None) -> Tensor:
        """[N * G, 1, T]."""
        return self._mask_rows(positions_N, length, window)[:, None]

    def _empty_keys(self, rows: int, length: int) -> Tensor:
        return torch.zeros(rows, self.heads, length, self.width, dtype=self._dtype, device=self._device)

    def _empty_values(self, rows: int, length: int) -> Tensor:
        return self._empty_keys(rows, length)


class TiledKVCache(SlotCache):
    """Transposed keys [tiles, slots, G, E, 32] and values [tiles, slots, G, 32, E]."""

    def copy(self, source: int, slot: int, length: int) -> None:
        for storage in (*self.keys, *self.values):
            storage[: -(-length // KEYS), slot] = storage[: -(-length // KEYS), source]

    def write(self, layer: int, slots_T: Tensor, positions_T: Tensor, key_TGE: Tensor, value_TGE: Tensor) -> None:
        tile_T, place_T = positions_T // KEYS, positions_T % KEYS
        self.keys[layer][tile_T, slots_T, :, :, place_T] = key_TGE
        self.values[layer][tile_T, slots_T, :, place_T] = value_TGE

    def attend(self, layer: int, query_NHE: Tensor, rows: StepRows, scaling: float, window: int | None) -> Tensor:
        count, heads, _ = query_NHE.shape
        tiles = -(-rows.length // KEYS)
        keys_KBET = self.keys[layer][:tiles, :count].flatten(1, 2)
        values_KBTE = self.values[layer][:tiles, :count].flatten(1, 2)
        query_SBQE = query_tiles_of(query_NHE[:, None], self.heads, scaling)
        output_SBQE = torch.stack([attend_tile(query_BQE, keys_KBET, values_KBTE, rows.mask(window)) for query_BQE in query_SBQE])
        return queries_of(output_SBQE, count, 1, heads)[:, 0]

    def mask(self, positions_N: Tensor, length: int, window: int | None) -> Tensor:
        """[K, N * G, 1, 32]."""
        check_window(window, length)
        mask_BT = self._mask_rows(positions_N, -(-length // KEYS) * KEYS, None)
        return mask_BT.unflatten(1, (-1, KEYS)).transpose(0, 1)[:, :, None]

    def _empty_keys(self, rows: int, length: int) -> Tensor:
        return torch.zeros(length // KEYS, rows, self.heads, self.width, KEYS, dtype=self._dtype, device=self._device)

    def _empty_values(self, rows: int, length: int) -> Tensor:
        return torch.zeros(length // KEYS, rows, self.heads, KEYS, self.width, dtype=self._dtype, device=self._device)


def _copied_into(new: Tensor, old: Tensor) -> Tensor:
    new[tuple(slice(0, size) for size in old.shape)] = old
    return new
