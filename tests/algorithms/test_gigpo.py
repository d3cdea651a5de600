"""Turn credit against loops over trajectories, and by hand."""

from __future__ import annotations

import math
from collections import defaultdict
from statistics import mean, stdev

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.gigpo import Turns, gigpo, spread

# A trajectory: its group, and (state, reward) of each turn.
Trajectory = tuple[int, list[tuple[str, float]]]


def turns_of(trajectories: list[Trajectory]) -> Turns:
    flat = [(i, state, reward) for i, (_, steps) in enumerate(trajectories) for state, reward in steps]
    return Turns(
        reward_K=torch.tensor([reward for *_, reward in flat], dtype=torch.float64),
        sequence_K=torch.tensor([i for i, *_ in flat], dtype=torch.int64),
        group_S=torch.tensor([group for group, _ in trajectories], dtype=torch.int64),
        total_S=torch.tensor([math.fsum(reward for _, reward in steps) for _, steps in trajectories], dtype=torch.float64),
        states=[state for _, state, _ in flat],
    )


def standardised(values: list[float]) -> list[float]:
    if len(values) < 2 or max(values) - min(values) < 1e-12:
        return [0.0] * len(values)
    return [(v - mean(values)) / stdev(values) for v in values]


def oracle(trajectories: list[Trajectory], gamma: float, omega: float) -> list[list[float]]:
    by_group, by_state = defaultdict(list), defaultdict(list)
    for i, (group, steps) in enumerate(trajectories):
        by_group[group].append((i, math.fsum(r for _, r in steps)))
        for k, (state, _) in enumerate(steps):
            by_state[group, state].append((i, k, math.fsum(gamma**j * r for j, (_, r) in enumerate(steps[k:]))))
    out = [[0.0] * len(steps) for _, steps in trajectories]
    for members in by_group.values():
        for (i, _), a in zip(members, standardised([v for _, v in members]), strict=True):
            out[i] = [a] * len(out[i])
    for visits in by_state.values():
        for (i, k, _), a in zip(visits, standardised([v for *_, v in visits]), strict=True):
            out[i][k] += omega * a
    return out


trajectories = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 1.0, -0.5, 2.0])), min_size=1, max_size=5)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(trajectories=trajectories, gamma=st.sampled_from([1.0, 0.95, 0.5]), omega=st.sampled_from([0.0, 1.0, 0.3]))
def test_every_turn_has_the_credit_that_loops_give_it(trajectories, gamma, omega) -> None:
    got = gigpo(turns_of(trajectories), gamma=gamma, omega=omega).numpy()
    np.testing.assert_allclose(got, np.concatenate(oracle(trajectories, gamma, omega)), atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(trajectories=trajectories, seed=st.integers(0, 1000))
def test_order_of_trajectories_does_not_matter(trajectories, seed) -> None:
    order = np.random.default_rng(seed).permutation(len(trajectories))
    ends = np.cumsum([len(steps) for _, steps in trajectories])[:-1]
    plain = np.split(gigpo(turns_of(trajectories)).numpy(), ends)
    moved = gigpo(turns_of([trajectories[i] for i in order])).numpy()
    np.testing.assert_allclose(moved, np.concatenate([plain[i] for i in order]), atol=1e-9)


def test_a_shared_state_tells_good_turns_from_bad_ones() -> None:
    # Both come through s; a wins from there. Every other state is met once. No discount, centred only.
    turns = turns_of([(0, [("s", 0.0), ("x", 1.0)]), (0, [("y", 0.0), ("s", 0.0)])])
    np.testing.assert_allclose(gigpo(turns, gamma=1.0, scale="none").numpy(), [0.5 + 0.5, 0.5, -0.5, -0.5 - 0.5])


def test_the_same_state_in_another_group_is_another_anchor() -> None:
    turns = turns_of([(0, [("s", 1.0)]), (1, [("s", 0.0)])])
    assert not gigpo(turns).any()


def test_a_state_met_twice_by_one_trajectory_compares_its_returns() -> None:
    turns = turns_of([(0, [("s", 0.0), ("s", 1.0)])])
    np.testing.assert_allclose(gigpo(turns, gamma=0.5, scale="none").numpy(), [-0.25, 0.25])


def test_without_anchors_it_is_group_relative_over_whole_trajectories() -> None:
    turns = turns_of([(0, [("a", 1.0), ("b", 0.0)]), (0, [("c", 0.0)])])
    np.testing.assert_allclose(gigpo(turns, scale="none").numpy(), [0.5, 0.5, -0.5])


def test_equal_rewards_give_exactly_0() -> None:
    turns = turns_of([(0, [("s", 0.1), ("t", 0.2)]) for _ in range(3)])
    assert gigpo(turns).tolist() == [0.0] * 6


def test_a_trajectory_with_an_unknown_reward_leaves_every_baseline() -> None:
    known = [(0, [("s", 1.0)]), (0, [("s", 0.0)])]
    got = gigpo(turns_of([*known, (0, [("s", math.nan), ("s", 5.0)])]))
    np.testing.assert_allclose(got.numpy(), [*gigpo(turns_of(known)).tolist(), 0.0, 0.0])


@pytest.mark.parametrize("scale", ["std", "mean_abs"])
def test_doubled_rewards_change_nothing_under_a_scale(scale) -> None:
    once = [(0, [("s", 1.0), ("t", 0.25)]), (0, [("s", 0.0)]), (0, [("t", 2.0)])]
    twice = [(group, [(state, 2 * reward) for state, reward in steps]) for group, steps in once]
    np.testing.assert_allclose(gigpo(turns_of(twice), scale=scale).numpy(), gigpo(turns_of(once), scale=scale).numpy(), atol=1e-12)


def test_turns_are_laid_over_their_tokens_and_observations_get_nothing() -> None:
    turn_N = torch.tensor([0, 0, -1, 1, -1, -1, 2])
    assert spread(torch.tensor([1.0, -2.0, 3.0]), turn_N).tolist() == [1.0, 1.0, 0.0, -2.0, 0.0, 0.0, 3.0]
