"""What the routers of a mixture of experts did with each sequence, and the loss that keeps the experts' loads even.

    balance of a sequence and layer = X / K * sum over experts x of f_x P_x
    f_x: share of the sequence's T tokens that chose x, among their K experts each (no gradient)
    P_x: mean over its tokens of the router's softmax for x

It is 1 where loads and probabilities are even, and larger the more both crowd. DeepSeek-V3, arXiv 2412.19437, equations 17 to 20, for
routers with a softmax (equations 4 to 6 of Switch Transformers, arXiv 2101.03961, per sequence). A sequence's balance depends on no other
sequence, so the gradient does not depend on how a batch is split; what sequences begin with in common counts in each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ROUTER = "Qwen3MoeTopKRouter"
"""Of transformers: a softmax of what its outputs begin with; they end with the chosen experts."""


@dataclass(frozen=True, eq=False)
class Routed:
    """Sums over the tokens of S sequences or parts of them, for L layers and X experts, in float32 or wider.

    Attributes:
        probability_SLX: of the routers' softmax, with its graph.
        chosen_SLX: how many tokens chose the expert.
    """

    probability_SLX: Tensor
    chosen_SLX: Tensor

    def balance_S(self, length_S: Tensor) -> Tensor:
        """The balance of each sequence, of so many tokens, averaged over layers: [S]."""
        experts = self.chosen_SLX.shape[-1]
        per_token = self.chosen_SLX.sum(-1, keepdim=True).clamp(min=1)  # T x K
        share_SLX = self.chosen_SLX / per_token
        mean_SLX = self.probability_SLX / length_S.clamp(min=1)[:, None, None]
        return experts * (share_SLX * mean_SLX).sum(-1).mean(-1)


class Routers:
    """The routers of a model; while `watched`, what they say is noted, layer by layer.

    Raises:
        ValueError: the model has none, or of a kind that is not known here.
    """

    def __init__(self, model: nn.Module):
        found = [module for module in model.modules() if type(module).__name__.endswith("Router")]
        if {type(module).__name__ for module in found} != {ROUTER}:
            what = f"routes by {', '.join(sorted({type(m).__name__ for m in found}))}" if found else "is no mixture of experts"
            raise ValueError(f"trainer.balance_coef knows the routers of qwen3_moe alone, and {type(model).__name__} {what}: set it to 0")
        self._seen: list[tuple[Tensor, Tensor]] | None = None
        for module in found:
            module.register_forward_hook(self._note)

    @contextmanager
    def watched(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """One call of the model, and into what its routers' logits [T, X] and choices [T, K] go. A checkpointed layer that is computed again
        in the backward is not watched any more, and does the same operations as before."""
        seen: list[tuple[Tensor, Tensor]] = []
        self._seen = seen
        try:
            yield seen
        finally:
            self._seen = None

    def _note(self, module: nn.Module, inputs: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if self._seen is not None:
            self._seen.append((output[0], output[-1]))


def routed(seen: list[tuple[Tensor, Tensor]], sequence_T: Tensor, count: int, number_T: Tensor | None = None) -> Routed:
    """Sums of a call over its `count` sequences: `sequence_T` says whose each token is, `number_T` which of the computed tokens stands for it."""
    probabilities, choices = [], []
    for logits_TX, chosen_TK in seen:
        dtype = torch.promote_types(logits_TX.dtype, torch.float32)
        probability_TX = logits_TX.to(dtype).softmax(-1)
        one_TX = torch.zeros_like(probability_TX).scatter_(1, chosen_TK, 1.0)
        if number_T is not None:
            probability_TX, one_TX = probability_TX.index_select(0, number_T), one_TX.index_select(0, number_T)
        empty_SX = probability_TX.new_zeros(count, probability_TX.shape[1])
        probabilities.append(empty_SX.index_add(0, sequence_T, probability_TX))
        choices.append(empty_SX.index_add(0, sequence_T, one_TX.detach()))
    return Routed(torch.stack(probabilities, 1), torch.stack(choices, 1))
