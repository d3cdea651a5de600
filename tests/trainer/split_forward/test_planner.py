"""Trees, schedules and plans of random batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.core.planning.hardware import CPU_CORE, hardware_of
from miles.core.planning.meters import Meter
from miles.core.planning.workload import Workload, workload_of
from tests.trainer.split_forward import cases
from tests.trainer.split_forward.cases import CHUNK, by_split, every_kind, group, model, plans
from trainer.split_forward.balance import contiguous_parts
from trainer.split_forward.planner import Batch, plan
from trainer.split_forward.saved import saved_bytes_of
from trainer.split_forward.tree import build_tree

WORKLOAD = Workload(layers=4, weights=4_000_000, hidden=256, vocabulary=512, heads=4, width=64)
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=14)


@settings(max_examples=150, deadline=None)
@given(SEQUENCES)
def test_a_tree_computes_each_beginning_once(sequences: list[list[int]]) -> None:
    """As many tokens as there are different beginnings, which is the fewest there can be."""
    tokens = [np.array(s) for s in sequences]
    root = build_tree(tokens, range(len(tokens)))
    nodes = root.subtree()
    tails = [(sample, node.stop) for node in nodes for sample in node.tails]
    assert sorted(sample for sample, _ in tails) == list(range(len(tokens)))
    computed = sum(node.length for node in nodes) + sum(len(tokens[sample]) - start for sample, start in tails)
    assert computed == len({tuple(s[:stop]) for s in sequences for stop in range(1, len(s) + 1)})
    for node in nodes:
        assert len({tuple(tokens[sample][: node.stop].tolist()) for sample in node.samples}) == 1


@settings(max_examples=150, deadline=None)
@given(SEQUENCES, st.integers(1, 30), st.integers(1, 4), st.sampled_from([1, 3, 1000]), st.booleans())
def test_plans_of_all_ranks_are_valid_and_in_step(sequences: list[list[int]], capacity: int, world: int, threshold: int, pairs: bool) -> None:
    if pairs:
        sequences = [s for s in sequences for _ in range(2)]
    tokens = [np.array(s) for s in sequences]
    batch = Batch(tokens=tokens, prompt_lengths=[1] * len(tokens), places=range(len(tokens)), together=2 if pairs else 1)
    made = plan(batch, WORKLOAD, CPU_CORE, world=world, capacity=capacity, thresholds=(threshold,))
    for one in made:
        one.validate([len(t) for t in tokens])
    assert len({one.steps for one in made}) == 1
    assert sorted(sample for one in made for sample in one.ends) == list(range(len(tokens)))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=8), st.integers(1, 4))
def test_the_heaviest_part_is_as_light_as_can_be(costs: list[tuple[int, int]], parts: int) -> None:
    """Against all ways to cut."""
    alone, after = [float(a + b) for a, b in costs], [float(b) for _, b in costs]

    def load(part: range) -> float:
        return alone[part.start] + sum(after[part.start + 1 : part.stop]) if part else 0.0

    def best(start: int, left: int) -> float:
        if left == 1:
            return load(range(start, len(costs)))
        return min(max(load(range(start, cut)), best(cut, left - 1)) for cut in range(start, len(costs) + 1))

    found = contiguous_parts(alone, after, parts)
    assert [i for part in found for i in part] == list(range(len(costs)))
    assert max(load(part) for part in found) <= best(0, parts) * (1 + 1e-9)


def test_a_long_prompt_is_shared_and_a_short_one_of_a_small_model_is_not() -> None:
    small = Workload(layers=2, weights=100_000, hidden=64, vocabulary=50, heads=4, width=16)
    for case, workload, shared in ((group(1024, [64] * 8), WORKLOAD, True), (group(8, [8] * 8), small, False)):
        batch = Batch(tokens=case[0], prompt_lengths=case[1], places=range(8))
        (made,) = plan(batch, workload, hardware_of("cpu", 1), world=1, capacity=8192)
        assert (made.computed < made.tokens) == shared


def test_a_group_larger_than_its_rank_is_cut_where_that_is_faster() -> None:
    """One group, four ranks: the prompt is computed by each, the answers are dealt out."""
    case = group(64, [256] * 8)
    made = plan(Batch(tokens=case[0], prompt_lengths=case[1], places=range(8)), WORKLOAD, CPU_CORE, world=4, capacity=8192)
    assert [len(one.ends) for one in made] == [2, 2, 2, 2]


def test_counted_float_operations_are_the_predicted_ones() -> None:
    for kind, changes in (("qwen3", {}), ("qwen3_moe", {}), ("qwen3", {"fused": True})):
        one, case = model(kind, **changes), every_kind()
        for made in plans(one, case, capacity=60, world=2, threshold=4):
            with Meter(one) as meter:
                by_split(one, case, made, fused=True)
            assert meter.flops == made.predicted.flops


@pytest.mark.parametrize("fused", [pytest.param(False, marks=pytest.mark.full), True], ids=["plain layers", "fused layers"])
def test_the_most_that_autograd_holds_is_the_predicted_number_of_bytes(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # A loss of one's own keeps what it needs; this one needs nothing.
    monkeypatch.setattr(cases, "_loss", lambda weights_2N, logprobs_N, entropy_N, entropy_gradient: logprobs_N.sum())
    one = model(fused=fused)
    saved = saved_bytes_of(one, CHUNK)
    for case, capacity in ((group(20, [5, 9, 3, 8]), 40), (group(20, [5, 9, 3, 8]), 1000), (every_kind(), 1000)):
        batch = Batch(tokens=case[0], prompt_lengths=case[1], places=range(len(case[0])))
        (made,) = plan(batch, workload_of(one), CPU_CORE, world=1, capacity=capacity, thresholds=(1,), saved=saved)
        with Meter(one) as meter:
            by_split(one, case, made, entropy_gradient=False, fused=True)
        assert meter.peak_saved_bytes == made.predicted.saved_bytes
