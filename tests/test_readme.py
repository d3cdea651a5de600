"""What the README shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from algorithms import registry
from algorithms.config import AlgorithmConfig
from algorithms.contracts import Counts, Tokens
from miles.config import load
from miles.run.recipe import RLRecipe
from tests.algorithms.reward_batches import rewards_over

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def block(language: str, first_line: str) -> str:
    """The README's code block of `language` that begins with `first_line`."""
    return next(text for text in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if text.startswith(first_line))


def test_the_first_recipe_is_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(block("toml", "# mine.toml"))
    assert load(RLRecipe, path).config.rollout.prompts_per_step == 16


def test_the_objective_of_ones_own_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens with advantages 1 and 5: the gradient by log-prob is -min(A, 2) / 2 tokens."""
    (tmp_path / "my_loss.py").write_text(block("python", "# my_loss.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    logprobs_N = torch.tensor([-1.0, -2.0], requires_grad=True)
    tokens = Tokens(
        logprobs_N=logprobs_N,
        old_logprobs_N=logprobs_N.detach(),
        rollout_logprobs_N=logprobs_N.detach(),
        advantages_N=torch.tensor([1.0, 5.0]),
        mask_N=torch.tensor([True, True]),
        sequence_N=torch.tensor([0, 0]),
        num_sequences=1,
        sequence_length_S=torch.tensor([2]),
    )
    registry.loss(AlgorithmConfig(loss="my_loss:cut"))(tokens, Counts(tokens=2, sequences=1, max_tokens=2)).loss.backward()
    assert logprobs_N.grad is not None
    assert logprobs_N.grad.tolist() == [-0.5, -1.0]


def test_the_advantages_of_ones_own_are_one_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_advantages.py").write_text(block("python", "# my_advantages.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    rewards = rewards_over(torch.tensor([1.0, 0.0, torch.nan]), torch.zeros(3, dtype=torch.int64), torch.tensor([3, 1, 1]))
    found = registry.advantage(AlgorithmConfig(advantages="my_advantages:late"))(rewards)
    assert found.advantages_N.tolist() == pytest.approx([0.405, 0.45, 0.5, -0.5, 0.0])
