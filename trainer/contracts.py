"""What every trainer backend does. `tests/conformance/test_trainers.py` holds each implementation to it.

A backend lives on one rank; the same method is called on every rank with the same whole batch, and the backend takes its
own share (`miles.data.packing`), so that global counts need no communication and the split is deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from miles.core.planning.residency import Residency
from miles.data.types import Group, Sample
from weight_sync.contracts import WeightSource


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """`metrics`: floats by the names of `miles/tracking/names.py`, equal on every rank. `empty`: the policy's weights did
    not move: all tokens were masked, a gradient was not finite, or the critic has its head start."""

    metrics: dict[str, float] = field(default_factory=dict)
    empty: bool = False


@dataclass(frozen=True, kw_only=True)
class ClaimedPrompt:
    """A prompt that engines answer `count` times. `tokens`: int64 [P]."""

    claim_id: int
    tokens: NDArray[np.int64]
    count: int


class TrainerBackend(WeightSource, Protocol):
    """Losses are normalised by global counts, so the gradient does not depend on micro-batch split, packing or ranks."""

    def step_rl(self, groups: Sequence[Group]) -> StepResult:
        """One training step: advantages, `optimizer_steps_per_batch` updates. Collective."""
        ...

    def prefill(self, prompts: Sequence[ClaimedPrompt], open_claims: Set[int], version: int) -> None:
        """Compute what the next `step_rl` will need of `prompts`, while engines answer them with the weights of `version`, which must be the
        trainer's. Prompts given before whose claim is not in `open_claims` are let go of. Collective."""
        ...

    def residency(self, budget: int | None) -> Residency | None:
        """What rank 0 held and when in the last step that had prompts computed early, checked against `budget` bytes a rank (None: a GPU has its
        own). None where there was none, or what the model keeps cannot be told beforehand. Collective.

        Raises:
            ValueError: it is above the budget.
        """
        ...

    def step_sft(self, samples: Sequence[Sample]) -> StepResult:
        """One optimizer step of negative log-likelihood over `loss_mask`. Collective."""
        ...

    def step_pairs(self, samples: Sequence[Sample]) -> StepResult:
        """One optimizer step on pairs of answers: `samples` are chosen and rejected ones in turn. A pair is never split over
        micro-batches, and the loss is a mean over the step's pairs. Collective."""
        ...

    def evaluate_pairs(self, samples: Sequence[Sample]) -> dict[str, float]:
        """`eval/preference_*` of pairs as in `step_pairs`; nothing is trained. Collective."""
        ...

    def logprobs(self, samples: Sequence[Sample], reference: bool = False) -> list[list[float]]:
        """Log-probs [R] of each sample's response tokens at the sampling temperature, by the policy or the reference. Collective."""
        ...

    def divergence(self, samples: Sequence[Sample]) -> float:
        """`distill.divergence` of the policy from its teacher, nats per trained token of `samples`. Collective."""
        ...

    def save(self, folder: Path, extra: dict[str, object], *, keep: int | None = None, asynchronous: bool = True) -> None:
        """Start writing a checkpoint (weights, optimizer, LR, RNG, and `extra`, which is JSON) to `folder`, a path from
        `CheckpointStore.begin`. Collective; returns before it is on disk when asynchronous; `wait_saved` ends the wait and raises
        what went wrong. With `keep`, older complete checkpoints beyond that many go once this one is complete."""
        ...

    def wait_saved(self) -> None: ...

    def load(self, folder: Path) -> dict[str, object]:
        """Restore what `save` wrote; returns `extra`. Collective."""
        ...

    def export(self, folder: Path) -> None:
        """Write a Hugging Face directory (safetensors, config, tokenizer) that transformers and SGLang load. Collective."""
        ...

    def export_adapter(self, folder: Path) -> None:
        """Write the trained adapter in peft's format. Raises ValueError where there is none. Collective."""
        ...

    def sleep(self) -> None:
        """Move weights and optimizer off the device; on CPU they stay."""
        ...

    def wake(self) -> None: ...

    def close(self) -> None:
        """Wait for a checkpoint that is being written, and end what the backend started."""
        ...
