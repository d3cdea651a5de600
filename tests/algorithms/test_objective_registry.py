"""Names, a user's own functions, and what is refused before anything starts."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from algorithms import registry
from algorithms.config import AlgorithmConfig
from algorithms.contracts import Rewards
from tests.algorithms.loss_batches import count, rows, run, tokens_of
from tests.algorithms.reward_batches import rewards_over

OWN = """
import torch
from algorithms.contracts import TokenAdvantages

def best_only(rewards, config):
    best = torch.nan_to_num(rewards.reward_S, nan=-1).amax()
    return (rewards.reward_S == best).float()

def by_place(rewards, config):
    return TokenAdvantages(advantages_N=torch.arange(len(rewards.mask_N)).double())

def best_token(rewards, config):
    return rewards.reward_N

def too_few(rewards, config):
    return TokenAdvantages(advantages_N=rewards.reward_S)

def likelihood(tokens, config):
    return -tokens.advantages_N * tokens.logprobs_N

def scalar(tokens, config):
    return tokens.logprobs_N.sum()

def one_argument(tokens):
    return tokens.logprobs_N

not_a_function = 3
"""


def two_sequences() -> Rewards:
    """Of two tokens and of one."""
    return rewards_over(torch.tensor([0.0, 2.0]), torch.zeros(2, dtype=torch.int64), torch.tensor([2, 1]))


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "users_objective.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "users_objective"
    sys.modules.pop("users_objective", None)


def test_a_users_loss_is_masked_and_aggregated_like_a_builtin(own_module) -> None:
    batch = rows(0, [3, 4])
    mine = run(registry.loss(AlgorithmConfig(loss=f"{own_module}:likelihood")), batch, count(batch))
    builtin = run(registry.loss(AlgorithmConfig(loss="reinforce")), batch, count(batch))
    assert mine[0] == builtin[0]


def test_a_users_advantages(own_module) -> None:
    assert registry.advantage(AlgorithmConfig(advantages=f"{own_module}:best_only"))(two_sequences()).advantages_N.tolist() == [0.0, 0.0, 1.0]


def test_a_users_advantages_may_differ_from_token_to_token(own_module) -> None:
    assert registry.advantage(AlgorithmConfig(advantages=f"{own_module}:by_place"))(two_sequences()).advantages_N.tolist() == [0.0, 1.0, 2.0]


def test_a_masked_token_has_no_advantage_of_its_sequence(own_module) -> None:
    rewards = replace(two_sequences(), mask_N=torch.tensor([True, True, False]))
    assert registry.advantage(AlgorithmConfig(advantages=f"{own_module}:best_only"))(rewards).advantages_N.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("function", "shape"), [("best_token", r"advantages as a tensor of shape \(2,\), not \(3,\)"), ("too_few", r"\(3,\), not \(2,\)")])
def test_a_users_advantages_of_the_wrong_shape_are_named(own_module, function, shape) -> None:
    with pytest.raises(ValueError, match=f"'users_objective:{function}' must return .*{shape}"):
        registry.advantage(AlgorithmConfig(advantages=f"{own_module}:{function}"))(two_sequences())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("likelihod", "did you mean 'likelihood'"),
        ("not_a_function", "has no function 'not_a_function'"),
        ("one_argument", "called with two arguments"),
    ],
)
def test_a_users_function_that_cannot_work_is_refused_at_the_start(own_module, function, message) -> None:
    with pytest.raises(ValueError, match=message):
        registry.loss(AlgorithmConfig(loss=f"{own_module}:{function}"))


def test_a_module_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="no module 'no_such_module'"):
        registry.loss(AlgorithmConfig(loss="no_such_module:f"))


def test_a_users_loss_of_the_wrong_shape_is_named(own_module) -> None:
    batch = rows(0, [3])
    loss = registry.loss(AlgorithmConfig(loss=f"{own_module}:scalar"))
    with pytest.raises(ValueError, match=r"'users_objective:scalar' must return a loss as a tensor of shape \(3,\), not \(\)"):
        loss(tokens_of(batch), count(batch))


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.advantages = 'grppo' is not known; did you mean 'grpo'"):
        registry.advantage(AlgorithmConfig(advantages="grppo"))


def test_a_name_can_be_registered_once() -> None:
    with pytest.raises(ValueError, match="'grpo' is registered already"):
        registry.register_advantage("grpo")(lambda rewards, config: rewards.reward_S)


def test_a_correction_without_the_trainers_own_logprobs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set algorithm\.old_logprobs = 'recompute'"):
        AlgorithmConfig(correction="truncate")


def test_entropy_bonus_lowers_the_loss_by_its_mean() -> None:
    batch = rows(4, [3, 5])
    counts = count(batch)
    plain, bonus = (run(registry.loss(AlgorithmConfig(entropy_coef=c)), batch, counts) for c in (0.0, 0.5))
    mean = sum(row.entropy[row.mask].sum() for row in batch) / counts.tokens
    assert bonus[0] == pytest.approx(plain[0] - 0.5 * mean, rel=1e-12)
    assert plain[2]["policy/entropy"] / counts.tokens == pytest.approx(mean, rel=1e-12)


def test_entropy_bonus_reaches_the_entropys_gradient() -> None:
    batch = rows(4, [3, 5])
    tokens = tokens_of(batch)
    registry.loss(AlgorithmConfig(entropy_coef=0.5))(tokens, count(batch)).loss.backward()
    expected = -0.5 / count(batch).tokens * tokens.mask_N.double()
    assert torch.allclose(tokens.entropy_N.grad, expected, rtol=1e-12)
