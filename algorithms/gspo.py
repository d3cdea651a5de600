"""GSPO: the importance ratio of a sequence is the geometric mean of its tokens', and the clip holds whole sequences.

    s_i = exp(mean over tokens of log(pi / pi_old));   L_i = -min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)
    token form:  s_i,t = sg(s_i) * pi / sg(pi)         the same values and, for equal advantages, the same gradients

Zheng et al., arXiv 2507.18071. Means over sequences are the paper's: `aggregation = "sequence_mean"`. Its clips
are narrow: 3e-4 and 4e-4.
"""

from __future__ import annotations

from algorithms.aggregate import sequence_average
from algorithms.config import AlgorithmConfig
from algorithms.contracts import TokenLoss, Tokens
from algorithms.ppo_clip import clipped_surrogate
from algorithms.ratio import bounded_exp, log_ratio
from algorithms.registry import register_loss


@register_loss("gspo")
def gspo(tokens: Tokens, config: AlgorithmConfig) -> TokenLoss:
    """Every token of a sequence has the sequence's loss (for its own advantage)."""
    ratio_S = bounded_exp(sequence_average(log_ratio(tokens), tokens))
    return clipped_surrogate(ratio_S[tokens.sequence_N], tokens.advantages_N, config)


@register_loss("gspo_token")
def gspo_token(tokens: Tokens, config: AlgorithmConfig) -> TokenLoss:
    """For advantages that differ within a sequence: the sequence's ratio, each token's own gradient."""
    ratio_S = bounded_exp(sequence_average(log_ratio(tokens).detach(), tokens))
    own_N = (tokens.logprobs_N - tokens.logprobs_N.detach()).exp()
    return clipped_surrogate(ratio_S[tokens.sequence_N] * own_N, tokens.advantages_N, config)
