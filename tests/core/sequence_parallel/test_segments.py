"""Segments that go on where others ended, against a softmax over each segment's whole sequence, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from miles.core.model.batch_invariant import InvariantRows
from miles.core.model.invariant_segments import invariant_segment_attention
from miles.core.sequence_parallel import segments
from miles.core.sequence_parallel.segments import Lane, SegmentLayout, cross_blocks, segment_attention

HEADS, GROUPS, WIDTH, SCALING = 4, 2, 8, 0.3
SOURCES = (7, 5)
LENGTHS = [3, 5, 2, 4, 6]
LANES = [Lane(0, 8, (range(0, 4), range(7, 12))), Lane(8, 2, (range(4, 7),)), Lane(14, 6, (range(1, 2),))]
PREFIXES = [[0, 1, 2, 3, 7, 8, 9, 10, 11]] * 2 + [[4, 5, 6], [], [1]]


def tensors(dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Query, key and value of the row; keys of the sources; their values."""
    generator = torch.Generator().manual_seed(0)

    def random(tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, WIDTH, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()

    own = [random(sum(LENGTHS), heads) for heads in (HEADS, GROUPS, GROUPS)]
    return own, [random(n, GROUPS) for n in SOURCES], [random(n, GROUPS) for n in SOURCES]


def plain(own: list[Tensor], keys: list[Tensor], values: list[Tensor]) -> Tensor:
    query, key, value = own
    outputs, start = [], 0
    for length, prefix in zip(LENGTHS, PREFIXES, strict=True):
        rows = slice(start, start + length)
        every_key, every_value = (torch.cat((torch.cat(s)[prefix], x[rows])).repeat_interleave(HEADS // GROUPS, 1) for s, x in ((keys, key), (values, value)))
        scores = torch.einsum("qhe,khe->hqk", query[rows], every_key) * SCALING
        seen = torch.ones(length, len(prefix) + length, dtype=torch.bool).tril(len(prefix))
        outputs.append(torch.einsum("hqk,khe->qhe", scores.masked_fill(~seen, -torch.inf).softmax(-1), every_value))
        start += length
    return torch.cat(outputs)


@pytest.mark.parametrize("kernel", ["fused", "plain"])
def test_output_and_gradients_are_those_of_a_softmax_over_the_whole_sequence(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel == "plain":  # what other devices run
        monkeypatch.setattr(segments, "_attend", segments.plain_attend)
        monkeypatch.setattr(segments, "_attend_backward", segments.plain_attend_backward)
    own, keys, values = tensors()
    expected = plain(own, keys, values)
    found = segment_attention(*own, keys, values, SegmentLayout(LENGTHS, LANES, torch.device("cpu")), SCALING)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    weights = torch.randn_like(expected)
    leaves = [*own, *keys, *values]
    pairs = zip(torch.autograd.grad((found * weights).sum(), leaves), torch.autograd.grad((expected * weights).sum(), leaves), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) < 1e-13


def test_without_prefixes_it_is_causal_attention_within_each_segment() -> None:
    own, _, _ = tensors()
    found = segment_attention(*own, [], [], SegmentLayout(LENGTHS, [], torch.device("cpu")), SCALING)
    start = 0
    for length in LENGTHS:
        query, key, value = (x[start : start + length].transpose(0, 1)[None] for x in own)
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=SCALING, enable_gqa=True)
        torch.testing.assert_close(found[start : start + length], expected[0].transpose(0, 1), rtol=0, atol=1e-13)
        start += length


def test_the_invariant_form_has_the_bits_of_each_whole_sequence_alone() -> None:
    own, keys, values = tensors(torch.float32)
    found = invariant_segment_attention(*own, keys, values, SegmentLayout(LENGTHS, LANES, torch.device("cpu")), SCALING)
    start = 0
    for length, prefix in zip(LENGTHS, PREFIXES, strict=True):
        rows = slice(start, start + length)
        key, value = (torch.cat((torch.cat(s)[prefix], x[rows])) for s, x in ((keys, own[1]), (values, own[2])))
        query = torch.cat((torch.zeros(len(prefix), HEADS, WIDTH), own[0][rows]))
        alone = InvariantRows(torch.zeros(len(query), dtype=torch.int64)).attend(0, query, key, value, SCALING, 0.0, None)
        assert torch.equal(found[rows], alone[len(prefix) :])
        start += length


def test_the_invariant_form_has_the_plain_gradients() -> None:
    own, keys, values = tensors()
    leaves, layout = [*own, *keys, *values], SegmentLayout(LENGTHS, LANES, torch.device("cpu"))
    forms = [form(*own, keys, values, layout, SCALING) for form in (segment_attention, invariant_segment_attention)]
    weights = torch.randn_like(forms[0])
    pairs = zip(*(torch.autograd.grad((form * weights).sum(), leaves) for form in forms), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) < 1e-12


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400)), min_size=1, max_size=12))
def test_every_lane_is_in_one_block_that_has_room_for_it(sizes: list[tuple[int, int]]) -> None:
    lanes = [Lane(number, queries, (range(keys),)) for number, (queries, keys) in enumerate(sizes)]
    blocks = cross_blocks(lanes)
    assert sorted(lane.first for block in blocks for lane in block.lanes) == list(range(len(lanes)))
    assert all(lane.queries <= block.queries and lane.keys <= block.keys for block in blocks for lane in block.lanes)
