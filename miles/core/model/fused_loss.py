"""Output projection, log-probs, entropies and the loss on them in one piece: forward and gradient of a chunk while its logits are there.

Nothing is recomputed in the backward, and what is kept for it are gradients of hidden states and projection, [N, D] and [V, D]: the bytes
do not grow with tokens x vocabulary. Three matrix products a chunk, as plain autograd over whole logits has them.

The loss of a chunk must be known when its log-probs are. It is, because losses of parts of a batch add up (`algorithms.contracts`): a part
is some whole sequences, or, where the loss looks at each token alone, any tokens. A part of more than `chunk` tokens is scored first, then
its logits are computed again, those of the last chunk excepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear as plain_linear

from miles.core.model.scoring import HeadGradients, Linear, check_temperature, chunks
from miles.core.model.token_softmax import Scores, gradient_rows_, score_rows

PartLoss = Callable[[slice, Tensor, Tensor | None], Tensor]
"""`(tokens of the part, their log-probs, their entropies or None) -> scalar`: that part's share of the loss. It may note what it was given."""


def fused_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    loss: PartLoss,
    parts: Sequence[slice],
    *,
    temperature: float,
    chunk: int,
    entropy: bool = False,
    entropy_gradient: bool = True,
    linear: Linear = plain_linear,
) -> Tensor:
    """The sum of `loss` over `parts`: a scalar in float32 (float64), differentiable once in hidden states and weight.

    Example: 4,096 tokens of 16 sequences, vocabulary 150,000, width 1,024, chunk 1,024, float32: 0.6 GB of logits at a time, and 0.6 GB of
    gradients until the backward, of which the projection's would come into being there anyway. Autograd over all logits keeps 4.9 GB.

    Args:
        hidden_ND, weight_VD, targets_N, temperature, entropy, linear: as in `scoring.score`.
        loss: called once a part, in order, with leaf tensors.
        parts: slices that cover 0..N in order, each a sum of its own; a single empty one for N = 0.
        chunk: tokens whose logits exist at once.
        entropy_gradient: False where the entropy is only reported: the loss then sees it as a constant.
    Raises:
        ValueError: the temperature is not positive.
    """
    check_temperature(temperature)
    assert [0, *(part.stop for part in parts)] == [*(part.start for part in parts), len(hidden_ND)], "parts must cover all tokens in order"
    options = temperature, chunk, entropy, entropy and entropy_gradient, linear
    return _FusedLoss.apply(hidden_ND, weight_VD, targets_N, loss, parts, options)


def even_parts(count: int, chunk: int) -> list[slice]:
    """0..count cut into the fewest slices of at most `chunk` tokens, of equal size but for the last: for losses that look at each token alone."""
    return chunks(count, -(-count // -(-count // chunk))) if count else [slice(0, 0)]


def whole_parts(lengths: Sequence[int], chunk: int) -> list[list[int]]:
    """Neighbours of `lengths` (tokens) grouped up to `chunk` tokens; a longer one is alone. Their places, in order.

    Example: lengths 300, 500, 400, 2000 and chunk 1024: [0, 1], [2], [3].
    """
    groups: list[list[int]] = []
    total = 0
    for place, length in enumerate(lengths):
        if groups and total + length <= chunk:
            groups[-1].append(place)
            total += length
        else:
            groups.append([place])
            total = length
    return groups


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, loss: PartLoss, parts: Sequence[slice], options: Any) -> Tensor:
        temperature, chunk, entropy, entropy_gradient, linear = options
        found = HeadGradients(hidden_ND, weight_VD, weight=ctx.needs_input_grad[1])
        total = hidden_ND.new_zeros((), dtype=torch.promote_types(hidden_ND.dtype, torch.float32))
        buffer = None
        if linear is plain_linear:
            longest = max(min(part.stop - part.start, chunk) for part in parts)
            buffer = hidden_ND.new_empty(longest, len(weight_VD))

        def logits_of(rows: slice) -> Tensor:
            if buffer is None:
                return linear(hidden_ND[rows], weight_VD)
            return torch.mm(hidden_ND[rows], weight_VD.T, out=buffer[: rows.stop - rows.start])

        for part in parts:
            pieces = [slice(part.start + rows.start, part.start + rows.stop) for rows in chunks(part.stop - part.start, chunk)]
            scores = []
            for rows in pieces:
                logits_CV = logits_of(rows)
                # The last piece's gradient is taken while its logits are there; the others' are computed again.
                last = rows is pieces[-1] and not entropy_gradient
                scores.append(score_rows(logits_CV, targets_N[rows], temperature, entropy, last=last))
            part_loss, grad_logprobs_N, grad_entropy_N = _differentiated(loss, part, scores, total.new_empty(0), entropy, entropy_gradient)
            total += part_loss
            for number in reversed(range(len(pieces))):
                rows = pieces[number]
                if number < len(pieces) - 1:
                    logits_CV = logits_of(rows)
                own = slice(rows.start - part.start, rows.stop - part.start)
                of_entropy_C = None if grad_entropy_N is None else grad_entropy_N[own]
                found.add(rows, gradient_rows_(logits_CV, targets_N[rows], scores[number], grad_logprobs_N[own], of_entropy_C, temperature))
        ctx.save_for_backward(found.hidden_ND, found.weight_VD)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD = ctx.saved_tensors
        if not grads[0].is_cuda and grads[0] == 1:  # as backward() of the loss itself has it: no pass over the projection's gradient
            return hidden_ND, weight_VD, *[None] * 4
        return hidden_ND.mul_(grads[0]), None if weight_VD is None else weight_VD.mul_(grads[0]), *[None] * 4


def _differentiated(
    loss: PartLoss, part: slice, scores: Sequence[Scores], empty: Tensor, entropy: bool, entropy_gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The part's loss, and its gradients with respect to log-probs and, where asked for and there, entropies."""
    logprobs_N = torch.cat([empty, *(s.logprobs_C for s in scores)]).requires_grad_()
    entropy_N = torch.cat([empty, *(s.entropy_C for s in scores if s.entropy_C is not None)]).requires_grad_(entropy_gradient) if entropy else None
    with torch.enable_grad():
        value = loss(part, logprobs_N, entropy_N)
    leaves = [logprobs_N] if entropy_N is None or not entropy_gradient else [logprobs_N, entropy_N]
    grad_logprobs_N, *others = torch.autograd.grad(value, leaves, allow_unused=True)
    return value.detach(), torch.zeros_like(logprobs_N) if grad_logprobs_N is None else grad_logprobs_N, others[0] if others else None
