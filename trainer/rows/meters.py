"""Sums and maxima of one training step, kept on the device until the end and then made equal on every rank by one exchange."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from algorithms.contracts import Tokens, masked


class Meters:
    """Every rank adds the same names, since each runs the loss on a dummy row where it has no other."""

    def __init__(self, device: torch.device):
        self.device = device
        self.comparing = True
        self._sums: dict[str, Tensor] = {}
        self._compared: list[Tensor] = []  # tokens, sum and maximum of |engine - trainer|, each row's

    def add(self, name: str, value: Tensor) -> None:
        value = value.detach().double()
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def mismatch(self, tokens: Tokens) -> None:
        """Compare the engine's record with the trainer's own scores, while `comparing`."""
        if not self.comparing:
            return
        difference_N = masked((tokens.rollout_logprobs_N - tokens.logprobs_N.detach()).abs(), tokens.mask_N).double()
        largest = difference_N.max() if len(difference_N) else difference_N.sum()
        self._compared.append(torch.stack((tokens.mask_N.sum().double(), difference_N.sum(), largest)))

    def reduced(self, total: int, world: int, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """Sums over the `world` ranks of `group` (None: all), each divided by the step's `total` (tokens or pairs); mismatch by the tokens
        compared. Collective."""
        names = sorted(self._sums)
        compared = torch.stack(self._compared) if self._compared else torch.zeros(1, 3, dtype=torch.float64, device=self.device)
        sums = torch.stack([self._sums[name] for name in names] + [compared[:, 0].sum(), compared[:, 1].sum()]) if names else compared[0, :2]
        largest = compared[:, 2].max()
        if world > 1:
            dist.all_reduce(sums, group=group)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        *values, number, difference = sums.tolist()
        metrics = {name: value / max(total, 1) for name, value in zip(names, values, strict=True)}
        if self._compared:
            metrics["mismatch/logprob_abs_mean"] = difference / max(number, 1)
            metrics["mismatch/logprob_abs_max"] = float(largest)
        return metrics
