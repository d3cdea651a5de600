"""What compressing a layer's activations does to the gradient, from a few micro-batches on which each layer was compressed alone.

    risk of layer u in a micro-batch  =  k_u e_u E,      k_u = max(0, sum xy / sum x^2)  with  x = E e,  y = |gradient with u compressed - gradient|

E is the micro-batch's exposure, the sum of |dL/d log-prob| (1 - p) over its response tokens, which is known before its backward: every token of
a dense decoder depends on every layer, and a certain one's log-prob on nothing. e is what compression loses of the tensor, relative to its norm;
e_u is its mean. Errors of several layers and micro-batches add up at most, so a sum of risks is a bound as good as the calibration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Trial:
    """One layer compressed alone in one micro-batch. `error`: gradient norm of the difference, absolute."""

    exposure: float
    loss: float
    error: float


@dataclass(frozen=True)
class Calibration:
    """`slope`: k_u, `loss`: mean e_u, by layer. A layer that could never be compressed has an infinite slope."""

    slope: tuple[float, ...]
    loss: tuple[float, ...]

    def risk(self, layer: int, exposure: float) -> float:
        """Expected norm of the gradient's error."""
        return self.per_exposure(layer) * exposure

    def per_exposure(self, layer: int) -> float:
        return self.slope[layer] * self.loss[layer]

    def state(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of_state(state: dict[str, Any]) -> Calibration:
        return Calibration(slope=tuple(state["slope"]), loss=tuple(state["loss"]))


def calibrate(trials: Sequence[Sequence[Trial]]) -> Calibration:
    """From each layer's trials."""
    return Calibration(slope=tuple(_slope(own) for own in trials), loss=tuple(sum(t.loss for t in own) / len(own) if own else 1.0 for own in trials))


def _slope(trials: Sequence[Trial]) -> float:
    """Of the least-squares line through 0."""
    if not trials:
        return float("inf")
    xs = [t.exposure * t.loss for t in trials]
    square = sum(x * x for x in xs)
    # Without exposure there is no gradient, and nothing was learnt of its error.
    return max(0.0, sum(x * t.error for x, t in zip(xs, trials, strict=True)) / square) if square > 0 else float("inf")
