"""SimPO: length-normalised log-probs as rewards, with a margin and without a reference model.

    L = -log sigmoid(beta (mean log-prob(w) - mean log-prob(l)) - gamma)

Meng et al., arXiv 2405.14734, eq. 6.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from algorithms.ratio import as_float


def simpo(chosen_mean_P: Tensor, rejected_mean_P: Tensor, *, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """Losses [P]. Arguments: mean log-prob per token of each answer, [P]. The paper's gamma / beta lies between 0.3 and 0.6 mostly."""
    return -logsigmoid(beta * (as_float(chosen_mean_P) - as_float(rejected_mean_P)) - gamma)
