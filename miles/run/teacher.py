"""A teacher must read the student's tokens as the student does. Checked from both directories' files, before anything starts."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from miles.config import ConfigError
from miles.core.model.load import context_length, load_config, load_tokenizer, longest_sequence
from miles.run.recipe import DistillRecipe

_SHOWN = 3


def check_teacher(recipe: DistillRecipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """`tokenizer`: the student's.

    Raises:
        ConfigError: another token stands behind some id, a whole-vocabulary divergence would compare output heads of different sizes,
            or the student's sequences may be longer than the teacher's context.
    """
    model, teacher = recipe.model, recipe.distill.teacher
    trust = model.trust_remote_code
    _check_tokens(teacher, tokenizer.get_vocab(), load_tokenizer(teacher, trust_remote_code=trust).get_vocab())
    heads = [load_config(path, trust_remote_code=trust).get_text_config().vocab_size for path in (model.path, teacher)]
    if heads[0] != heads[1] and recipe.distill.divergence != "sampled":
        raise ConfigError(
            f"distill.divergence = {recipe.distill.divergence!r} compares whole vocabularies, but the student's output head has {heads[0]:,} rows and "
            f"the teacher's {heads[1]:,}: use distill.divergence = 'sampled', which compares the sampled tokens alone"
        )
    longest, context = longest_sequence(model), context_length(teacher, trust_remote_code=trust)
    if longest > context:
        raise ConfigError(
            f"the student's sequences may have {longest:,} tokens, but the teacher {teacher!r} takes {context:,}: set model.context = {context}, or less"
        )


def _check_tokens(teacher: str, own: dict[str, int], other: dict[str, int]) -> None:
    if own == other:
        return
    differing = sorted(token for token in own.keys() | other.keys() if own.get(token) != other.get(token))
    shown = ", ".join(f"{token!r} (student {own.get(token, 'none')}, teacher {other.get(token, 'none')})" for token in differing[:_SHOWN])
    raise ConfigError(
        f"distill.teacher = {teacher!r} has another tokenizer than the student: {len(differing):,} tokens have other ids, such as {shown}. "
        "Use a teacher of the student's family, or train on its answers with `miles sft`"
    )
