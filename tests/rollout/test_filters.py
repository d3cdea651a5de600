import pytest

from miles.data.types import Status
from rollout.filters import diagnosis, teaches_nothing, zero_variance
from tests.rollout.groups_for_tests import group


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.0, 1.0], False),
        ([0.0, 0.0, 1e-3], False),
        ([1.0, 1.0, 1.0], True),
        ([0.0, 0.0], True),
        ([0.1 + 0.2, 0.3], True),
        ([0.0, None, 1.0], False),
        ([1.0, None, 1.0], True),
        ([1.0, None], True),
        ([None, None], True),
    ],
)
def test_groups_that_teach_nothing(rewards, expected):
    assert teaches_nothing(group(0, [0] * len(rewards), rewards)) == expected


def test_an_unknown_reward_is_not_a_reward_of_zero():
    assert zero_variance(group(0, [0, 0, 0], [1.0, None, 1.0]))


def test_failed_samples_do_not_count_whatever_reward_they_carry():
    assert teaches_nothing(group(0, [0, 0], [0.0, 1.0], status=Status.FAILED))


def test_the_diagnosis_counts_by_reason():
    groups = [group(i, [0, 0], [0.0, 0.0]) for i in range(3)] + [group(3, [0, 0], [1.0, 1.0]), group(4, [0, 0], [None, 1.0])]
    text = diagnosis(groups)
    assert text.startswith("5 groups taught nothing: 3 with all rewards equal to 0, 1 with all rewards equal to 1, 1 with fewer than two known rewards.")
