"""`segment_attention` whose output for a token has the bits of the token's whole sequence computed alone, by an engine too.

Each segment's queries meet the tiles of its whole sequence, prefix first, as `batch_invariant` lays them. The backward uses the plain operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from miles.core.model.batch_invariant import attend_block
from miles.core.sequence_parallel.segments import Lane, SegmentLayout, joined, segment_attention


def invariant_segment_attention(
    query_THE: Tensor, key_TGE: Tensor, value_TGE: Tensor, source_keys: Sequence[Tensor], source_values: Sequence[Tensor], layout: SegmentLayout, scaling: float
) -> Tensor:
    """As `segment_attention`."""
    return _InvariantSegments.apply(query_THE, key_TGE, value_TGE, layout, scaling, *source_keys, *source_values)


class _InvariantSegments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_THE: Tensor, key_TGE: Tensor, value_TGE: Tensor, layout: SegmentLayout, scaling: float, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(query_THE, key_TGE, value_TGE, *sources)
        ctx.layout, ctx.scaling = layout, scaling
        before = joined(sources) if layout.lanes else None
        outputs: list[Tensor] = []
        for lengths, lane in _lanes(layout):
            rows = slice(lane.first, lane.first + lane.queries)
            query, key, value = (pad_sequence(list(x[rows].split(lengths)), batch_first=True) for x in (query_THE, key_TGE, value_TGE))
            if before is not None and lane.keys:
                prefix = [torch.cat([x[part.start : part.stop] for part in lane.prefix]).expand(len(lengths), -1, -1, -1) for x in before]
                key, value = (torch.cat(pair, 1) for pair in zip(prefix, (key, value), strict=True))
            output = attend_block(query, key, value, scaling, before=lane.keys)
            outputs.extend(output_LHE[:length] for output_LHE, length in zip(output, lengths, strict=True))
        return torch.cat(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *sources = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        half = len(sources) // 2
        with torch.enable_grad():
            output = segment_attention(query, key, value, sources[:half], sources[half:], ctx.layout, ctx.scaling)
        found = torch.autograd.grad(output, (query, key, value, *sources), grads[0], allow_unused=True)
        return *found[:3], None, None, *found[3:]


def _lanes(layout: SegmentLayout) -> list[tuple[list[int], Lane]]:
    """All segments, those of one lane together with their lengths; one without a prefix is a lane of its own."""
    lanes = {lane.first: lane for lane in layout.lanes}
    found: list[tuple[list[int], Lane]] = []
    start = 0
    for length in layout.lengths:
        if start in lanes:
            found.append(([length], lanes[start]))
        elif found and start < found[-1][1].first + found[-1][1].queries:
            found[-1][0].append(length)
        else:
            found.append(([length], Lane(start, length, ())))
        start += length
    return found
