"""The truth about a trajectory: `Sample`, and the groups that share a prompt.

Tokens are never re-created from text. Lengths are checked at construction, so a `Sample` that exists is consistent.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles.data.taught import Taught


class Status(StrEnum):
    """How a trajectory ended. Only COMPLETED and TRUNCATED trajectories are trained on."""

    COMPLETED = "completed"  # the model ended it: stop token or stop string
    TRUNCATED = "truncated"  # it met max_new_tokens or the context length
    ABORTED = "aborted"  # stopped from outside; may be resumed
    FAILED = "failed"  # engine, environment or reward raised
    TIMED_OUT = "timed_out"  # a deadline passed

    @property
    def trainable(self) -> bool:
        return self in (Status.COMPLETED, Status.TRUNCATED)


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One trajectory of T = P + R tokens: P prompt tokens, then R of everything after it (actions and observations).

    Example: the prompt is tokens 5 6 7, the model answered 8 9 and the engine was at weight version 3:
        Sample(sample_id="12/0", group_id="12", tokens=[5, 6, 7, 8, 9], prompt_length=3, loss_mask=[1, 1],
               logprobs=[-0.1, -0.7], weight_versions=[3, 3], status=Status.COMPLETED, reward=1.0)

    Attributes:
        tokens: int64 [T].
        prompt_length: P, at least 1.
        loss_mask: bool [R]; True where the policy chose the token and the loss may train it.
        logprobs: float32 [R]; log-probability (nats) of each token under the engine at the sampling temperature.
            Where `loss_mask` is False the value means nothing and may be NaN.
        weight_versions: int32 [R]; the weight version that produced each token, -1 where no policy did.
        reward: the scalar reward, or None when it is unknown (it is then no part of any baseline).
        reward_parts: each reward function's own value, before weighting.
        taught: what a teacher outside of the trainer says of it; from when a batch is taken until it is trained.
    Raises:
        ValueError: lengths disagree, or the prompt is empty.
    """

    sample_id: str
    group_id: str
    tokens: NDArray[np.int64]
    prompt_length: int
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    weight_versions: NDArray[np.int32]
    status: Status
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    taught: Taught | None = None

    def __post_init__(self) -> None:
        for name, dtype in _DTYPES.items():
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), dtype=dtype))
        if not 1 <= self.prompt_length <= len(self.tokens):
            raise ValueError(f"sample {self.sample_id}: prompt_length {self.prompt_length} must lie in 1..{len(self.tokens)}, the number of tokens")
        for name in ("loss_mask", "logprobs", "weight_versions"):
            if len(getattr(self, name)) != self.response_length:
                raise ValueError(
                    f"sample {self.sample_id}: {name} has {len(getattr(self, name))} entries, but there are "
                    f"{len(self.tokens)} - {self.prompt_length} = {self.response_length} tokens after the prompt"
                )
        if self.taught is not None:
            self.taught.check(self.response_length)

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def response_tokens(self) -> NDArray[np.int64]:
        return self.tokens[self.prompt_length :]

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version among trained tokens, or None when none is trained."""
        versions = self.weight_versions[self.loss_mask]
        return int(versions.min()) if len(versions) else None

    def with_reward(self, reward: float | None, parts: dict[str, float] | None = None) -> Sample:
        return replace(self, reward=reward, reward_parts=parts or {})


_DTYPES = {"tokens": np.int64, "loss_mask": np.bool_, "logprobs": np.float32, "weight_versions": np.int32}


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One row of a prompt dataset after the chat template: what a group is generated from.

    Attributes:
        prompt_id: stable over epochs and restarts: the row's place in its file after filtering.
        tokens: int64 [P].
        text: the rendered prompt, for tables; the policy's tokens are never made of it again.
        messages: what the template rendered; None where `text` is the row's own, without a template.
        columns: the row's other columns (answer, metadata) as the reward sees them.
    """

    prompt_id: int
    tokens: NDArray[np.int64]
    text: str
    columns: dict[str, Any]
    messages: list[dict[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Group:
    """The samples of one prompt. `claim_id` is its place in the endless, shuffled stream of prompts (epochs included)."""

    claim_id: int
    prompt: Prompt
    samples: tuple[Sample, ...]

    @property
    def trainable(self) -> tuple[Sample, ...]:
        return tuple(s for s in self.samples if s.status.trainable)

    @property
    def oldest_version(self) -> int | None:
        versions = [v for s in self.trainable if (v := s.oldest_version) is not None]
        return min(versions) if versions else None
