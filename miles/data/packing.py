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


def partition(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Share out indices 0..len(lengths)-1 over `parts`, balanced by the sum of lengths: longest first to the least loaded part.

    Deterministic: ties go to the lower index and the lower part. Every index is in exactly one part, each part is in rising
    order, and a part is empty only where there are fewer sequences than parts. The heaviest part is at most 4/3 of the optimum
    (Graham, Bounds on Multiprocessing Timing Anomalies, 1969).
    """
    assert parts >= 1
    shares: list[list[int]] = [[] for _ in range(parts)]
    # The second key keeps parts equal in count where lengths are 0.
    loads = [(0, 0)] * parts
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        least = min(range(parts), key=lambda p: (loads[p], p))
        shares[least].append(index)
        loads[least] = (loads[least][0] + lengths[index], loads[least][1] + 1)
    return [sorted(share) for share in shares]


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
