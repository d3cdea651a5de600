"""What a teacher says of a sample, as it travels from where the teacher runs to the trainer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Reading:
    """The tokens of a teacher with another tokenizer for a sample of R response tokens, and which tokens of both sides write the same text.

    Attributes:
        tokens: int64 [P' + Q], the teacher's prompt and response. prompt_length: P'.
        span_R, span_Q: int32, number of the span of text that each student and teacher token belongs to; -1 where none is compared.
    """

    tokens: NDArray[np.int64]
    prompt_length: int
    span_R: NDArray[np.int32]
    span_Q: NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Taught:
    """Of a sample with R response tokens, which a teacher reads as Q: the same ones where `reading` is None.

    Attributes:
        reading: the sample in the teacher's own tokens.
        logprobs_Q: float32 [Q], the teacher's log-probability (nats) of each; None where the trainer's own teacher will tell.
        top_ids_RK, top_logprobs_RK: int32 and float32 [R, K], the teacher's likeliest tokens at each place; None where they were not asked for.
    """

    reading: Reading | None = None
    logprobs_Q: NDArray[np.float32] | None = None
    top_ids_RK: NDArray[np.int32] | None = None
    top_logprobs_RK: NDArray[np.float32] | None = None

    def check(self, response_length: int) -> None:
        """Raises ValueError where this cannot be of a sample with so many response tokens."""
        length = response_length
        if self.reading is not None:
            length = len(self.reading.tokens) - self.reading.prompt_length
            if len(self.reading.span_R) != response_length or len(self.reading.span_Q) != length:
                raise ValueError(
                    f"spans of {len(self.reading.span_R)} and {len(self.reading.span_Q)} tokens are not those of a response of {response_length} "
                    f"tokens read as {length}"
                )
        if self.logprobs_Q is not None and len(self.logprobs_Q) != length:
            raise ValueError(f"a teacher's {len(self.logprobs_Q)} log-probs are not those of {length} tokens")
        for top in (self.top_ids_RK, self.top_logprobs_RK):
            if top is not None and len(top) != response_length:
                raise ValueError(f"a teacher's likeliest tokens at {len(top)} places are not those of {response_length} tokens")


def nothing(like: Taught | None) -> Taught | None:
    """What would be said, in the way of `like`, of a response of one token that is not compared."""
    if like is None:
        return None
    nowhere = np.full(1, -1, np.int32)
    return Taught(
        reading=None if like.reading is None else Reading(tokens=np.zeros(2, np.int64), prompt_length=1, span_R=nowhere, span_Q=nowhere),
        logprobs_Q=None if like.logprobs_Q is None else np.zeros(1, np.float32),
        top_ids_RK=None if like.top_ids_RK is None else np.zeros((1, like.top_ids_RK.shape[1]), np.int32),
        top_logprobs_RK=None if like.top_logprobs_RK is None else np.zeros((1, like.top_logprobs_RK.shape[1]), np.float32),
    )
