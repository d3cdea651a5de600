"""Reward models from pairs.

    L = -log sigmoid(r(w) - r(l) - margin) + centre (r(w) + r(l))^2

Bradley and Terry, 1952; margin: Llama 2, arXiv 2307.09288, section 3.2.2. The likelihood leaves a constant free; `centre` keeps the
rewards around 0 (arXiv 2312.09244).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from algorithms.ratio import as_float


def bradley_terry(chosen_P: Tensor, rejected_P: Tensor, *, margin_P: Tensor | float = 0.0, centre: float = 0.0) -> Tensor:
    """Losses [P]. Arguments: the model's scalar reward of each answer, [P]; how far apart they should be at least."""
    chosen_P, rejected_P = as_float(chosen_P), as_float(rejected_P)
    return -logsigmoid(chosen_P - rejected_P - margin_P) + centre * (chosen_P + rejected_P).square()
