"""Reward models: a causal language model whose output head is one row, read at a sequence's last token.

On disk it is transformers' `...ForSequenceClassification` with one label, whose head is called `score`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from miles.core.model.load import load_config
from miles.core.model.packed import output_head, through_head


def add_reward_head(model: PreTrainedModel, seed: int) -> None:
    """Put a `reward_head` in the place of the language model's, in place."""
    old = output_head(model)
    put_head(model, reward_head(old.in_features, seed).to(old.weight.dtype))


def reward_head(width: int, seed: int) -> Tensor:
    """[1, width], float32. Equal for equal seeds; rewards begin with a spread of about 1.

    The spread is that of a normal hidden state, as its norm leaves it, times weights of standard deviation 1 / sqrt(width + 1).
    """
    return torch.randn(1, width, generator=torch.Generator().manual_seed(seed)) / (width + 1) ** 0.5


def put_head(model: PreTrainedModel, weight_1D: Tensor) -> None:
    """An output head of one row in the place of the model's own."""
    head = nn.Linear(weight_1D.shape[1], 1, bias=False, device="meta")
    head.weight = nn.Parameter(weight_1D)
    model.set_output_embeddings(head)


def packed_rewards(model: PreTrainedModel, tokens_T: Tensor, positions_T: Tensor, sequence_T: Tensor, first_T: Tensor | None = None) -> Tensor:
    """The reward of each sequence [S], float32 (float64 stays float64), with its graph. Arguments as in `packed.packed_logprobs`."""
    last_S = torch.unique_consecutive(sequence_T, return_counts=True)[1].cumsum(0) - 1
    return packed_values(model, tokens_T, positions_T, sequence_T, last_S, first_T)


def packed_values(model: PreTrainedModel, tokens_T: Tensor, positions_T: Tensor, sequence_T: Tensor, place_N: Tensor, first_T: Tensor | None = None) -> Tensor:
    """What the head of one row says after the tokens at `place_N` (int64, may be empty), [N]; else as `packed_rewards`."""
    return through_head(model, tokens_T, positions_T, sequence_T, place_N, _reward, first_T)


def reward_shell(config: PretrainedConfig, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """An empty reward model (meta tensors) of the language model that `config` describes.

    Raises:
        ValueError: transformers has no sequence classification for this architecture.
    """
    config.num_labels = 1
    config.tie_word_embeddings = False
    if config.pad_token_id == config.eos_token_id:
        config.pad_token_id = None  # or transformers would read the token before the end token instead
    with torch.device("meta"):
        try:
            shell = AutoModelForSequenceClassification.from_config(config, trust_remote_code=trust_remote_code)
        except ValueError as error:
            raise ValueError(f"a reward model cannot be made of {type(config).__name__}: {error}") from error
    if not isinstance(getattr(shell, "score", None), nn.Linear):
        raise ValueError(f"a reward model cannot be made of {type(config).__name__}: {type(shell).__name__} has no linear head called score")
    return shell


def on_disk(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` of a model that `add_reward_head` changed, under the names that `reward_shell` has."""
    head = output_head(model)
    name = next(name for name, module in model.named_modules() if module is head)
    return {"score.weight" if key == f"{name}.weight" else key: tensor for key, tensor in state.items()}


def is_reward_model(config: PretrainedConfig) -> bool:
    """Whether a directory with this configuration holds a reward model, and not a language model."""
    return config.num_labels == 1 and any("SequenceClassification" in name for name in config.architectures or ())


def load_reward_model(path: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The reward model in `path`, on the CPU, in eval mode.

    Raises:
        ValueError: none is there: no model at all, or one without a trained head of one row.
    """
    config = load_config(path)
    if not is_reward_model(config):
        raise ValueError(f"{str(path)!r} is no reward model, but {', '.join(config.architectures or ['nothing named'])}: `miles reward` makes one")
    model, info = AutoModelForSequenceClassification.from_pretrained(path, config=config, dtype=dtype, output_loading_info=True)
    for kind in ("missing", "unexpected", "mismatched"):
        if info[f"{kind}_keys"]:
            raise ValueError(f"{str(path)!r}: {kind} tensors: {sorted(map(str, info[f'{kind}_keys']))[0]} and so on")
    return model.eval()


def reward_of(model: Any, tokens_T: Tensor) -> float:
    """The reward of one sequence, int64 [T], by a model of `load_reward_model`."""
    with torch.inference_mode():
        # Not the model's own forward: it would read the last token that is not the pad token, which may be the end token.
        hidden_D = model.base_model(input_ids=tokens_T[None], use_cache=False).last_hidden_state[0, -1]
        return float(model.score(hidden_D))


def _reward(hidden_SD: Tensor, weight_1D: Tensor) -> Tensor:
    dtype = torch.float64 if hidden_SD.dtype == torch.float64 else torch.float32
    return torch.mv(hidden_SD.to(dtype), weight_1D[0].to(dtype))
