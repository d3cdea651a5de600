"""The loss on pairs of answers, one row at a time: by the policy's log-probs of whole answers, or by a reward model's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from algorithms.contracts import LossOutput
from algorithms.preference.config import PairConfig, RewardModelConfig
from miles.core.model.reward import packed_rewards
from trainer.fsdp.mesh import Mesh
from trainer.fsdp.scoring import Scorer
from trainer.rows.pairs import loss_of_answers, loss_of_rewards, moved_away
from trainer.rows.row import Row


@dataclass(kw_only=True, eq=False)
class PairLoss:
    """Rows hold chosen and rejected answers in turn; a dummy row, of one sequence, holds no pair.

    `reference` is there where the objective needs it; `kl` is of the step that is being taken, for KTO.
    """

    config: PairConfig
    model: PreTrainedModel
    policy: Scorer
    reference: Scorer | None
    kl: Tensor | None = None

    def begin(self, rows: Sequence[Row], strangers: Sequence[Row], mesh: Mesh) -> dict[str, float]:
        """Everything of a step that is scored before its first backward: the reference's log-probs, and KTO's KL by `strangers`, rows
        of `mismatched` answers. Returns what there is to report. Collective."""
        if self.reference is None:
            return {}
        for row in rows:
            row.reference_logprobs_N = self.reference.score(row, 1.0)
        if not strangers:
            return {}
        total = torch.zeros(2, dtype=torch.float64, device=rows[0].tokens_T.device)
        for row in strangers:
            total += moved_away(row, self.policy.score(row, 1.0), self.reference.score(row, 1.0))
        mesh.summed(total)
        self.kl = total[0] / total[1]
        return {"preference/kl": float(self.kl)}

    def __call__(self, row: Row, total: int) -> LossOutput:
        """The row's share of the step's mean over `total` pairs."""
        if isinstance(self.config, RewardModelConfig):
            rewards_S = packed_rewards(self.model, row.tokens_T, row.positions_T, row.sequence_T, row.first_T)
            return loss_of_rewards(row, rewards_S, config=self.config, total=total)
        return self.policy.loss(row, partial(loss_of_answers, config=self.config, total=total, kl=self.kl), 1.0, together=2)
