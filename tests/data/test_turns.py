"""Turns in a sample's metadata: what is read is what was written, and what cannot be right is refused by the sample's name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from miles.data.codec import sample_from_json, sample_to_json
from miles.data.turns import TurnRecord, turns_of, with_turns
from miles.data.types import Sample
from tests.trainer_cases import make_sample

TURNS = [TurnRecord(start=0, stop=2, state="door"), TurnRecord(start=4, stop=6, reward=1.5, state="hall")]


def sample() -> Sample:
    """Six response tokens, of which the third and fourth are a tool's."""
    return make_sample(7, 1, 3, 6, masked=(2, 3))


def test_turns_go_through_a_checkpoint() -> None:
    there_and_back = sample_from_json(json.loads(json.dumps(sample_to_json(with_turns(sample(), TURNS)))))
    assert turns_of(there_and_back) == TURNS


def test_a_sample_that_says_nothing_has_none() -> None:
    assert turns_of(sample()) is None


def test_turns_of_a_sample_that_is_masked_throughout_are_taken() -> None:
    assert turns_of(with_turns(make_sample(7, 1, 3, 6, masked=range(6)), TURNS)) == TURNS


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([{"start": 0, "end": 6}], "must be a list of start, stop, reward and state, but: .*'end'"),
        (3, "must be a list of start, stop, reward and state"),
        ([{"start": 0, "stop": 4}, {"start": 3, "stop": 6}], r"must lie one after another in its 6 response tokens, not at 0\.\.4, 3\.\.6"),
        ([{"start": 0, "stop": 7}], r"not at 0\.\.7"),
        ([{"start": 0, "stop": 6}, {"start": 6, "stop": 6}], r"not at 0\.\.6, 6\.\.6"),
        ([{"start": 0, "stop": 5}], "response token 5 is trained, but belongs to no turn"),
        ([{"start": 0, "stop": 2}, {"start": 2, "stop": 4}, {"start": 4, "stop": 6}], "turn 1 has no trained token"),
    ],
)
def test_turns_that_cannot_be_right_are_refused_by_name(turns: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"sample 7/1: .*{message}"):
        turns_of(replace(sample(), metadata={"turns": turns}))
