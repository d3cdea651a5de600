"""One optimizer step of one model, policy or critic, from the rows of its batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedModel

from algorithms.contracts import LossOutput
from miles.core.model.sharded import last_microbatch
from trainer.fsdp.optimizer import Optimizer
from trainer.rows.meters import Meters
from trainer.rows.row import Row
from trainer.rows.schedule import Update


def take_step(
    model: PreTrainedModel,
    optimizer: Optimizer,
    rows: Sequence[Row],
    total: int,
    loss: Callable[[Row], LossOutput],
    meters: Meters,
    name: str,
    settle: Callable[[Row], None] | None = None,
    before: Callable[[], None] | None = None,
) -> Update:
    """Losses of the rows are shares of a mean over `total` tokens or pairs, so their gradients simply add up. Collective.

    `meters` gets the loss under `name`, and the losses' sums. `settle` is called behind each row's backward, `before` when
    the weights are about to move. Nothing is trained when `total` is 0.
    """
    if total == 0:
        return optimizer.skip()
    for row in rows:
        last_microbatch(model, row is rows[-1])
        out = loss(row)
        out.loss.backward()
        if settle is not None:
            settle(row)
        meters.add(name, out.loss.detach() * total)
        for key, value in out.sums.items():
            meters.add(key, value)
    if before is not None:
        before()
    return optimizer.step()
