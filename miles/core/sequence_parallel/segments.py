"""Attention of packed segments that go on where others ended: each token sees its own segment up to itself, and all of its prefix.

Queries meet the prefix and their own segment apart. Each part gives its output and the logarithm of its softmax's sum, and the two merge
exactly (Milakov and Gimelshein, arXiv 1805.02867; Liu et al., Ring Attention, arXiv 2310.01889):

    lse = log(exp(lse_a) + exp(lse_b)),   out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

In the backward each part needs the merged output and lse alone. So neither a copy of the prefix for each segment nor a mask over both is
ever made, and what is kept for the backward is queries, keys, values, output and lse of the packed tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles.core.model.packed import padded_blocks

_PADDED_SHARE = 1.25  # padded scores over true ones, up to which lanes are computed together
_FEW_SCORES = 2**15  # so many scores more are always worth a call less


@dataclass(frozen=True)
class Lane:
    """Neighbouring segments with one prefix: `queries` tokens of the row from `first` on. `prefix`: its tokens' places among the sources, as
    ranges in order."""

    first: int
    queries: int
    prefix: tuple[range, ...]

    @property
    def keys(self) -> int:
        return sum(len(part) for part in self.prefix)


@dataclass(frozen=True)
class CrossBlock:
    """Lanes that attend to their prefixes together: [lanes, queries] x [lanes, keys], both padded."""

    lanes: tuple[Lane, ...]
    queries: int
    keys: int


def cross_blocks(lanes: Sequence[Lane]) -> list[CrossBlock]:
    """Lanes of similar size together, so that padding stays small. Deterministic."""
    blocks: list[list[Lane]] = []
    for lane in sorted(lanes, key=lambda x: (-x.keys, -x.queries, x.first)):
        if blocks and _worth([*blocks[-1], lane]):
            blocks[-1].append(lane)
        else:
            blocks.append([lane])
    return [CrossBlock(tuple(block), max(x.queries for x in block), max(x.keys for x in block)) for block in blocks]


def _worth(lanes: list[Lane]) -> bool:
    padded = len(lanes) * max(x.queries for x in lanes) * max(x.keys for x in lanes)
    return padded <= _PADDED_SHARE * sum(x.queries * x.keys for x in lanes) + _FEW_SCORES


def own_blocks(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """`(rows, padded length)` of the blocks in which segments of such lengths attend to themselves."""
    return padded_blocks(list(lengths))[0]


class SegmentLayout:
    """Where T packed tokens belong, on the device. Not a dataclass: FSDP2 rebuilds those.

    Args:
        lengths: of the segments in the row, each at least 1.
        lanes: of those segments that have a prefix.
    Attributes:
        lengths, lanes: as given. causal: `(rows, padded length)` of the blocks in which segments attend to themselves.
        crosses: the blocks in which they attend to their prefixes.
    """

    def __init__(self, lengths: Sequence[int], lanes: Sequence[Lane], device: torch.device):
        self.lengths, self.lanes, self.tokens = tuple(lengths), tuple(lanes), sum(lengths)
        self.causal, _, place_T = padded_blocks(list(lengths))
        self.place_T = None if place_T is None else place_T.to(device)
        self.crosses = [_Cross(block, self.tokens, device) for block in cross_blocks(lanes)]


class _Cross:
    """A `CrossBlock` as indices: of its tokens in the row, of their padded places, of its keys among the sources, and the mask over padding."""

    def __init__(self, block: CrossBlock, tokens: int, device: torch.device):
        self.shape = len(block.lanes), block.queries, block.keys
        count, queries, keys = self.shape
        places = [torch.arange(lane.queries) + number * queries for number, lane in enumerate(block.lanes)]
        rows = [torch.arange(lane.first, lane.first + lane.queries) for lane in block.lanes]
        row_N, place_N = torch.cat(rows), torch.cat(places)
        bounds = [0, *(lane.first + lane.queries for lane in block.lanes)]
        whole = bounds == [*(lane.first for lane in block.lanes), tokens]
        self.row_N = None if whole else row_N.to(device)
        self.place_N = None if len(place_N) == count * queries else place_N.to(device)
        self.source: slice | Tensor
        first = block.lanes[0].prefix
        if count == 1 and all(a.stop == b.start for a, b in itertools.pairwise(first)):
            self.source = slice(first[0].start, first[-1].stop)
        else:
            # Padding repeats a lane's first key; the mask hides it.
            indices = [torch.cat([torch.tensor(part) for part in lane.prefix]) for lane in block.lanes]
            padded = [torch.cat((index, index[:1].expand(keys - len(index)))) for index in indices]
            self.source = torch.cat(padded).to(device)
        self.mask_B11K: Tensor | None = None
        if any(lane.keys < keys for lane in block.lanes):
            hidden = torch.arange(keys) >= torch.tensor([[lane.keys] for lane in block.lanes])
            self.mask_B11K = torch.zeros(count, 1, 1, keys).masked_fill_(hidden[:, None, None], -torch.inf).to(device)

    def queries(self, x_THE: Tensor, groups: int) -> Tensor:
        """The block's rows of `x`, [B, G, rep * queries, E]: heads that share keys lie in one row of queries. Padding is 0."""
        count, queries, _ = self.shape
        x_NHE = x_THE if self.row_N is None else x_THE.index_select(0, self.row_N)
        if self.place_N is not None:
            x_NHE = x_NHE.new_zeros(count * queries, *x_NHE.shape[1:]).index_copy_(0, self.place_N, x_NHE)
        return x_NHE.unflatten(0, (count, queries)).unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)

    def rows(self, x_BGQE: Tensor) -> Tensor:
        """The inverse of `queries`: [N, H, E], N tokens of the block."""
        x_NHE = x_BGQE.unflatten(2, (-1, self.shape[1])).permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
        return x_NHE if self.place_N is None else x_NHE.index_select(0, self.place_N)

    def prefix(self, source_MGE: Tensor) -> Tensor:
        """Keys or values of the block's prefixes, [B, G, K, E]."""
        picked = source_MGE[self.source] if isinstance(self.source, slice) else source_MGE.index_select(0, self.source)
        return picked.unflatten(0, (self.shape[0], self.shape[2])).transpose(1, 2)

    def add_prefix(self, total_MGE: Tensor, grad_BGKE: Tensor) -> None:
        """Add the gradient of `prefix` to that of the sources."""
        grad_NGE = grad_BGKE.transpose(1, 2).flatten(0, 1).to(total_MGE.dtype)
        if isinstance(self.source, slice):
            total_MGE[self.source] += grad_NGE
        else:
            total_MGE.index_add_(0, self.source, grad_NGE)

    def mask(self, like: Tensor) -> Tensor | None:
        return None if self.mask_B11K is None else self.mask_B11K.to(like.dtype)


def segment_attention(
    query_THE: Tensor, key_TGE: Tensor, value_TGE: Tensor, source_keys: Sequence[Tensor], source_values: Sequence[Tensor], layout: SegmentLayout, scaling: float
) -> Tensor:
    """Attention output [T, H, E]; H is a multiple of G. Differentiable in everything.

    Args:
        source_keys, source_values: [M_i, G, E] each; laid end to end they are what `Lane.prefix` points into.
    """
    return _SegmentAttention.apply(query_THE, key_TGE, value_TGE, layout, scaling, *source_keys, *source_values)


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_THE: Tensor, key_TGE: Tensor, value_TGE: Tensor, layout: SegmentLayout, scaling: float, *sources: Tensor) -> Tensor:
        dtype = torch.promote_types(query_THE.dtype, torch.float32)
        output, lse_TH = _own(query_THE, key_TGE, value_TGE, layout, scaling)
        if layout.crosses:
            output = output.to(dtype)
            keys_MGE, values_MGE = joined(sources)
            for cross in layout.crosses:
                query = cross.queries(query_THE, key_TGE.shape[1])
                part, lse = _attend(query, cross.prefix(keys_MGE), cross.prefix(values_MGE), False, cross.mask(query), scaling)
                _merge(output, lse_TH, cross.rows(part), cross.rows(lse[..., None])[..., 0], cross.row_N)
        output = output.to(query_THE.dtype)
        ctx.save_for_backward(query_THE, key_TGE, value_TGE, output, lse_TH, *sources)
        ctx.layout, ctx.scaling = layout, scaling
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query_THE, key_TGE, value_TGE, output_THE, lse_TH, *sources = ctx.saved_tensors
        layout, scaling, groups = ctx.layout, ctx.scaling, key_TGE.shape[1]
        grad_THE = grads[0]
        grad_query, grad_key, grad_value = _own_backward(grad_THE, query_THE, key_TGE, value_TGE, output_THE, lse_TH, layout, scaling)
        if not layout.crosses:
            return grad_query, grad_key, grad_value, None, None
        keys_MGE, values_MGE = joined(sources)
        wide = torch.promote_types(keys_MGE.dtype, torch.float32)
        totals = torch.zeros_like(keys_MGE, dtype=wide), torch.zeros_like(values_MGE, dtype=wide)
        for cross in layout.crosses:
            query, grad, output = (cross.queries(x, groups) for x in (query_THE, grad_THE, output_THE))
            lse = cross.queries(lse_TH[..., None], groups)[..., 0]
            parts = _attend_backward(grad, query, cross.prefix(keys_MGE), cross.prefix(values_MGE), output, lse, False, cross.mask(query), scaling)
            rows_NHE = cross.rows(parts[0])
            grad_query = grad_query + rows_NHE if cross.row_N is None else grad_query.index_add(0, cross.row_N, rows_NHE)
            for total, part in zip(totals, parts[1:], strict=True):
                cross.add_prefix(total, part)
        lengths = [len(source) for source in sources[: len(sources) // 2]]
        # In the sum's own precision: a leaf that many passes add to asks for it by its grad_dtype.
        spread = [part for total in totals for part in total.split(lengths)]
        return grad_query, grad_key, grad_value, None, None, *spread


def joined(sources: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values of all sources, given keys first, laid end to end."""
    half = len(sources) // 2
    keys, values = list(sources[:half]), list(sources[half:])
    return (keys[0], values[0]) if half == 1 else (torch.cat(keys), torch.cat(values))


def _merge(output_THE: Tensor, lse_TH: Tensor, part_NHE: Tensor, lse_NH: Tensor, row_N: Tensor | None) -> None:
    """Merge another part of the keys, seen by the tokens at `row_N`, into output and lse, in place."""
    old_NHE, old_NH = (output_THE, lse_TH) if row_N is None else (output_THE.index_select(0, row_N), lse_TH.index_select(0, row_N))
    new_NH = torch.logaddexp(old_NH, lse_NH)
    merged = old_NHE * (old_NH - new_NH).exp_()[..., None]
    merged.addcmul_(part_NHE.to(merged.dtype), (lse_NH - new_NH).exp_()[..., None])
    if row_N is None:
        output_THE.copy_(merged)
        lse_TH.copy_(new_NH)
    else:
        output_THE.index_copy_(0, row_N, merged)
        lse_TH.index_copy_(0, row_N, new_NH)


def _own(query_THE: Tensor, key_TGE: Tensor, value_TGE: Tensor, layout: SegmentLayout, scaling: float) -> tuple[Tensor, Tensor]:
    """Causal attention within each segment: output [T, H, E] and lse [T, H]."""
    outputs, sums = [], []
    for query, key, value in _blocks(layout, query_THE, key_TGE, value_TGE):
        output, lse = _attend(query, key, value, True, None, scaling)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
        sums.append(lse.transpose(1, 2).flatten(0, 1))
    return _unpadded(outputs, layout), _unpadded(sums, layout)


def _own_backward(
    grad_THE: Tensor, query_THE: Tensor, key_TGE: Tensor, value_TGE: Tensor, output_THE: Tensor, lse_TH: Tensor, layout: SegmentLayout, scaling: float
) -> tuple[Tensor, ...]:
    blocks = _blocks(layout, grad_THE, query_THE, key_TGE, value_TGE, output_THE, lse_TH)
    parts = [_attend_backward(grad, query, key, value, output, lse, True, None, scaling) for grad, query, key, value, output, lse in blocks]
    return tuple(_unpadded([part.transpose(1, 2).flatten(0, 1) for part in column], layout) for column in zip(*parts, strict=True))


def _blocks(layout: SegmentLayout, *values: Tensor) -> list[tuple[Tensor, ...]]:
    """Each of `values` [T, H, ...] by causal blocks, [rows, H, length, ...]; padding is 0."""
    if layout.place_T is not None:
        padded = sum(rows * length for rows, length in layout.causal)
        values = tuple(x.new_zeros(padded, *x.shape[1:]).index_copy_(0, layout.place_T, x) for x in values)
    blocks, start = [], 0
    for rows, length in layout.causal:
        stop = start + rows * length
        blocks.append(tuple(x[start:stop].unflatten(0, (rows, length)).transpose(1, 2) for x in values))
        start = stop
    return blocks


def _unpadded(parts: list[Tensor], layout: SegmentLayout) -> Tensor:
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    return joined if layout.place_T is None else joined.index_select(0, layout.place_T)


def _attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """Output [B, H, Q, E] and lse [B, H, Q] of queries [B, H, Q, E] and keys [B, G, K, E]."""
    if query.device.type != "cpu":
        return plain_attend(query, key, value, causal, mask, scaling)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, attn_mask=mask, scale=scaling)


def _attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, causal: bool, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. `output` and `lse` are over all keys that the queries see, also in other parts."""
    if query.device.type != "cpu":
        return plain_attend_backward(grad, query, key, value, output, lse, causal, mask, scaling)
    # The kernel reads lse as it wrote it: queries before heads.
    lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return kernel(grad, query, key, value, output, lse, 0.0, causal, attn_mask=mask, scale=scaling)


def plain_attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """`_attend` for any device, in float32 or wider, with all scores at once. *Not measured*: on a GPU a fused kernel belongs here."""
    scores, _ = _scores(query, key, causal, mask, scaling)
    lse = scores.logsumexp(-1)
    output = (scores - lse[..., None]).exp() @ value.to(scores.dtype)[:, :, None]
    return output.flatten(1, 2).to(query.dtype), lse.flatten(1, 2)


def plain_attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, causal: bool, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`_attend_backward` for any device."""
    scores, heads = _scores(query, key, causal, mask, scaling)
    weights = (scores - lse.unflatten(1, heads)[..., None]).exp()
    grad, output, query = (x.unflatten(1, heads).to(scores.dtype) for x in (grad, output, query))
    wide_key, wide_value = (x.to(scores.dtype)[:, :, None] for x in (key, value))
    grad_scores = weights * (grad @ wide_value.transpose(-1, -2) - (grad * output).sum(-1, keepdim=True)) * scaling
    grad_query = (grad_scores @ wide_key).flatten(1, 2).to(key.dtype)
    grad_key = (grad_scores.transpose(-1, -2) @ query).sum(2).to(key.dtype)
    return grad_query, grad_key, (weights.transpose(-1, -2) @ grad).sum(2).to(value.dtype)


def _scores(query: Tensor, key: Tensor, causal: bool, mask: Tensor | None, scaling: float) -> tuple[Tensor, tuple[int, int]]:
    """Scaled scores [B, G, rep, Q, K], and (G, rep)."""
    heads = key.shape[1], query.shape[1] // key.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = query.unflatten(1, heads).to(dtype) @ key.to(dtype)[:, :, None].transpose(-1, -2) * scaling
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1), -torch.inf)
    if mask is not None:
        scores = scores + mask[:, :, None]
    return scores, heads
