"""Direct preference optimisation.

    z = beta ((log pi(w) - log ref(w)) - (log pi(l) - log ref(l)));   L = -(1 - eps) log sigmoid(z) - eps log sigmoid(-z)

Rafailov et al., arXiv 2305.18290, eq. 7; `label_smoothing` eps is the share of labels that are wrong (conservative DPO, Mitchell 2023).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from algorithms.ratio import as_float


def dpo(
    chosen_P: Tensor, rejected_P: Tensor, reference_chosen_P: Tensor, reference_rejected_P: Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> Tensor:
    """Losses [P]. Arguments: log-probs of whole answers (sums over their tokens) under policy and reference, [P]."""
    z_P = beta * log_ratio_margin(chosen_P, rejected_P, reference_chosen_P, reference_rejected_P)
    return -(1 - label_smoothing) * logsigmoid(z_P) - label_smoothing * logsigmoid(-z_P)


def log_ratio_margin(chosen_P: Tensor, rejected_P: Tensor, reference_chosen_P: Tensor, reference_rejected_P: Tensor) -> Tensor:
    """How much more the policy has moved towards the chosen answer than towards the rejected one, nats, [P]."""
    moved_chosen_P = as_float(chosen_P) - as_float(reference_chosen_P)
    return moved_chosen_P - (as_float(rejected_P) - as_float(reference_rejected_P))
