"""The allocation against every combination of actions, tried one by one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from miles.core.memory.actions import Action
from miles.core.memory.knapsack import MicroBatch, Option, allocate

K, L, R = Action.KEEP, Action.COMPRESS, Action.RECOMPUTE


def random_batch(random: np.random.Generator, layers: int) -> MicroBatch:
    """Whole numbers and eighths, whose sums are exact. Keeping is fastest and largest, as in life, but by how much is left to chance."""
    options = []
    for _ in range(layers):
        inputs, saved = int(random.integers(1, 4)), int(random.integers(4, 12))
        small = int(random.integers(inputs, saved + 1))
        seconds = int(random.integers(0, 9))
        options.append(
            [
                Option(action=R, seconds=0.0, held=inputs, moment=saved),
                Option(action=K, seconds=float(seconds), held=saved, moment=saved),
                Option(action=L, seconds=seconds - int(random.integers(0, 4)) / 8, held=small, moment=saved + 1, risk=int(random.integers(0, 9)) / 8),
            ]
        )
    return MicroBatch(layers=options, base=int(random.integers(0, 3)), above=int(random.integers(0, 9)))


def feasible(batch: MicroBatch, chosen: Sequence[Option], memory: int) -> bool:
    """Every moment by itself: the backward of each layer with all that lies below it, and the end of the forward."""
    backward = [batch.base + sum(o.held for o in chosen[:n]) + chosen[n].moment for n in range(len(chosen))]
    return max([*backward, batch.base + batch.above + sum(o.held for o in chosen)]) <= memory


def best(batches: Sequence[MicroBatch], memory: int, risk: float) -> float | None:
    """Seconds of the best combination; None where none is feasible."""
    every = [[c for c in itertools.product(*batch.layers) if feasible(batch, c, memory)] for batch in batches]
    found = [sum(o.seconds for c in combination for o in c) for combination in itertools.product(*every) if sum(o.risk for c in combination for o in c) <= risk]
    return max(found, default=None)


@pytest.mark.parametrize("seed", range(30))
def test_no_combination_is_better(seed: int) -> None:
    random = np.random.default_rng(seed)
    shapes = [(8,), (4, 3), (2, 2, 3), (1,), (5,), (7,)][seed % 6]
    batches = [random_batch(random, layers) for layers in shapes]
    memory, risk = int(random.integers(14, 50)), int(random.integers(0, 24)) / 8
    expected = best(batches, memory, risk)
    if expected is None:
        with pytest.raises(ValueError, match=r"layer|micro-batch"):
            allocate(batches, memory, risk)
        return
    found = allocate(batches, memory, risk)
    chosen = [
        [next(o for o in options if o.action is a) for options, a in zip(b.layers, actions, strict=True)]
        for b, actions in zip(batches, found.actions, strict=True)
    ]
    assert all(feasible(batch, c, memory) for batch, c in zip(batches, chosen, strict=True))
    assert sum(found.risk) == sum(o.risk for c in chosen for o in c) <= risk
    assert found.seconds == sum(o.seconds for c in chosen for o in c) == expected


def test_the_last_layer_is_kept_for_nothing() -> None:
    """Three layers of 10 bytes, of which 2 are the input, and memory for a full recompute: the last layer's tensors are there in any case."""
    options = [[Option(action=R, seconds=0.0, held=2, moment=10), Option(action=K, seconds=1.0, held=10, moment=10)]] * 3
    assert allocate([MicroBatch(layers=options, base=0, above=0)], 14, 0.0).actions == [[R, R, K]]


def test_risk_goes_to_the_micro_batch_with_the_least_exposure() -> None:
    def batch(exposure: float) -> MicroBatch:
        options = [
            Option(action=R, seconds=0.0, held=2, moment=10),
            Option(action=L, seconds=1.0, held=6, moment=10, risk=exposure),
        ]
        return MicroBatch(layers=[options] * 2, base=0, above=0)

    found = allocate([batch(3.0), batch(0.5), batch(0.0)], 16, 1.0)
    assert found.actions == [[R, R], [L, L], [L, L]]
    assert found.risk == [0.0, 1.0, 0.0]


def test_a_grid_of_risks_stays_within_the_budget_and_near_the_best() -> None:
    random = np.random.default_rng(0)
    layers = [
        [
            Option(action=R, seconds=0.0, held=2, moment=10),
            Option(action=L, seconds=float(random.uniform(0.5, 1.0)), held=6, moment=11, risk=float(random.uniform(0, 1))),
        ]
        for _ in range(14)
    ]
    batch = MicroBatch(layers=layers, base=0, above=0)
    exact, coarse = allocate([batch], 70, 3.0, states=10**9), allocate([batch], 70, 3.0, states=50)
    assert sum(coarse.risk) <= 3.0
    assert 0.97 * exact.seconds <= coarse.seconds <= exact.seconds
