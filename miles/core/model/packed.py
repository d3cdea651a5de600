"""Sequences packed end to end in one row, through a plain or FSDP2-wrapped transformers model, without leaking into each other.

The root module is called, so that FSDP2's hooks run. A context object travels through the call as a keyword argument and
tells each attention layer where the sequences lie (not a global: the recompute of a checkpointed layer would read another
call's). Output head and scoring run inside the root's forward, where the head's weight is whole, on the scored tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as plain_linear
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from miles.core.model.fused_loss import PartLoss, fused_loss
from miles.core.model.scoring import score

ATTENTION = "miles"
_FIRST_TOKEN = "the first token of a sequence has nothing before it and no log-probability"
_PADDED_SHARE = 1.25  # a block of sequences is padded to its longest one by at most this factor


def packed_logprobs(
    model: PreTrainedModel,
    tokens_T: Tensor,
    positions_T: Tensor,
    sequence_T: Tensor,
    target_index_N: Tensor,
    temperature: float,
    chunk: int,
    entropy: bool = False,
    entropy_gradient: bool = True,
    first_T: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of the tokens at `target_index_N`, each given the tokens before it in its own sequence.

    Example: sequences [5 6 7] and [8 9] packed as tokens 5 6 7 8 9, positions 0 1 2 0 1, sequence 0 0 0 1 1;
    target_index [1, 2, 4] scores 6 | 5, 7 | 5 6 and 9 | 8.

    Args:
        model: a causal language model; under FSDP2 every rank must call, if need be with no targets (N = 0).
        tokens_T, positions_T, sequence_T: int64; each sequence is contiguous and its positions begin at 0.
        target_index_N: int64 places of the scored tokens; never the first token of a sequence.
        temperature, chunk, entropy, entropy_gradient: as in `scoring.score`.
        first_T: int64 places, `miles.data.common.first_places`: what sequences begin with in common then goes through the layers once, attention
            excepted. None: every token does.
    Returns:
        `(logprobs_N, entropy_N or None)`, float32 (float64 for a float64 model), with gradients to every parameter.
    Raises:
        ValueError: the model's logits are not `hidden @ weight.T` (a biased, capped or scaled head).
    """
    assert bool((positions_T[target_index_N] > 0).all()), _FIRST_TOKEN
    targets_N = tokens_T[target_index_N]
    head = output_head(model)
    linear = getattr(model, "batch_invariant_linear", plain_linear)

    def scored(hidden_1ND: Tensor) -> Tensor:
        logprobs_N, entropy_N = score(hidden_1ND[0], head.weight, targets_N, temperature, chunk, entropy, linear, entropy_gradient)
        return torch.stack((logprobs_N, logprobs_N if entropy_N is None else entropy_N))

    with _head_forward(head, scored):
        values_2N = _call(model, *_laid(model, tokens_T, positions_T, sequence_T, target_index_N - 1, first_T))
    if not entropy:
        return values_2N[0], None
    return values_2N[0], values_2N[1] if entropy_gradient else values_2N[1].detach()


def packed_loss(
    model: PreTrainedModel,
    tokens_T: Tensor,
    positions_T: Tensor,
    sequence_T: Tensor,
    target_index_N: Tensor,
    loss: PartLoss,
    parts: Sequence[slice],
    *,
    temperature: float,
    chunk: int,
    entropy: bool = False,
    entropy_gradient: bool = True,
    first_T: Tensor | None = None,
) -> Tensor:
    """The sum over `parts` of a loss on the log-probs of the tokens at `target_index_N`: a scalar, to be differentiated once.

    The same gradients as by `packed_logprobs`, without logits that are computed again or kept: `fused_loss.fused_loss`, where `loss`, `parts`
    and the options are explained. Other arguments and errors as in `packed_logprobs`.
    """
    assert bool((positions_T[target_index_N] > 0).all()), _FIRST_TOKEN
    targets_N = tokens_T[target_index_N]
    linear = getattr(model, "batch_invariant_linear", plain_linear)

    def forward(hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
        return fused_loss(
            hidden_ND,
            weight_VD,
            targets_N,
            loss,
            parts,
            temperature=temperature,
            chunk=chunk,
            entropy=entropy,
            entropy_gradient=entropy_gradient,
            linear=linear,
        )

    return through_head(model, tokens_T, positions_T, sequence_T, target_index_N - 1, forward, first_T)


def through_head(
    model: PreTrainedModel,
    tokens_T: Tensor,
    positions_T: Tensor,
    sequence_T: Tensor,
    place_N: Tensor,
    forward: Callable[[Tensor, Tensor], Tensor],
    first_T: Tensor | None = None,
) -> Tensor:
    """`forward(hidden_ND, head_weight_VD)`, computed where the output head stands, on the hidden states at `place_N` (int64, may be empty).

    The weight is whole inside of `forward` alone. What it returns must not be a view: FSDP2 hooks it. Arguments as in `packed_logprobs`.
    """
    tokens_T, positions_T, rows, place_N = _laid(model, tokens_T, positions_T, sequence_T, place_N, first_T)
    return through_head_of(model, tokens_T, positions_T, rows, place_N, forward)


def through_head_of(
    model: PreTrainedModel, tokens_T: Tensor, positions_T: Tensor, rows: Any, place_N: Tensor | int, forward: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """`through_head` with an attention context of one's own: `rows.attend(...)` as `PackedRows.attend`, called by each layer with its number."""
    head = output_head(model)
    with _head_forward(head, lambda hidden_1ND: forward(hidden_1ND[0], head.weight)):
        return _call(model, tokens_T, positions_T, rows, place_N)


def forward_hidden(model: PreTrainedModel, tokens_T: Tensor, positions_T: Tensor, sequence_T: Tensor) -> Tensor:
    """Hidden states [T, D] after the final norm, for heads other than the language model's own. Arguments as in `packed_logprobs`."""
    with _head_forward(output_head(model), torch.clone):  # not the view that the root would return: FSDP2 hooks its output
        return _call(model, tokens_T, positions_T, rows_of(model, sequence_T), 0)[0]


def output_head(model: PreTrainedModel) -> nn.Linear:
    """The module that turns hidden states into logits.

    Raises:
        ValueError: the logits are not `hidden @ weight.T`: a bias, or a cap or scale after it.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ValueError(f"{type(model).__name__} has no linear output head that could be scored (found {type(head).__name__})")
    if head.bias is not None:
        raise ValueError(f"{type(model).__name__}: the output head has a bias; log-probs are computed for bias-free heads only")
    for option in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        value = getattr(model.config, option, None)
        if value not in (None, 1, 1.0):
            raise ValueError(f"{type(model).__name__}: config.{option} = {value} changes the logits after the output head; log-probs would be wrong")
    return head


class PackedRows:
    """Where T packed tokens belong; computes one layer's causal attention within each sequence.

    Sequences of similar length are gathered into padded blocks. Padding lies behind a sequence's end, where causal
    attention never looks, so no mask is needed and no T x T matrix exists. Not a dataclass: FSDP2 rebuilds those.

    With `first_T` (as in `packed_logprobs`) the row that attends has only the tokens at `kept_U`, and `number_T` says which of these stands for
    each token; every sequence still attends whole. Both are None without.
    """

    def __init__(self, sequence_T: Tensor, first_T: Tensor | None = None):
        lengths = torch.unique_consecutive(sequence_T, return_counts=True)[1].tolist()
        self.lengths: list[int] = lengths
        self.blocks, gather, scatter = padded_blocks(lengths)
        device = sequence_T.device
        self.gather_M = None if gather is None else gather.to(device)
        self.scatter_T = None if scatter is None else scatter.to(device)
        self.kept_U: Tensor | None = None
        self.number_T: Tensor | None = None
        if first_T is not None:
            itself_T = first_T == torch.arange(len(first_T), device=device)
            self.kept_U, self.number_T = itself_T.nonzero().squeeze(1), (itself_T.cumsum(0) - 1)[first_T]
            # From padded places to tokens of the short row, whose keys and values may be wanted several times, and back.
            self.gather_M = self.number_T if self.gather_M is None else self.number_T[self.gather_M]
            self.scatter_T = self.kept_U if self.scatter_T is None else self.scatter_T[self.kept_U]

    def attend(self, layer: int, query_THE: Tensor, key_TGE: Tensor, value_TGE: Tensor, scaling: float, dropout: float, window: int | None) -> Tensor:
        """Attention output [T, H, E] of layer number `layer`; H is a multiple of G."""
        if self.gather_M is not None:
            query_THE, key_TGE, value_TGE = (x.index_select(0, self.gather_M) for x in (query_THE, key_TGE, value_TGE))
        outputs = []
        # Split once: the gradient of a slice is as long as what it was cut from, the one of a split is its parts laid end to end.
        sizes = [rows * length for rows, length in self.blocks]
        blocks = zip(self.blocks, query_THE.split(sizes), key_TGE.split(sizes), value_TGE.split(sizes), strict=True)
        for shape, *parts in blocks:
            query, key, value = (x.unflatten(0, shape).transpose(1, 2) for x in parts)
            outputs.append(_causal(query, key, value, scaling, dropout, window).transpose(1, 2).flatten(0, 1))
        output_THE = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if self.scatter_T is not None:
            output_THE = output_THE.index_select(0, self.scatter_T)
        return output_THE


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float, dropout: float, window: int | None) -> Tensor:
    length, mask = query.shape[2], None
    if window is not None and length > window:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, dropout_p=dropout, scale=scaling, enable_gqa=grouped)


def padded_blocks(lengths: list[int]) -> tuple[list[tuple[int, int]], Tensor | None, Tensor | None]:
    """Blocks as `(rows, padded length)`, the packed index of every padded place [M], and the padded place of every token [T].

    Both indices are None where the tokens already lie as the blocks want them: one sequence, or all of one length.
    """
    if len(set(lengths)) == 1:
        return [(len(lengths), lengths[0])], None, None
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    for i in order:
        if groups and lengths[groups[-1][0]] <= _PADDED_SHARE * lengths[i]:
            groups[-1].append(i)
        else:
            groups.append([i])
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    gather, place, scatter = [], 0, [torch.empty(0)] * len(lengths)
    for group in groups:
        longest = lengths[group[0]]
        for i in group:
            gather.append(torch.arange(longest).clamp_(max=lengths[i] - 1).add_(starts[i]))
            scatter[i] = torch.arange(place, place + lengths[i])
            place += longest
    return [(len(group), lengths[group[0]]) for group in groups], torch.cat(gather), torch.cat(scatter)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Let the model's attention layers take a context (`PackedRows` or a decoder's). Done once; cheap to repeat."""
    if model.config._attn_implementation != ATTENTION:
        model.set_attn_implementation(ATTENTION)


def rows_of(model: PreTrainedModel, sequence_T: Tensor, first_T: Tensor | None = None) -> PackedRows:
    """The attention context of whole sequences in one row, batch-invariant where the model is."""
    return getattr(model, "batch_invariant_rows", PackedRows)(sequence_T, first_T)


def _laid(
    model: PreTrainedModel, tokens_T: Tensor, positions_T: Tensor, sequence_T: Tensor, place_N: Tensor, first_T: Tensor | None
) -> tuple[Tensor, Tensor, PackedRows, Tensor]:
    """Tokens and positions of the row that the model is given, its attention context, and where in it the hidden states of `place_N` are."""
    rows = rows_of(model, sequence_T, first_T)
    if rows.kept_U is None or rows.number_T is None:
        return tokens_T, positions_T, rows, place_N
    return tokens_T[rows.kept_U], positions_T[rows.kept_U], rows, rows.number_T[place_N]


def _call(model: PreTrainedModel, tokens_T: Tensor, positions_T: Tensor, rows: Any, keep: Tensor | int) -> Tensor:
    use_packed_attention(model)
    output = model(input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False, logits_to_keep=keep, rows=rows)
    return output.logits


@contextmanager
def _head_forward(head: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let `head(hidden)` answer `forward(hidden)` for one call. Its hooks still run and its parameters keep their names."""
    head.forward = forward
    try:
        yield
    finally:
        del head.forward


def window_of(attention: Any) -> int | None:
    """Tokens that a transformers attention module looks back at, itself included; None: all of them."""
    # Mistral's layers all have the window of the configuration; Qwen's say for themselves whether they have one.
    window: int | None = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    return window


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    rows: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if rows is None:
        raise ValueError(
            "this model's attention was set to packed rows, but it was called without them: "
            "call it through miles.core.model.packed, or model.set_attn_implementation('sdpa') first"
        )
    query_THE, key_TGE, value_TGE = (x[0].transpose(0, 1) for x in (query, key, value))
    return rows.attend(module.layer_idx, query_THE, key_TGE, value_TGE, scaling, dropout, sliding_window)[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    """The context knows which tokens see each other."""


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)
