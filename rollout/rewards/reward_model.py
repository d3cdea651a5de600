"""A trained reward model as a reward function: `name = "reward_model"`, `args = {path = "runs/reward/model"}`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from miles.config import ConfigError
from miles.data.types import Prompt, Sample


def reward_model(sample: Sample, *, prompt: Prompt, text: str, path: str) -> float:
    """The reward of prompt and answer by the model in `path`.

    It scores the very tokens of the sample, so its tokenizer must be the policy's. An answer that was cut off is scored as it ends.

    Raises:
        ValueError: the model's tokenizer reads the answer's tokens as another text.
    """
    import torch

    from miles.core.model.reward import reward_of

    model, tokenizer = _load(path)
    read = tokenizer.decode(sample.response_tokens.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if read != text:
        raise ValueError(f"the reward model in {path!r} has another tokenizer than the policy: it reads {read[:80]!r} where the policy wrote {text[:80]!r}")
    return reward_of(model, torch.from_numpy(np.array(sample.tokens)))


def check(path: str) -> None:
    """Raises ConfigError where `path` is no reward model. Reads its config alone."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ConfigError(f"reward function 'reward_model': path = {path!r} is no model directory: `miles reward` writes one to RUN/model")
    names = json.loads(file.read_text(encoding="utf-8")).get("architectures") or ["no architecture"]
    if not names[0].endswith("ForSequenceClassification"):
        raise ConfigError(f"reward function 'reward_model': path = {path!r} holds a {names[0]}, not a reward model: `miles reward` makes one")


def prepare(path: str) -> None:
    """Load the model before the first call, whose deadline would count it."""
    _load(path)


@cache
def _load(path: str) -> tuple[Any, Any]:
    from miles.core.model.load import load_tokenizer
    from miles.core.model.reward import load_reward_model

    return load_reward_model(path), load_tokenizer(path)
