"""What is reported of a batch without a model, against values computed by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from miles.data.types import Status
from tests.trainer_cases import make_group, make_sample
from trainer.rows.batch import Batch


def test_rewards_lengths_and_staleness() -> None:
    samples = [
        make_sample(0, 0, 3, 4, reward=1.0),
        replace(make_sample(0, 1, 3, 2, reward=0.0, masked=[1]), status=Status.TRUNCATED, weight_versions=np.array([5, -1])),
        make_sample(0, 2, 3, 3, reward=None),
    ]
    metrics = Batch([make_group(0, samples)], 1).metrics(version=6)
    assert metrics == {
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "reward/none": 1.0,
        "groups/trained": 1.0,
        "groups/zero_variance": 0.0,
        "length/mean": 3.0,
        "length/max": 4.0,
        "length/truncated": 1 / 3,
        "staleness/mean": (6 * 4 + 1 + 6 * 3) / 8,
        "staleness/max": 6.0,
        "tokens/trained": 8.0,
    }


def test_failed_samples_are_not_trained_but_counted() -> None:
    failed = replace(make_sample(0, 1, 3, 2), status=Status.FAILED)
    batch = Batch([make_group(0, [make_sample(0, 0, 3, 4, reward=1.0), failed])], 1)
    assert [s.sample_id for s in batch.samples] == ["0/0"]
    assert batch.metrics(0)["reward/none"] == 1


def test_an_unknown_reward_reaches_the_advantages_as_unknown_and_not_as_zero() -> None:
    samples = [replace(make_sample(0, i, 3, 2, reward=r), reward_parts={} if r is None else {"a": r}) for i, r in enumerate((1.0, None, 3.0))]
    rewards = Batch([make_group(0, samples)], 1).rewards
    assert str(rewards.reward_S.tolist()) == "[1.0, nan, 3.0]"
    assert str(rewards.parts["a"].tolist()) == "[1.0, nan, 3.0]"


def test_groups_with_equal_or_no_rewards_are_counted() -> None:
    rows = [[1.0, 1.0], [0.0, 1.0], [None, None], [0.1 + 0.2, 0.3]]
    groups = [make_group(g, [make_sample(g, i, 3, 2, reward=r) for i, r in enumerate(row)]) for g, row in enumerate(rows)]
    assert Batch(groups, 1).metrics(0)["groups/zero_variance"] == 3


def test_updates_split_groups_whole_and_in_order() -> None:
    groups = [make_group(g, [make_sample(g, i, 3, 2, reward=0.0) for i in range(3)]) for g in range(4)]
    assert Batch(groups, 2).updates == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]


def test_an_empty_batch_has_finite_numbers() -> None:
    failed = replace(make_sample(0, 0, 3, 2), status=Status.TIMED_OUT)
    assert all(np.isfinite(v) for v in Batch([make_group(0, [failed])], 1).metrics(0).values())
