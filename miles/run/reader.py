"""A second model, such as a teacher or a critic, must read the policy's tokens as the policy does. Checked from its files, before anything starts."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from miles.config import ConfigError
from miles.core.model.config import ModelConfig
from miles.core.model.load import context_length, load_tokenizer, longest_sequence

_SHOWN = 3


def check_reader(option: str, path: str, model: ModelConfig, tokenizer: PreTrainedTokenizerBase, *, whose: str, cure: str) -> None:
    """Whether the model in `path`, which `option` names, can read what `model` writes with `tokenizer`.

    Args:
        whose: what a message calls `model`. cure: what it says to do about another tokenizer.
    Raises:
        ConfigError: another token stands behind some id, or the sequences may be longer than its context.
    """
    own, other = tokenizer.get_vocab(), load_tokenizer(path, trust_remote_code=model.trust_remote_code).get_vocab()
    if own != other:
        differing = sorted(token for token in own.keys() | other.keys() if own.get(token) != other.get(token))
        shown = ", ".join(f"{token!r} ({whose} {own.get(token, 'none')}, there {other.get(token, 'none')})" for token in differing[:_SHOWN])
        raise ConfigError(f"{option} = {path!r} has another tokenizer than the {whose}: {len(differing):,} tokens have other ids, such as {shown}. {cure}")
    longest, context = longest_sequence(model), context_length(path, trust_remote_code=model.trust_remote_code)
    if longest > context:
        raise ConfigError(
            f"the {whose}'s sequences may have {longest:,} tokens, but {option} = {path!r} takes {context:,}: set model.context = {context}, or less"
        )
