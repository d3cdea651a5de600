"""GRPO turn by turn against loops over trajectories, and against GRPO itself."""

from __future__ import annotations

import math
from collections import defaultdict
from statistics import mean, stdev

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms import registry
from algorithms.config import AlgorithmConfig
from algorithms.contracts import Rewards, TurnPlaces

# A trajectory: its group, and the reward of each turn.
Trajectory = tuple[int, list[float]]

trajectories = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.sampled_from([0.0, 1.0, -0.5, 2.0]), min_size=1, max_size=4)),
    min_size=1,
    max_size=7,
)


def batch(rows: list[Trajectory]) -> Rewards:
    """Two tokens a turn, with a tool's between; the turn's reward lies on its second."""
    turns = [(s, reward) for s, (_, rewards) in enumerate(rows) for reward in rewards]
    return Rewards(
        reward_S=torch.tensor([math.fsum(rewards) for _, rewards in rows], dtype=torch.float64),
        group_S=torch.tensor([group for group, _ in rows]),
        mask_N=torch.tensor([True, True, False] * len(turns)),
        sequence_N=torch.tensor([s for s, _ in turns]).repeat_interleave(3),
        reward_N=torch.tensor([value for _, reward in turns for value in (0.0, reward, 0.0)], dtype=torch.float64),
        turns=TurnPlaces(
            turn_N=torch.tensor([k if inside else -1 for k in range(len(turns)) for inside in (1, 1, 0)]),
            sequence_K=torch.tensor([s for s, _ in turns]),
            states=[None] * len(turns),
        ),
    )


def advantages(rows: list[Trajectory], name: str = "turn_grpo", **options: object) -> np.ndarray:
    found = registry.advantage(AlgorithmConfig(advantages=name, **options))(batch(rows)).advantages_N.numpy().reshape(-1, 3)
    assert (found[:, 0] == found[:, 1]).all()
    assert not found[:, 2].any()
    return found[:, 0]


@settings(max_examples=40, deadline=None)
@given(rows=trajectories, gamma=st.sampled_from([1.0, 0.5]))
def test_every_turn_is_compared_with_the_groups_turns_of_its_number(rows, gamma) -> None:
    returns = {(s, k): math.fsum(gamma**j * r for j, r in enumerate(rewards[k:])) for s, (_, rewards) in enumerate(rows) for k in range(len(rewards))}
    peers = defaultdict(list)
    for (s, k), value in returns.items():
        peers[rows[s][0], k].append(value)
    expected = []
    for (s, k), value in returns.items():
        others = peers[rows[s][0], k]
        flat = len(others) < 2 or max(others) - min(others) < 1e-12
        expected.append(0.0 if flat else (value - mean(others)) / stdev(others))
    np.testing.assert_allclose(advantages(rows, gamma=gamma), expected, atol=1e-9)


@pytest.mark.parametrize("scale", ["std", "none", "mean_abs"])
def test_trajectories_of_one_turn_have_grpos_advantages(scale) -> None:
    rows = [(0, [1.0]), (0, [0.0]), (1, [0.5]), (0, [0.25]), (1, [2.0])]
    np.testing.assert_allclose(advantages(rows, scale=scale), advantages(rows, "grpo", scale=scale), rtol=1e-14)


def test_gigpo_needs_states() -> None:
    with pytest.raises(ValueError, match="compares states, but some turns have none"):
        advantages([(0, [1.0]), (0, [0.0])], "gigpo")


def test_a_batch_without_turns_is_refused() -> None:
    rewards = batch([(0, [1.0]), (0, [0.0])])
    rewards = Rewards(**{name: getattr(rewards, name) for name in ("reward_S", "group_S", "mask_N", "sequence_N", "reward_N")})
    with pytest.raises(ValueError, match="'turn_grpo' gives credit by turns, but not all samples say what theirs are"):
        registry.advantage(AlgorithmConfig(advantages="turn_grpo"))(rewards)
