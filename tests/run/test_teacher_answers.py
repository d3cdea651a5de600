"""Offline distillation's first step: answers become conversations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from miles.config import ConfigError, load
from miles.core.model.load import load_tokenizer
from miles.data.config import PromptDataConfig
from miles.data.types import Group, Prompt, Sample, Status
from miles.run.recipe import EvaluateRecipe
from scripts.teacher_answers import conversations, prompts_of


def answered(tokenizer: object, prompt_id: int, *answers: tuple[str, Status]) -> Group:
    samples = []
    for text, status in answers:
        ids = tokenizer.encode(text)  # type: ignore[attr-defined]
        zeros = np.zeros(len(ids))
        samples.append(
            Sample(
                sample_id="s",
                group_id="g",
                tokens=[9, *ids],
                prompt_length=1,
                loss_mask=zeros,
                logprobs=zeros,
                weight_versions=zeros,
                status=status,
            )
        )
    return Group(claim_id=-1, prompt=Prompt(prompt_id=prompt_id, tokens=np.array([9]), text="", columns={}), samples=tuple(samples))


def test_complete_answers_follow_their_prompts_and_cut_ones_are_left_out(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}]
    groups = [
        answered(tokenizer, 1, ("ab<|im_end|>", Status.COMPLETED), ("abc", Status.TRUNCATED)),
        answered(tokenizer, 0, ("c<|im_end|>", Status.COMPLETED)),
    ]
    found = list(conversations(PromptDataConfig(system="be brief"), ["hello", turns], groups, tokenizer))
    assert found == [
        {"messages": [*turns, {"role": "assistant", "content": "ab"}]},
        {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}, {"role": "assistant", "content": "c"}]},
    ]


def test_prompts_too_long_to_be_asked_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": "a", "answer": "a"}}\n{{"prompt": "{"a" * 300}", "answer": "a"}}\n', encoding="utf-8")
    recipe = load(EvaluateRecipe, None, [f"model.path={tiny_model}", f'evaluate.data.paths=["{tmp_path / "p.jsonl"}"]', "evaluate.max_new_tokens=8"])
    with pytest.raises(ConfigError, match=r"1 prompts are longer than \d+ tokens"):
        prompts_of(recipe.config, load_tokenizer(tiny_model))
