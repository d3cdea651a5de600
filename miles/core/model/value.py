"""Critics: a causal language model whose output head is one row, read at every token. Made of a language model or of a reward model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from miles.core.model.load import load_config, load_model
from miles.core.model.packed import output_head
from miles.core.model.reward import is_reward_model, load_reward_model, put_head


def load_value_model(path: str | Path, dtype: torch.dtype = torch.float32, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model in `path`, on the CPU, in `dtype` and eval mode; `reward.packed_values` reads it.

    A reward model keeps its head, so its values begin as what it thinks of the text so far. A language model gets a head of zeros:
    every value begins at 0, and the first advantages are what the rewards alone say. Raises as `load_model` and `load_reward_model`.
    """
    config = load_config(path, trust_remote_code=trust_remote_code)
    if not is_reward_model(config):
        return add_value_head(load_model(path, dtype, trust_remote_code=trust_remote_code))
    reward: Any = load_reward_model(path, dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(reward.config)
    # The language model's own forward around the reward model's body, with one configuration for both.
    setattr(model, model.base_model_prefix, reward.base_model)
    model.config = reward.config
    put_head(model, reward.score.weight.detach())
    return model.eval()


def add_value_head(model: PreTrainedModel) -> PreTrainedModel:
    """`model` with a head of zeros, also where it has no weights as yet."""
    put_head(model, torch.zeros(1, output_head(model).in_features, dtype=model.dtype))
    return model
