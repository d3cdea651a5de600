"""Engines that score tokens which are there already, as a teacher does. `tests/conformance/test_scoring_engines.py` holds each to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreRequest:
    """Score tokens[start:], each given all before it.

    Attributes:
        tokens: int64 [T]. start: in 1..T. top_k: how many of the likeliest tokens to tell at each of those places; 0 for none.
    """

    tokens: NDArray[np.int64]
    start: int
    top_k: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Scored:
    """Of the R = T - start tokens of a request, at the distribution over the whole vocabulary.

    Attributes:
        logprobs: float32 [R], nats. top_ids: int32 [R, K], the likeliest first. top_logprobs: float32 [R, K].
    """

    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]


class ScoringEngine(Protocol):
    """Asynchronous on the outside; one engine serves many `score` calls at once."""

    async def start(self) -> None: ...

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Scored]:
        """Results in the order of `requests`.

        Raises:
            ValueError: a request does not fit the engine's model: longer than its context, ids or top_k beyond its vocabulary.
            EngineError: the engine died, refused or answered nonsense.
        """
        ...

    async def close(self) -> None:
        """End everything this engine started. Idempotent."""
        ...


def check_score_request(request: ScoreRequest, *, context: int | None, vocabulary: int | None) -> None:
    """Raises ValueError; what an engine does not know of itself is not checked. An SGLang server dies of a `top_k` beyond its vocabulary."""
    length, largest = len(request.tokens), max(int(request.tokens.max(initial=0)), request.top_k - 1)
    if not 1 <= request.start <= length:
        raise ValueError(f"scoring starts at token {request.start} of {length}: the first token has nothing before it")
    if context is not None and length > context:
        raise ValueError(f"{length} tokens are to be scored by a teacher whose context is {context}: set model.context = {context}, or less")
    if vocabulary is not None and largest >= vocabulary:
        raise ValueError(f"token ids up to {request.tokens.max(initial=0)} and top_k = {request.top_k} do not fit a vocabulary of {vocabulary}")
