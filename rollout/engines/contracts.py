"""What every rollout engine does. `tests/conformance/test_engines.py` holds each implementation to it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from weight_sync.contracts import WeightReceiver

PauseMode = Literal["abort", "retract", "in_place"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens.

    Attributes:
        temperature: 0 is greedy. Recorded log-probs are those of the distribution at this temperature (at 1 when greedy),
            before top-k and top-p, since that is what the trainer scores.
        top_k: 0 keeps all. top_p: 1.0 keeps all.
        stop_token_ids: generation ends after one of these; it is part of the response and is trained.
        seed: with equal seed, prompt, parameters and weights the torch engine gives equal tokens, whatever else runs beside.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sequence to generate. `generated` is the response so far of a partial trajectory that goes on."""

    request_id: str
    prompt: NDArray[np.int64]
    sampling: SamplingParams
    generated: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What an engine made: only the new tokens of this call, R of them.

    Attributes:
        tokens: int64 [R]. logprobs: float32 [R], nats. weight_versions: int32 [R].
        finish: `stop` (a stop token, included), `length` (max_new_tokens or context), `abort` (paused or aborted: resumable).
    """

    request_id: str
    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    weight_versions: NDArray[np.int32]
    finish: Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class EngineHealth:
    """`running` and `waiting` count sequences; `tokens_generated` and `seconds_busy` count since the start."""

    ok: bool
    weight_version: int
    running: int
    waiting: int
    tokens_generated: int
    seconds_busy: float
    detail: str = ""


class EngineError(RuntimeError):
    """The engine died, refused or answered nonsense. Its trajectories are retried or excluded, never trained as reward 0."""


class Engine(WeightReceiver, Protocol):
    """Asynchronous on the outside; one engine serves many `generate` calls at once and batches them itself."""

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Generate all `requests`; they are admitted together, in order. Results are in the order of `requests`.

        Raises:
            ValueError: a prompt is empty, or does not fit the context with one new token.
            EngineError: the engine died.
        """
        ...

    def hold(self) -> AbstractContextManager[None]:
        """While held, no new request starts, so that all `generate` calls made inside are admitted together, in order, and a batch
        does not depend on timing. Engines that promise no order (SGLang) do nothing."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop at a token boundary. `abort` ends running requests (finish `abort`); `retract` keeps them and drops their KV
        cache (recomputed under the new weights); `in_place` keeps both."""
        ...

    async def resume(self) -> None: ...

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End the given requests (all when None) with what they have, finish `abort`."""
        ...

    async def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Give memory back by tag. Generation is refused until `wake`."""
        ...

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None: ...

    async def health(self) -> EngineHealth: ...

    async def close(self) -> None:
        """End every process this engine started. Idempotent."""
        ...
