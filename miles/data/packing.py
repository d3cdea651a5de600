"""Sequences laid end to end in one row, and how sequences are shared out over ranks and micro-batches.

There is no padding anywhere: a micro-batch is one row of T tokens with positions that restart at every sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from miles.data.common import first_places
from miles.data.types import Sample

_WORTH = 1 / 16  # of a row's tokens: what computing common ones once must spare to be worth its indices


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """S sequences in one row of T tokens, of which N are response tokens.

    Example: prompt 5 6, response 8 9; then prompt 7, response 4:
        tokens_T = 5 6 8 9 7 4, positions_T = 0 1 2 3 0 1, sequence_T = 0 0 0 0 1 1,
        targets_N = 8 9 4, target_index_N = 1 2 4 (the logits at place 1 predict token 8), sequence_N = 0 0 1

    Attributes:
        tokens_T, positions_T, sequence_T: int64 [T]; `sequence_T` numbers the sequences from 0 in the order given.
        target_index_N: int64 [N], place in the row whose next token is the response token. targets_N: int64 [N], that token.
        sequence_N: int64 [N], whose each response token is.
        loss_mask_N: bool [N]. rollout_logprobs_N: float32 [N], NaN allowed where the mask is False. weight_versions_N: int32 [N].
        length_S: int64 [S], all tokens of each sequence. response_length_S: int64 [S].
        first_T: int64 [T], `first_places` of the sequences; None where too few of them begin alike to gain by it.
    """

    tokens_T: NDArray[np.int64]
    positions_T: NDArray[np.int64]
    sequence_T: NDArray[np.int64]
    target_index_N: NDArray[np.int64]
    targets_N: NDArray[np.int64]
    sequence_N: NDArray[np.int64]
    loss_mask_N: NDArray[np.bool_]
    rollout_logprobs_N: NDArray[np.float32]
    weight_versions_N: NDArray[np.int32]
    length_S: NDArray[np.int64]
    response_length_S: NDArray[np.int64]
    first_T: NDArray[np.int64] | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.length_S)


def pack(samples: Sequence[Sample]) -> Packed:
    """Lay `samples` end to end, in order. At least one sample is needed."""
    assert samples, "an empty micro-batch has no row"
    length_S = np.array([len(s.tokens) for s in samples], np.int64)
    response_length_S = np.array([s.response_length for s in samples], np.int64)
    end_S = np.cumsum(length_S)
    sequences = np.arange(len(samples), dtype=np.int64)
    target_index_N = np.concatenate([np.arange(end - r - 1, end - 1, dtype=np.int64) for end, r in zip(end_S, response_length_S, strict=True)])
    tokens_T = np.concatenate([s.tokens for s in samples])
    first_T = first_places([s.tokens for s in samples])
    repeated = np.count_nonzero(first_T != np.arange(len(first_T)))
    return Packed(
        tokens_T=tokens_T,
        positions_T=np.concatenate([np.arange(n, dtype=np.int64) for n in length_S]),
        sequence_T=np.repeat(sequences, length_S),
        target_index_N=target_index_N,
        targets_N=tokens_T[target_index_N + 1],
        sequence_N=np.repeat(sequences, response_length_S),
        loss_mask_N=np.concatenate([s.loss_mask for s in samples]),
        rollout_logprobs_N=np.concatenate([s.logprobs for s in samples]),
        weight_versions_N=np.concatenate([s.weight_versions for s in samples]),
        length_S=length_S,
        response_length_S=response_length_S,
        first_T=first_T if repeated >= _WORTH * len(first_T) else None,
    )


def balanced_rows(lengths: Sequence[int], costs: Sequence[float], ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Share out indices 0..len(lengths)-1 over ranks and, within a rank, over rows of at most `max_tokens` tokens: `[rank][row]`.

    Ranks meet in every row (FSDP gathers a layer for all of them), so the rows that are computed at one time must cost the same, and not only
    the ranks' sums. The number of rows is the least that holds everything; each sequence goes, the costliest first, to the cheapest row that
    has room (Graham, Bounds on Multiprocessing Timing Anomalies, 1969); rows of similar cost are then dealt out to the ranks together.

    Deterministic. Every index is in exactly one row, in rising order there; all ranks have the same number of rows, the costliest first, and
    a row is empty only for want of sequences. One longer than `max_tokens` is alone in its row.

    Example: lengths = costs = 6 5 4 3 2, two ranks, max_tokens 8: one rank has rows [0] and [2], the other [1] and [3, 4]. They compute 6
    beside 5, then 4 beside 5.
    """
    assert ranks >= 1
    assert max_tokens >= 1
    most = -(-len(lengths) // ranks)
    count = min(most, -(-sum(lengths) // (ranks * max_tokens)))
    rows = _fill(lengths, costs, ranks * count, max_tokens)
    while rows is None:  # with a row for each sequence everything fits
        count += 1
        rows = _fill(lengths, costs, ranks * count, max_tokens)
    rows.sort(key=lambda row: (-sum(costs[i] for i in row), row))
    plans: list[list[list[int]]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for start in range(0, len(rows), ranks):
        least_first = sorted(range(ranks), key=lambda r: (loads[r], r))
        for rank, row in zip(least_first, rows[start : start + ranks], strict=True):
            plans[rank].append(row)
            loads[rank] += sum(costs[i] for i in row)
    return plans


def _fill(lengths: Sequence[int], costs: Sequence[float], count: int, max_tokens: int) -> list[list[int]] | None:
    """`count` rows; None where the sequences do not find room in them."""
    rows: list[list[int]] = [[] for _ in range(count)]
    load_C, used_C = np.zeros(count), np.zeros(count, np.int64)
    for index in sorted(range(len(lengths)), key=lambda i: (-costs[i], -lengths[i], i)):
        room_C = (used_C + lengths[index] <= max_tokens) | (used_C == 0)
        if not room_C.any():
            return None
        row = int(np.where(room_C, load_C, np.inf).argmin())
        rows[row].append(index)
        load_C[row] += costs[index]
        used_C[row] += lengths[index]
    return [sorted(row) for row in rows]


def microbatches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Bins of indices whose lengths sum to at most `max_tokens`: first fit, longest first, deterministic.

    A sequence longer than `max_tokens` gets a bin of its own (a sequence is never split). Bins are ordered by their lowest
    index and each is in rising order; no lengths give no bins.
    """
    assert max_tokens >= 1
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for place, free in enumerate(room):
            if lengths[index] <= free:
                bins[place].append(index)
                room[place] -= lengths[index]
                break
        else:
            bins.append([index])
            room.append(max_tokens - lengths[index])
    return sorted(sorted(b) for b in bins)
