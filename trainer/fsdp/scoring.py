"""What a model makes of a packed row: a loss to train on, or log-probs, with a graph or without."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import accumulate
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel

from algorithms.contracts import LossOutput
from miles.core.model.fused_loss import even_parts, whole_parts
from miles.core.model.lora import adapters_off
from miles.core.model.packed import packed_logprobs, packed_loss, rows_of
from miles.core.model.routing import Routed, Routers, routed
from miles.core.model.sharded import reshard
from trainer.rows.row import Row, RowLoss, row_of
from trainer.rows.share import MicroBatch
from trainer.split_forward.ahead import Early
from trainer.split_forward.executor import Executor, PromptState, Split, SplitPass


class Scorer:
    """A model, policy or reference, that scores rows.

    Attributes:
        readers: what prefills have left and still lives. The weights must not move before it is gone.

    Args:
        routers: the model's, where it is asked for what they did.
    """

    def __init__(self, model: PreTrainedModel, chunk: int, device: torch.device, routers: Routers | None = None):
        self.model, self._chunk, self._device, self._routers = model, chunk, device, routers
        self._seen: list[tuple[Tensor, Tensor]] | None = None
        self._walk: Executor | None = None
        self._early: dict[Early, PromptState] = {}
        self.readers: WeakSet[PromptState] = WeakSet()

    def row(self, micro: MicroBatch, advantages: Sequence[Tensor] | None = None) -> Row:
        return row_of(micro, advantages, self._device)

    def loss(
        self, row: Row, loss: RowLoss, temperature: float, *, entropy: bool = False, entropy_gradient: bool = False, together: int = 1, by_token: bool = False
    ) -> LossOutput:
        """`loss` of the row, ready for one backward, computed part by part while the logits of a part are there. Collective.

        Args:
            entropy: whether `loss` is given entropies; with `entropy_gradient` it may also be differentiated in them.
            together: so many neighbouring sequences are never parted.
            by_token: the loss looks at each token alone, so a sequence may be parted.
        """
        watching = self._routers.watched() if self._routers is not None and row.split is None and torch.is_grad_enabled() else nullcontext()
        with watching as self._seen:
            return self._loss(row, loss, temperature, entropy=entropy, entropy_gradient=entropy_gradient, together=together, by_token=by_token)

    def routed(self, row: Row) -> tuple[Routed, Tensor]:
        """What routers did with the sequences of `row`, whose loss was computed last, with a graph; and how long they are, [S]."""
        if row.split is not None:
            assert self._walk is not None, "the loss was computed last"
            return self._walk.routed(row.split.number)
        assert self._seen, "the loss was computed with gradients, by a scorer that was given the routers"
        number_T = rows_of(self.model, row.sequence_T, row.first_T).number_T
        found = routed(self._seen, row.sequence_T, row.num_sequences, number_T)
        return found, torch.bincount(row.sequence_T, minlength=row.num_sequences).to(found.chosen_SLX.dtype)

    def _loss(self, row: Row, loss: RowLoss, temperature: float, *, entropy: bool, entropy_gradient: bool, together: int, by_token: bool) -> LossOutput:
        # Nothing to differentiate; or log-probs from several passes, none of which has the logits of a whole answer.
        if not torch.is_grad_enabled() or (row.split is not None and not self._walk_to(row.split).alone(row.split.number)):
            return loss(row, *self.forward(row, temperature, entropy, entropy_gradient))
        sums: dict[str, Tensor] = {}
        cuts = _parts(row.response_length_S, self._chunk, together, by_token)

        def of_part(tokens: slice, logprobs_N: Tensor, entropy_N: Tensor | None) -> Tensor:
            out = loss(row.part(tokens, cuts[tokens.start, tokens.stop]), logprobs_N, entropy_N)
            for name, value in out.sums.items():
                sums[name] = sums[name] + value if name in sums else value
            return out.loss

        parts = [slice(*tokens) for tokens in cuts]
        if row.split is not None:
            walk = self._walk_to(row.split)
            total = walk.loss(row.split.number, of_part, parts, temperature=temperature, entropy=entropy, entropy_gradient=entropy_gradient)
            return LossOutput(loss=total, sums=sums)
        where = row.tokens_T, row.positions_T, row.sequence_T, row.scored_N
        total = packed_loss(
            self.model,
            *where,
            of_part,
            parts,
            temperature=temperature,
            chunk=self._chunk,
            entropy=entropy,
            entropy_gradient=entropy_gradient,
            first_T=row.first_T,
        )
        return LossOutput(loss=total, sums=sums)

    def forward(self, row: Row, temperature: float, entropy: bool, entropy_gradient: bool = False) -> tuple[Tensor, Tensor | None]:
        """`(logprobs_N, entropy_N or None)` with their graph, the entropy's only with `entropy_gradient`. Collective."""
        if row.split is not None:
            return self._walk_to(row.split).replay(row.split.number, temperature, entropy, entropy_gradient)
        where = row.tokens_T, row.positions_T, row.sequence_T, row.scored_N
        return packed_logprobs(self.model, *where, temperature, self._chunk, entropy, entropy_gradient, row.first_T)

    def settle(self, row: Row) -> None:
        """To be called after the backward of each row in turn: what rows had in common is differentiated once all of them have been. Collective."""
        if row.split is not None:
            assert self._walk is not None, "a row is settled that was never computed"
            self._walk.settle()

    def prefill(self, wave: int, split: Split, temperature: float, entropy: bool = False, entropy_gradient: bool = False) -> None:
        """Run the prefills that a wave's plan begins with; a plan that names them in `early` takes them over. Arguments as in `forward`. Collective."""
        walk = Executor(self.model, split, self._chunk, readers=self.readers, routers=self._routers)
        walk.prefill(temperature, entropy, entropy_gradient)
        self._early |= {(wave, number): state for number, state in walk.hand_over().items()}
        reshard(self.model)

    def let_go(self, gone: Iterable[Early] | None = None) -> None:
        """Free prefills that ran early and are not needed; None: all of them, and the walk they were for."""
        if gone is None:
            self._early, self._walk = {}, None
        for early in gone or ():
            self._early.pop(early, None)

    def _walk_to(self, one: SplitPass) -> Executor:
        if one.first and (self._walk is None or self._walk.split is not one.split or self._walk.begun):
            states = {number: self._early.pop(early) for number, early in one.split.early.items() if early in self._early}
            self._walk = Executor(self.model, one.split, self._chunk, states, self.readers, self._routers)
        assert self._walk is not None, "rows of a plan are computed in its order"
        return self._walk

    def score(self, row: Row, temperature: float) -> Tensor:
        """`logprobs_N` without a graph. Collective."""
        with torch.no_grad():
            logprobs_N, _ = self.forward(row, temperature, False)
            self.settle(row)
        reshard(self.model)
        return logprobs_N


class BaseScorer(Scorer):
    """The reference of a policy with adapters: the policy without them, so that there is no second copy of the weights."""

    def forward(self, row: Row, temperature: float, entropy: bool, entropy_gradient: bool = False) -> tuple[Tensor, Tensor | None]:
        """As `Scorer.forward`. Call without gradients: a recompute in the backward would have the adapters on."""
        assert not torch.is_grad_enabled(), "a reference is not trained"
        with adapters_off(self.model):
            return super().forward(row, temperature, entropy, entropy_gradient)

    def prefill(self, wave: int, split: Split, temperature: float, entropy: bool = False, entropy_gradient: bool = False) -> None:
        assert not torch.is_grad_enabled(), "a reference is not trained"
        with adapters_off(self.model):
            super().prefill(wave, split, temperature, entropy, entropy_gradient)


def _parts(lengths: Sequence[int], chunk: int, together: int, by_token: bool) -> dict[tuple[int, int], slice]:
    """The parts a row's loss is computed in: from tokens `(start, stop)` to the sequences they lie in."""
    ends = [0, *accumulate(lengths)]
    if by_token:
        parts = even_parts(ends[-1], chunk)
        first = [bisect_right(ends, part.start, hi=len(lengths)) - 1 for part in parts]
        last = [bisect_left(ends, part.stop, lo=1) for part in parts]
        return {(part.start, part.stop): slice(a, max(a + 1, b)) for part, a, b in zip(parts, first, last, strict=True)}
    units = [slice(i, min(i + together, len(lengths))) for i in range(0, len(lengths), together)]
    groups = whole_parts([ends[unit.stop] - ends[unit.start] for unit in units], chunk)
    sequences = [slice(units[group[0]].start, units[group[-1]].stop) for group in groups]
    return {(ends[s.start], ends[s.stop]): s for s in sequences}
