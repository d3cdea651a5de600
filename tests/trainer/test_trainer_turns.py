"""Credit by turns through a whole step, against plain transformers and loops over trajectories."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest
import torch

from miles.data.turns import TurnRecord, with_turns
from miles.data.types import Group, Sample
from tests.trainer_cases import (
    gradients,
    make_backend,
    make_group,
    make_sample,
    mixed_groups,
    plain_logprobs,
    plain_model,
    relative_difference,
)
from trainer.rows.batch import Batch

pytestmark = pytest.mark.usefixtures("one_rank")

EXACT = 1e-12


def trajectory(group: int, index: int, reward: float | None, *turns: tuple[str | None, float]) -> Sample:
    """Turns of three tokens with two of a tool between them, given as (state, own reward)."""
    places = [5 * k for k in range(len(turns))]
    tools = [place + t for place in places for t in (3, 4)]
    sample = make_sample(group, index, 3, 5 * len(turns), reward=reward, masked=tools)
    return with_turns(sample, [TurnRecord(start=p, stop=p + 3, reward=r, state=state) for p, (state, r) in zip(places, turns, strict=True)])


def groups() -> list[Group]:
    """Turns with rewards of their own beside the sample's, states that are met again, other lengths, and an unknown reward."""
    return [
        make_group(0, [
            trajectory(0, 0, 1.0, ("door", 0.0), ("hall", 0.25), ("room", 0.0)),
            trajectory(0, 1, 0.0, ("door", 0.0), ("room", -0.5)),
            trajectory(0, 2, 0.5, ("hall", 0.0), ("door", 0.0)),
            trajectory(0, 3, None, ("door", 0.0)),
        ]),
        make_group(1, [trajectory(1, 0, 1.0, ("door", 0.0)), trajectory(1, 1, 0.0, ("door", 0.5), ("door", 0.0))]),
    ]  # fmt: skip


def returns_of(sample: Sample, gamma: float) -> list[float]:
    rewards = [turn["reward"] for turn in sample.metadata["turns"]]
    rewards[-1] += sample.reward - sum(rewards)
    return [sum(gamma**j * r for j, r in enumerate(rewards[k:])) for k in range(len(rewards))]


def relative(value: float, others: list[float]) -> float:
    return 0.0 if len(others) < 2 or max(others) - min(others) < 1e-12 else (value - mean(others)) / stdev(others)


def expected_credit(name: str, gamma: float, omega: float) -> dict[str, list[float]]:
    """Each known sample's advantages, one a turn."""
    peers, totals = defaultdict(list), defaultdict(list)
    known = [s for g in groups() for s in g.samples if s.reward is not None]

    def key(sample: Sample, number: int) -> Any:
        return sample.group_id, sample.metadata["turns"][number]["state"] if name == "gigpo" else number

    for sample in known:
        totals[sample.group_id].append(sample.reward)
        for number, value in enumerate(returns_of(sample, gamma)):
            peers[key(sample, number)].append(value)
    credit = {}
    for sample in known:
        whole = relative(sample.reward, totals[sample.group_id]) if name == "gigpo" else 0.0
        credit[sample.sample_id] = [whole + omega * relative(value, peers[key(sample, n)]) for n, value in enumerate(returns_of(sample, gamma))]
    return credit


@pytest.mark.parametrize("max_tokens", [1, 8192])
@pytest.mark.parametrize(("name", "options", "omega"), [("gigpo", {"turn_weight": 0.5}, 0.5), ("turn_grpo", {}, 1.0)])
def test_a_step_gives_each_turn_its_credit(model: Path, name: str, options: dict[str, Any], omega: float, max_tokens: int) -> None:
    backend = make_backend(model, algorithm={"advantages": name, "gamma": 0.9} | options, trainer={"max_tokens_per_microbatch": max_tokens})
    backend.step_rl(groups())
    plain, credit = plain_model(model), expected_credit(name, 0.9, omega)
    samples = [s for g in groups() for s in g.samples]
    tokens = sum(int(s.loss_mask.sum()) for s in samples)
    for sample in samples:
        if sample.reward is None:
            continue
        each = torch.from_numpy(np.repeat(credit[sample.sample_id], 3))
        mask = torch.from_numpy(sample.loss_mask)
        ratio = (plain_logprobs(plain, sample)[mask] - torch.from_numpy(sample.logprobs).double()[mask]).exp()
        (-torch.minimum(ratio * each, ratio.clamp(0.8, 1.28) * each).sum() / tokens).backward()
    assert relative_difference(gradients(backend), {n: p.grad.numpy() for n, p in plain.named_parameters()}) < EXACT


def test_a_turns_reward_lies_on_its_own_last_token_and_the_rest_on_the_last_of_all() -> None:
    sample = trajectory(0, 0, 1.0, ("a", 0.25), ("b", -0.5))
    assert Batch([make_group(0, [sample])], 1).rewards.reward_N.tolist() == [0, 0, 0.25, 0, 0, 0, 0, 0.75, 0, 0]


def test_a_masked_trajectory_still_counts_in_the_baseline(model: Path) -> None:
    """As it does for GRPO, whose advantages these are: one turn each, and no weight on states."""
    samples = [with_turns(make_sample(0, i, 3, 4, reward=float(i), masked=range(4) if i else ()), [TurnRecord(start=0, stop=4, state=i)]) for i in range(2)]
    found = [make_backend(model, algorithm={"advantages": name}) for name in ("gigpo", "grpo")]
    for backend in found:
        assert not backend.step_rl([make_group(0, samples)]).empty
    assert relative_difference(*(gradients(backend) for backend in found)) < EXACT


@pytest.mark.parametrize("name", ["gigpo", "turn_grpo"])
def test_a_sample_without_turns_is_refused_by_name(model: Path, name: str) -> None:
    plain = make_group(2, [make_sample(2, i, 3, 4, reward=float(i)) for i in range(2)])
    with pytest.raises(ValueError, match=rf"'{name}' gives credit by turns, but sample 2/0 has no metadata\['turns'\]"):
        make_backend(model, algorithm={"advantages": name}).step_rl([*groups(), plain])


def test_a_turn_without_a_state_is_refused_by_the_estimator_that_compares_states(model: Path) -> None:
    nameless = [make_group(0, [trajectory(0, i, float(i), ("a", 0.0), (None, 0.0)) for i in range(2)])]
    with pytest.raises(ValueError, match="turn 1 of sample 0/0 has no state"):
        make_backend(model, algorithm={"advantages": "gigpo"}).step_rl(nameless)
    assert not make_backend(model, algorithm={"advantages": "turn_grpo"}).step_rl(nameless).empty


def test_turns_that_nobody_asks_for_change_nothing(model: Path) -> None:
    def told(sample: Sample) -> Sample:
        return with_turns(sample, [TurnRecord(start=0, stop=sample.response_length, reward=0.125)])

    with_them = [make_group(g.claim_id, [told(s) for s in g.samples]) for g in mixed_groups()]
    metrics = [make_backend(model).step_rl(batch).metrics for batch in (with_them, mixed_groups())]
    assert metrics[0] == metrics[1]
