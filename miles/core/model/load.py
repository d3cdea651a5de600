"""Reads a Hugging Face model directory: weights, tokenizer, context length and stop tokens.

What a whole `[model]` section means is said here once: `longest_sequence`, `tokenizer_of` and `end_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from miles.config import ConfigError
from miles.core.model.config import ModelConfig

# Loading bars of several processes would run through the run's own progress line.
transformers_logging.disable_progress_bar()


def load_model(path: str | Path, dtype: torch.dtype = torch.float32, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The causal language model in `path`, on the CPU, in `dtype` and eval mode (no dropout).

    Raises:
        ValueError: no model is there, its architecture is no causal language model, or its files lack a tensor, have one too
            many or one of another shape. transformers alone would fill such tensors with random numbers and go on.
    """
    config = load_config(path, trust_remote_code=trust_remote_code)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (OSError, KeyError) as error:
        raise ValueError(f"model.path = {str(path)!r}: the weights cannot be read: {error}") from error
    except ValueError as error:
        raise ValueError(f"model.path = {str(path)!r} is no causal language model that transformers knows: {error}") from error
    model, info = loaded
    for kind in ("missing", "unexpected", "mismatched"):
        # A mismatch is (name, shape there, shape here). It is let through until here, where it is refused by name.
        names = sorted(str(key[0] if isinstance(key, tuple) else key) for key in info[f"{kind}_keys"])
        if names:
            raise ValueError(f"model.path = {str(path)!r}: {len(names)} {kind} tensors, the first is {names[0]}")
    return model.eval()


def load_config(path: str | Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The model's `config.json`. Raises ValueError when `path` is neither a model directory nor a name that the hub answers."""
    folder = Path(path)
    if folder.exists() and not (folder / "config.json").is_file():
        raise ValueError(f"model.path = {str(path)!r} has no config.json: it must be a Hugging Face model directory")
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path = {str(path)!r} is no model directory, and no hub answers for it: {error}") from error


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer in `path`. Raises ValueError when there is none."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer in {str(path)!r}; set model.tokenizer to a directory that has one: {error}") from error


def longest_sequence(model: ModelConfig) -> int:
    """Tokens of the longest sequence that trainer and engines take: `model.context`, else the model's own. Raises as `context_length`."""
    return model.context or context_length(model.path, trust_remote_code=model.trust_remote_code)


def prompt_room(model: ModelConfig, max_new_tokens: int, option: str) -> int:
    """The longest prompt that leaves room for an answer. `option` names `max_new_tokens` in the message.

    Raises:
        ConfigError: there is no room for even one token; and as `longest_sequence`.
    """
    longest = longest_sequence(model)
    if max_new_tokens >= longest:
        raise ConfigError(
            f"{option} = {max_new_tokens} leaves no room for a prompt in a context of {longest} tokens: lower it to {longest - 1} or less, "
            "by as much as your prompts are long"
        )
    return longest - max_new_tokens


def tokenizer_of(model: ModelConfig) -> PreTrainedTokenizerBase:
    """`model.tokenizer`, else the model's own. Raises as `load_tokenizer`."""
    return load_tokenizer(model.tokenizer or model.path, trust_remote_code=model.trust_remote_code)


def end_tokens(model: ModelConfig, tokenizer: PreTrainedTokenizerBase, extra: Sequence[str]) -> tuple[int, ...]:
    """`stop_token_ids` of `model`."""
    return stop_token_ids(model.path, tokenizer, extra, trust_remote_code=model.trust_remote_code)


def context_length(path: str | Path, *, trust_remote_code: bool = False) -> int:
    """The longest sequence in tokens, `max_position_embeddings` of the (text) configuration."""
    length = getattr(load_config(path, trust_remote_code=trust_remote_code).get_text_config(), "max_position_embeddings", None)
    if not length:
        raise ValueError(f"the configuration in {str(path)!r} has no max_position_embeddings; set model.context to the longest sequence in tokens")
    return int(length)


def stop_token_ids(path: str | Path, tokenizer: PreTrainedTokenizerBase, extra: Sequence[str] = (), *, trust_remote_code: bool = False) -> tuple[int, ...]:
    """Ids that end a generation, sorted: eos of generation_config, config and tokenizer, and each text of `extra`.

    Raises:
        ValueError: a text of `extra` is not exactly one token, or nothing at all stops the model.
    """
    found: set[int] = set()
    for eos in (_generation_eos(path), load_config(path, trust_remote_code=trust_remote_code).eos_token_id, tokenizer.eos_token_id):
        found.update([eos] if isinstance(eos, int) else eos or [])
    for text in extra:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
            shown = tokenizer.convert_ids_to_tokens(ids)
            raise ValueError(f"stop text {text!r} must be one token of the tokenizer, but it is {len(ids)}: {shown}")
        found.update(ids)
    if not found:
        raise ValueError(f"nothing stops the model in {str(path)!r}: it has no eos token; name one in rollout.stop")
    return tuple(sorted(found))


def _generation_eos(path: str | Path) -> Any:
    """None where the directory has no generation_config.json, which is allowed."""
    try:
        return GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        return None
