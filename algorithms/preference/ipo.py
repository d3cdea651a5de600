"""Identity preference optimisation: the margin is pulled to a finite target, so certain preferences cannot drive it to infinity.

    L = (margin - 1 / (2 beta))^2,   margin as in DPO

Azar et al., arXiv 2310.12036, eq. 17.
"""

from __future__ import annotations

from torch import Tensor

from algorithms.preference.dpo import log_ratio_margin


def ipo(chosen_P: Tensor, rejected_P: Tensor, reference_chosen_P: Tensor, reference_rejected_P: Tensor, *, beta: float = 0.1) -> Tensor:
    """Losses [P]. Arguments as in `dpo`."""
    return (log_ratio_margin(chosen_P, rejected_P, reference_chosen_P, reference_rejected_P) - 1 / (2 * beta)).square()
