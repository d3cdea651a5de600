"""What a critic learns from packed rows, whatever model it is: each state's return, by one optimizer step for each of the batch's updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from algorithms.contracts import LossOutput, Rewards, TokenAdvantages
from algorithms.value import explained_variance, value_loss
from trainer.rows.batch import Batch
from trainer.rows.meters import Meters
from trainer.rows.row import Row, own_part
from trainer.rows.schedule import Update
from trainer.rows.share import MicroBatch

TakeStep = Callable[[Sequence[Row], int, Meters], Update]
"""`(rows, values to learn in all of them on every rank, meters)` -> one optimizer step on `loss_of_values`."""


def learn_values(
    batch: Batch,
    shares: Sequence[Sequence[MicroBatch]],
    rows: Sequence[Sequence[Row]],
    rewards: Rewards,
    found: TokenAdvantages,
    meters: Meters,
    take: TakeStep,
    reduced: Callable[[Meters, int], dict[str, float]],
) -> dict[str, float]:
    """The steps of one batch; what there is to report. Collective.

    Args:
        shares, rows: of this rank, for each update; the rows get their `values_N` and `returns_N` here.
        rewards: with the values at the step's start. found: with the returns, NaN where there is nothing to learn.
        reduced: `Meters.reduced` over the ranks.
    Raises:
        ValueError: the estimator gives no returns.
    """
    values_N, returns_N = rewards.values_N, found.returns_N
    assert values_N is not None
    if returns_N is None:
        raise ValueError("algorithm.advantages gives the critic no returns to learn: leave [critic] out, or return TokenAdvantages with returns_N")
    values, returns = values_N.split(batch.lengths), returns_N.split(batch.lengths)
    updates, everything = list[Update](), 0
    for places, micros, update in zip(batch.updates, shares, rows, strict=True):
        for micro, row in zip(micros, update, strict=True):
            row.values_N, row.returns_N = own_part(micro, values, meters.device), own_part(micro, returns, meters.device)
        total = sum(int((~returns[i].isnan()).sum()) for i in places)
        updates.append(take(update, total, meters))
        everything += total
    learnt_N = ~returns_N.isnan()
    return reduced(meters, everything) | {
        "value/explained_variance": explained_variance(values_N[learnt_N], returns_N[learnt_N]),
        "value/grad_norm": sum(u.grad_norm for u in updates) / len(updates),
        "value/lr": updates[-1].lr,
        "value/empty_steps": float(sum(not u.applied for u in updates)),
    }


def loss_of_values(row: Row, values_N: Tensor, _: Tensor | None = None, *, total: int, clip: float) -> LossOutput:
    """The row's share of a mean over `total` states. `clip` as `critic.value_clip`."""
    assert row.values_N is not None
    assert row.returns_N is not None
    learnt_N = row.mask_N & ~row.returns_N.isnan()
    return value_loss(values_N, row.values_N, row.returns_N, learnt_N, total, clip)
