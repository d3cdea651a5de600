"""The rows that a torch engine decodes together. Each call to `step` gives every row one token; a finished row frees its slot at once.

Rows fill slots 0 .. n-1. When one ends, the last row moves into its slot, so that no step computes anything for nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from miles.core.model.decode import Decoder
from rollout.engines.contracts import Generation, Request
from rollout.engines.sampling import RowParams, choose, key_of, uniforms

Finish = Literal["stop", "length", "abort"]
_GROWTH = 256  # tokens


@dataclass(eq=False)
class Row:
    """A request, and who waits for its result. Both functions are called in the decoding thread."""

    request: Request
    deliver: Callable[[Generation], None]
    fail: Callable[[Exception], None]


class RunningBatch:
    """Up to `max_rows` rows on a decoder. Not thread-safe: it belongs to the engine's decoding thread."""

    def __init__(self, decoder: Decoder, max_rows: int):
        self._decoder = decoder
        self._max_rows = max_rows
        self.rows: list[Row] = []
        self._sampling: RowParams | None = None
        # One entry per slot. `cold`: keys and values are yet to be computed. `last`: the place in the response that ends it.
        self._slots: dict[str, NDArray[Any]] = {
            "cold": np.zeros(max_rows, np.bool_),
            "input": np.zeros(max_rows, np.int64),
            "position": np.zeros(max_rows, np.int64),
            "place": np.zeros(max_rows, np.int64),
            "last": np.zeros(max_rows, np.int64),
            "made": np.zeros(max_rows, np.int64),
            "key": np.zeros(max_rows, np.uint64),
            "stops": np.full((max_rows, 1), -1, np.int64),
            "tokens": np.zeros((max_rows, _GROWTH), np.int64),
            "logprobs": np.zeros((max_rows, _GROWTH), np.float32),
            "versions": np.zeros((max_rows, _GROWTH), np.int32),
        }

    @property
    def free(self) -> int:
        return self._max_rows - len(self.rows)

    def admit(self, row: Row) -> None:
        """Put a row into the next slot; its prompt is computed in the next step, together with others."""
        slot, request = len(self.rows), row.request
        assert slot < self._max_rows
        self.rows.append(row)
        tokens = np.concatenate([request.prompt, request.generated])
        room = self._decoder.context - len(request.prompt)
        self._widen("stops", len(request.sampling.stop_token_ids), -1)
        values = {
            "cold": True,
            "input": tokens[-1],
            "position": len(tokens) - 1,
            "place": len(request.generated),
            "last": min(request.sampling.max_new_tokens, room) - 1,
            "made": 0,
            "key": key_of(request.sampling.seed),
            "stops": -1,
        }
        for name, value in values.items():
            self._slots[name][slot] = value
        self._slots["stops"][slot, : len(request.sampling.stop_token_ids)] = request.sampling.stop_token_ids
        self._sampling = None

    def step(self, version: int) -> list[tuple[Row, Generation]]:
        """One token for every row; returns the rows that it ended, in the order of their slots.

        Raises:
            ValueError: the model's logits are not finite.
        """
        count = len(self.rows)
        self._prefill()
        slots = {name: values[:count] for name, values in self._slots.items()}
        logits_NV = self._decoder.step(torch.from_numpy(slots["input"]), torch.from_numpy(slots["position"]))
        draws_N = torch.from_numpy(uniforms(slots["key"], slots["place"]))
        tokens_N, logprobs_N = (x.numpy() for x in choose(logits_NV, self._row_params(), draws_N, self._decoder.exact))
        self._record(tokens_N, logprobs_N, version)
        stopped_N = (tokens_N[:, None] == slots["stops"]).any(1)
        ended_N = stopped_N | (slots["place"] > slots["last"])
        if not ended_N.any():
            return []
        ended: list[tuple[int, Finish]] = [(slot, "stop" if stopped_N[slot] else "length") for slot in np.flatnonzero(ended_N).tolist()]
        finished = [(self.rows[slot], self._generation(slot, finish)) for slot, finish in ended]
        for slot, _ in reversed(ended):
            self._free(slot)
        return finished

    def remove(self, row: Row) -> Generation:
        """End a row with what it has."""
        slot = self.rows.index(row)
        generation = self._generation(slot, "abort")
        self._free(slot)
        return generation

    def retract(self) -> None:
        """Drop all keys and values; they are computed again, with the weights of then, before the next token."""
        self._decoder.cache.drop()
        self._slots["cold"][:] = True

    def _prefill(self) -> None:
        cold = np.flatnonzero(self._slots["cold"][: len(self.rows)]).tolist()
        if cold:
            self._decoder.prefill([torch.from_numpy(self._sequence(slot)[:-1]) for slot in cold], cold)
            self._slots["cold"][cold] = False

    def _sequence(self, slot: int) -> NDArray[np.int64]:
        row, made = self.rows[slot], self._slots["made"][slot]
        return np.concatenate([row.request.prompt, row.request.generated, self._slots["tokens"][slot, :made]])

    def _row_params(self) -> RowParams:
        if self._sampling is None:
            asked = [row.request.sampling for row in self.rows]
            self._sampling = RowParams.of(
                np.array([s.temperature for s in asked], np.float64),
                np.array([s.top_k for s in asked], np.int64),
                np.array([s.top_p for s in asked], np.float64),
            )
        return self._sampling

    def _record(self, tokens_N: NDArray[np.int64], logprobs_N: NDArray[np.float32], version: int) -> None:
        count = len(tokens_N)
        made_N = self._slots["made"][:count]
        width = int(made_N.max()) + 1
        for name in ("tokens", "logprobs", "versions"):
            self._widen(name, width, 0)
        rows_N = np.arange(count)
        self._slots["tokens"][rows_N, made_N] = tokens_N
        self._slots["logprobs"][rows_N, made_N] = logprobs_N
        self._slots["versions"][rows_N, made_N] = version
        self._slots["input"][:count] = tokens_N
        for name in ("made", "position", "place"):
            self._slots[name][:count] += 1

    def _generation(self, slot: int, finish: Finish) -> Generation:
        made = self._slots["made"][slot]
        tokens, logprobs, versions = (self._slots[name][slot, :made].copy() for name in ("tokens", "logprobs", "versions"))
        return Generation(request_id=self.rows[slot].request.request_id, tokens=tokens, logprobs=logprobs, weight_versions=versions, finish=finish)

    def _free(self, slot: int) -> None:
        """Move the last row into `slot`."""
        last = len(self.rows) - 1
        if slot != last:
            if not self._slots["cold"][last]:
                self._decoder.cache.copy(last, slot, int(self._slots["position"][last]))
            self.rows[slot] = self.rows[last]
            for values in self._slots.values():
                values[slot] = values[last]
        self.rows.pop()
        self._sampling = None

    def _widen(self, name: str, width: int, fill: int) -> None:
        old = self._slots[name]
        if width > old.shape[1]:
            wider = np.full((self._max_rows, max(width, 2 * old.shape[1])), fill, old.dtype)
            wider[:, : old.shape[1]] = old
            self._slots[name] = wider
