"""A model over its pipeline: rows go through Megatron-Core's schedules, and the last stage scores them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from trainer.megatron.attention import rows_of
from trainer.megatron.mesh import Mesh
from trainer.megatron.model import Chunk
from trainer.megatron.scoring import score_parallel
from trainer.rows.meters import Meters
from trainer.rows.row import Row, RowLoss


class Model:
    """The policy or its reference on this rank.

    Args:
        chunks: this rank's pieces as Megatron-Core's schedules call them, wrapped in its data parallelism where they are trained.
        vocabulary: tokens there are, padding left out.
        log_chunk: tokens whose logits exist at once.
    """

    def __init__(self, chunks: Sequence[nn.Module], mesh: Mesh, vocabulary: int, log_chunk: int):
        self.chunks, self._mesh, self._vocabulary, self._log_chunk = list(chunks), mesh, vocabulary, log_chunk
        config: Any = self.chunks[0].config
        self._divided: bool = config.sequence_parallel

    def train(
        self,
        rows: Sequence[Row],
        temperature: float,
        loss: RowLoss,
        meters: Meters,
        total: int,
        *,
        entropy: bool = False,
        entropy_gradient: bool = False,
        name: str = "loss/total",
    ) -> None:
        """Forward and backward of every row; gradients add up, and are summed over data-parallel ranks at the end. `meters` gets the loss
        under `name`. Collective."""

        def trained(row: Row, hidden_T1D: Tensor) -> tuple[Tensor, Tensor, None]:
            out = loss(row, *self._scores(row, hidden_T1D, temperature, entropy, entropy_gradient))
            meters.add(name, out.loss.detach() * total)
            for key, value in out.sums.items():
                meters.add(key, value)
            # Megatron-Core counts tokens to divide by; ours are shares of a global mean already.
            return out.loss, torch.zeros((), dtype=torch.int, device=out.loss.device), None

        self._run(rows, trained, forward_only=False)

    def score(self, rows: Sequence[Row], temperature: float) -> list[Tensor]:
        """`logprobs_N` of each row, without a graph; nothing on stages before the last. Collective."""

        def scored(row: Row, hidden_T1D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logprobs_N, _ = self._scores(row, hidden_T1D, temperature, False, False)
            return logprobs_N.sum(), torch.zeros((), dtype=torch.int, device=logprobs_N.device), logprobs_N

        with torch.no_grad():
            return self._run(rows, scored, forward_only=True)

    def _run(self, rows: Sequence[Row], finish: Callable[[Row, Tensor], Any], *, forward_only: bool) -> list[Tensor]:
        def step(data: Iterator[Row], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
            row = next(data)
            tokens_T, positions_T, sequence_T = self._padded(row)
            hidden_T1D = model(input_ids=tokens_T[None], position_ids=positions_T[None], attention_mask=None, packed_seq_params=rows_of(sequence_T))
            return hidden_T1D, partial(finish, row)

        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(rows) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(rows),
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _padded(self, row: Row) -> tuple[Tensor, Tensor, Tensor]:
        """Where tensor ranks divide the tokens, a sequence of zeros makes them divide."""
        count = -len(row.tokens_T) % self._mesh.layout.tensor if self._divided else 0
        if not count:
            return row.tokens_T, row.positions_T, row.sequence_T
        zeros = row.tokens_T.new_zeros(count)
        return tuple(torch.cat((a, b)) for a, b in ((row.tokens_T, zeros), (row.positions_T, zeros), (row.sequence_T, zeros + row.num_sequences)))  # type: ignore[return-value]

    def _scores(self, row: Row, hidden_T1D: Tensor, temperature: float, entropy: bool, entropy_gradient: bool) -> tuple[Tensor, Tensor | None]:
        hidden_ND, head = self._read(hidden_T1D, row.scored_N - 1)
        return score_parallel(
            hidden_ND,
            head,
            row.tokens_T[row.scored_N],
            mesh=self._mesh,
            vocabulary=self._vocabulary,
            temperature=temperature,
            chunk=self._log_chunk,
            entropy=entropy,
            entropy_gradient=entropy_gradient,
        )

    def _read(self, hidden_T1D: Tensor, place_N: Tensor) -> tuple[Tensor, Tensor]:
        """The states behind the tokens at `place_N` [N, D], and this rank's part of the head."""
        last: Any = self.chunks[-1]
        chunk: Chunk = getattr(last, "module", last)
        if self._divided:
            # What reads them sums in its own backward over tensor ranks, or is the same on each.
            hidden_T1D = gather_from_sequence_parallel_region(hidden_T1D, tensor_parallel_output_grad=False)
        return hidden_T1D[:, 0].index_select(0, place_N), chunk.head()


class Values(Model):
    """A critic: in a log-prob's place stands the value of the state in which the token was chosen, at any temperature."""

    def _scores(self, row: Row, hidden_T1D: Tensor, temperature: float, entropy: bool, entropy_gradient: bool) -> tuple[Tensor, Tensor | None]:
        return self._outputs(hidden_T1D, row.scored_N - 1), None

    def _outputs(self, hidden_T1D: Tensor, place_N: Tensor) -> Tensor:
        hidden_ND, head_1D = self._read(hidden_T1D, place_N)
        dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        return torch.mv(hidden_ND.to(dtype), head_1D[0].to(dtype))


class Rewards(Values):
    """A reward model: in the log-probs' place stands one reward for each sequence, [S]."""

    def _scores(self, row: Row, hidden_T1D: Tensor, temperature: float, entropy: bool, entropy_gradient: bool) -> tuple[Tensor, Tensor | None]:
        last_S = torch.unique_consecutive(row.sequence_T, return_counts=True)[1].cumsum(0) - 1
        return self._outputs(hidden_T1D, last_S), None
