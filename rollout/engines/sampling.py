"""Chooses the next token of each row: its own temperature, top-k, top-p and random numbers, whatever other rows are beside it.

The random number of a row depends on its seed and on the place of the token in the response alone (a counter-based hash, no
generator state), so a response that was interrupted goes on with the numbers it would have had.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.core.model.token_softmax import softmax_parts

_CHUNK_ELEMENTS = 2**23  # rows x vocabulary sampled at once: 64 MiB of float64
_WEYL, _MIX_1, _MIX_2 = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@dataclass(frozen=True)
class RowParams:
    """Sampling parameters of N rows. `temperature_N` float32, 0 is greedy; `top_k_N` int64, 0 keeps all; `top_p_N` float64.

    `uniform_temperature` is the temperature of every row, or None where rows differ; `filtered` says whether any row uses
    top-k or top-p, and `greedy` whether any row is greedy.
    """

    temperature_N: Tensor
    top_k_N: Tensor
    top_p_N: Tensor
    uniform_temperature: float | None
    filtered: bool
    greedy: bool

    @classmethod
    def of(cls, temperature_N: NDArray[np.float64], top_k_N: NDArray[np.int64], top_p_N: NDArray[np.float64]) -> RowParams:
        same = bool((temperature_N == temperature_N[:1]).all())
        return cls(
            torch.from_numpy(temperature_N.astype(np.float32)),
            torch.from_numpy(top_k_N.copy()),
            torch.from_numpy(top_p_N.copy()),
            float(temperature_N[0]) if same and len(temperature_N) else None,
            bool((top_k_N > 0).any() or (top_p_N < 1).any()),
            bool((temperature_N == 0).any()),
        )

    def rows(self, part: slice) -> RowParams:
        return RowParams(self.temperature_N[part], self.top_k_N[part], self.top_p_N[part], self.uniform_temperature, self.filtered, self.greedy)


def choose(logits_NV: Tensor, params: RowParams, uniforms_N: Tensor, exact: bool = False) -> tuple[Tensor, Tensor]:
    """One token for each row, by inversion of the cumulative distribution, and its log-probability.

    Args:
        logits_NV: float32.
        uniforms_N: float64 in [0, 1 - 2^-52], from `uniforms`.
        exact: compute log-probs by the very operations of `miles.core.model.token_softmax`, instead of the fewest.
    Returns:
        `(tokens_N int64, logprobs_N float32)`; log-probs at the row's temperature (1 where greedy), before top-k and top-p.
    Raises:
        ValueError: a row's logits are not finite.
    """
    rows = max(1, _CHUNK_ELEMENTS // logits_NV.shape[1])
    if logits_NV.shape[0] <= rows:
        return _choose(logits_NV, params, uniforms_N, exact)
    parts = [slice(start, start + rows) for start in range(0, len(logits_NV), rows)]
    tokens, logprobs = zip(*(_choose(logits_NV[part], params.rows(part), uniforms_N[part], exact) for part in parts), strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def key_of(seed: int) -> np.uint64:
    """The key of a row's random numbers."""
    return _mix(np.array([seed % 2**64], np.uint64) * _WEYL + _WEYL)[0]


def uniforms(key_N: NDArray[np.uint64], place_N: NDArray[np.int64]) -> NDArray[np.float64]:
    """The number in [0, 1 - 2^-52] of each row at each place: splitmix64's output function over key and place. Wraps around at 2^64."""
    bits_N = _mix(place_N.astype(np.uint64) * _WEYL + key_N)
    return (bits_N >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
    return bits ^ (bits >> np.uint64(31))


def _choose(logits_NV: Tensor, params: RowParams, uniforms_N: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
    scaled_NV = _at_temperature(logits_NV, params)
    weights_NV, normalizer_N = softmax_parts(scaled_NV) if exact else (scaled_NV.softmax(-1), None)
    tokens_N = _sampled(weights_NV, params, uniforms_N)
    if params.greedy:
        tokens_N = torch.where(params.temperature_N == 0, scaled_NV.argmax(-1), tokens_N)
    tokens_N1 = tokens_N[:, None]
    if normalizer_N is None:
        return tokens_N, weights_NV.gather(1, tokens_N1).squeeze(1).log_()
    return tokens_N, scaled_NV.gather(1, tokens_N1).squeeze(1) - normalizer_N


def _at_temperature(logits_NV: Tensor, params: RowParams) -> Tensor:
    if params.uniform_temperature in (0.0, 1.0):
        return logits_NV
    if params.uniform_temperature is not None:
        return logits_NV / params.uniform_temperature
    return logits_NV / torch.where(params.temperature_N == 0, 1.0, params.temperature_N)[:, None]


def _sampled(weights_NV: Tensor, params: RowParams, uniforms_N: Tensor) -> Tensor:
    """The first token whose cumulative weight exceeds uniform * total: never one of weight 0. Weights are unnormalised."""
    if params.filtered:
        weights_NV = _filter(weights_NV, params)
    cumulative_NV = weights_NV.cumsum(-1, dtype=torch.float64)
    if not math.isfinite(float(cumulative_NV[:, -1].sum())):
        raise ValueError("the model's logits are not finite: its weights hold NaN or infinity, or overflow in the forward")
    # A uniform is at most 1 - 2^-52, so its product with the total is below the total, rounded too.
    threshold_N1 = cumulative_NV[:, -1:] * uniforms_N[:, None]
    return torch.searchsorted(cumulative_NV, threshold_N1, right=True).squeeze(1)


def _filter(weights_NV: Tensor, params: RowParams) -> Tensor:
    """0 for every token outside the row's top-k and outside its nucleus: the likeliest tokens up to the one that reaches top_p.

    Both are taken of the full distribution, as SGLang does. Of equal tokens the one with the lower id counts as likelier.
    """
    sorted_NV, order_NV = weights_NV.sort(dim=-1, descending=True, stable=True)
    cumulative_NV = sorted_NV.cumsum(-1, dtype=torch.float64)
    nucleus_N1 = params.top_p_N[:, None] * cumulative_NV[:, -1:]
    top_k_N1 = params.top_k_N[:, None]
    rank_V = torch.arange(weights_NV.shape[1], device=weights_NV.device)
    outside_NV = (rank_V >= top_k_N1) & (top_k_N1 > 0)
    outside_NV |= (cumulative_NV - sorted_NV >= nucleus_N1) & (params.top_p_N[:, None] < 1)
    outside_NV[:, 0] = False
    return torch.zeros_like(weights_NV).scatter_(1, order_NV, sorted_NV.masked_fill_(outside_NV, 0.0))
