"""Random batches for the properties that every objective must have, as a list of sequences that a test may rearrange."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from algorithms.contracts import Counts, Covariance, LossFn, Tokens

FIELDS = ("logprobs", "old", "rollout", "advantages", "entropy", "reference")


@dataclass(frozen=True)
class Row:
    """One sequence of R tokens: float64 [R] each, and bool [R]."""

    logprobs: NDArray[np.float64]
    old: NDArray[np.float64]
    rollout: NDArray[np.float64]
    advantages: NDArray[np.float64]
    entropy: NDArray[np.float64]
    reference: NDArray[np.float64]
    mask: NDArray[np.bool_]


def rows(seed: int, lengths: Sequence[int], spread: float = 0.3) -> list[Row]:
    """One row a length, one advantage a row; policies differ by about `spread` in log-prob."""
    rng = np.random.default_rng(seed)
    out = []
    for length in lengths:
        base = -rng.exponential(1.5, length) - 0.01
        near = [np.minimum(base + spread * rng.standard_normal(length), -0.001) for _ in range(4)]
        advantages = np.full(length, rng.standard_normal())
        out.append(Row(near[0], near[1], near[2], advantages, rng.exponential(1.0, length), near[3], rng.random(length) > 0.25))
    return out


def with_noise_where_masked(row: Row, seed: int, value: float) -> Row:
    """The same row with masked tokens that hold `value` put in at random places."""
    rng = np.random.default_rng(seed)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(0, len(row.mask) + 1))
        changed = {name: np.insert(getattr(row, name), at, value) for name in FIELDS}
        row = replace(row, **changed, mask=np.insert(row.mask, at, False))
    return row


GUARD_SHARE = 0.3


def count(batch: Sequence[Row], max_tokens: int = 16) -> Counts:
    """Counts of the whole step, with the covariance of engine log-prob and advantage whose top GUARD_SHARE an entropy guard holds."""
    lengths = [int(row.mask.sum()) for row in batch]
    total = sum(lengths)
    logprobs = np.concatenate([row.rollout[row.mask] for row in batch])
    advantages = np.concatenate([row.advantages[row.mask] for row in batch])
    covariance = Covariance(logprob_mean=0.0, advantage_mean=0.0, bound=math.inf)
    if total:
        products = np.sort((logprobs - logprobs.mean()) * (advantages - advantages.mean()))[::-1]
        bound = max(products[max(1, int(GUARD_SHARE * total)) - 1] * (1 - 1e-6), 1e-9)
        covariance = Covariance(logprob_mean=logprobs.mean(), advantage_mean=advantages.mean(), bound=bound)
    return Counts(tokens=total, sequences=sum(n > 0 for n in lengths), max_tokens=max_tokens, covariance=covariance)


def tokens_of(batch: Sequence[Row], dtype: torch.dtype = torch.float64) -> Tokens:
    """Rows laid end to end; `logprobs_N` and `entropy_N` are leaves that require grad."""

    def flat(name: str) -> torch.Tensor:
        return torch.tensor(np.concatenate([getattr(row, name) for row in batch]), dtype=dtype)

    return Tokens(
        logprobs_N=flat("logprobs").requires_grad_(),
        old_logprobs_N=flat("old"),
        rollout_logprobs_N=flat("rollout"),
        advantages_N=flat("advantages"),
        mask_N=torch.tensor(np.concatenate([row.mask for row in batch])),
        sequence_N=torch.tensor(np.concatenate([np.full(len(row.mask), i) for i, row in enumerate(batch)]), dtype=torch.int64),
        num_sequences=len(batch),
        sequence_length_S=torch.tensor([int(row.mask.sum()) for row in batch]),
        entropy_N=flat("entropy").requires_grad_(),
        reference_logprobs_N=flat("reference"),
    )


def run(loss_fn: LossFn, batch: Sequence[Row], counts: Counts, dtype: torch.dtype = torch.float64) -> tuple[float, list[NDArray[np.float64]], dict[str, float]]:
    """The loss, its gradient on the log-probs of each row's unmasked tokens, and the sums.

    Gradients on masked tokens are asserted to be exactly 0 here, so that every property checks it.
    """
    tokens = tokens_of(batch, dtype)
    out = loss_fn(tokens, counts)
    (gradient_N,) = torch.autograd.grad(out.loss, tokens.logprobs_N, allow_unused=True)
    gradient = torch.zeros_like(tokens.logprobs_N) if gradient_N is None else gradient_N
    assert (gradient[~tokens.mask_N] == 0).all()
    parts = [gradient[(tokens.sequence_N == i) & tokens.mask_N].double().numpy() for i in range(len(batch))]
    return float(out.loss.detach()), parts, {name: float(value) for name, value in out.sums.items()}


def run_tokens(loss_fn: LossFn, batch: Sequence[Row], counts: Counts, part: slice) -> tuple[float, NDArray[np.float64], dict[str, float]]:
    """As `run`, of some of the batch's tokens alone, which may begin and end within a sequence."""
    whole = tokens_of(batch)
    names = ("logprobs_N", "old_logprobs_N", "rollout_logprobs_N", "advantages_N", "mask_N", "sequence_N", "entropy_N", "reference_logprobs_N")
    tokens = replace(whole, **{name: getattr(whole, name)[part] for name in names})
    out = loss_fn(tokens, counts)
    (gradient_N,) = torch.autograd.grad(out.loss, tokens.logprobs_N)
    return float(out.loss.detach()), gradient_N[tokens.mask_N].numpy(), {name: float(value) for name, value in out.sums.items()}


def numeric_gradient(value: Callable[[NDArray[np.float64]], float], at: NDArray[np.float64], step: float = 1e-6) -> NDArray[np.float64]:
    """Central differences of a scalar function."""
    gradient = np.zeros_like(at)
    for i in range(len(at)):
        up, down = at.copy(), at.copy()
        up[i] += step
        down[i] -= step
        gradient[i] = (value(up) - value(down)) / (2 * step)
    return gradient
