"""Which prompts an evaluation asks, before any engine is there; and that all of its answers are of one weight version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles.config import ConfigError
from miles.core.model.config import ModelConfig
from miles.data.config import PromptDataConfig
from miles.run.evaluate import Evaluator, evaluation_metrics
from rollout.config import EvaluateConfig
from tests.rollout.groups_for_tests import group


def load(model: ModelConfig, tmp_path: Path, **data: int) -> Evaluator:
    """Prompts of 10 and of 100 letters, and the template's three tokens more; answers of up to 8 tokens."""
    file = tmp_path / "test.jsonl"
    file.write_text("".join(json.dumps({"prompt": "a" * n, "answer": "a"}) + "\n" for n in (10, 100)), encoding="utf-8")
    return Evaluator.load(EvaluateConfig(data=PromptDataConfig(paths=[str(file)], **data), max_new_tokens=8), model, seed=0)


def lengths(evaluator: Evaluator) -> list[int]:
    return [len(prompt.tokens) for prompt in evaluator._prompts]


def test_prompts_that_fit_the_model_are_asked(tiny_model: Path, tmp_path: Path) -> None:
    assert len(lengths(load(ModelConfig(path=str(tiny_model)), tmp_path))) == 2


def test_a_shortened_context_bounds_the_prompts_of_an_evaluation_too(tiny_model: Path, tmp_path: Path) -> None:
    """The engine has that context: it would refuse the longer prompt in the middle of the run."""
    assert max(lengths(load(ModelConfig(path=str(tiny_model), context=64), tmp_path))) < 64 - 8


def test_max_prompt_tokens_cannot_raise_the_bound(tiny_model: Path, tmp_path: Path) -> None:
    assert len(lengths(load(ModelConfig(path=str(tiny_model), context=64), tmp_path, max_prompt_tokens=1000))) == 1


def test_no_room_for_a_prompt_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.max_new_tokens = 8 leaves no room for a prompt in a context of 8 tokens: lower it to 7 or less"):
        load(ModelConfig(path=str(tiny_model), context=8), tmp_path)


def test_an_evaluation_says_its_one_version_and_refuses_two() -> None:
    config = EvaluateConfig(samples_per_prompt=2)
    assert evaluation_metrics([group(0, [7, 7], [1.0, 0.0]), group(1, [7, 7], [0.0, 0.0])], 2, config)["eval/version"] == 7
    with pytest.raises(RuntimeError, match=r"used weight versions \[7, 8\]: weights were published while it ran"):
        evaluation_metrics([group(0, [7, 7], [1.0, 0.0]), group(1, [7, 8], [0.0, 0.0])], 2, config)
