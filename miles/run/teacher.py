"""A teacher must read the student's tokens as the student does. Checked from both directories' files, before anything starts."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from miles.config import ConfigError
from miles.core.model.load import load_config
from miles.run.reader import check_reader
from miles.run.recipe import DistillRecipe

_CURE = "Use a teacher of the student's family, or train on its answers with `miles sft`"


def check_teacher(recipe: DistillRecipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """`tokenizer`: the student's.

    Raises:
        ConfigError: another token stands behind some id, a whole-vocabulary divergence would compare output heads of different sizes,
            or the student's sequences may be longer than the teacher's context.
    """
    model, teacher = recipe.model, recipe.distill.teacher
    check_reader("distill.teacher", teacher, model, tokenizer, whose="student", cure=_CURE)
    heads = [load_config(path, trust_remote_code=model.trust_remote_code).get_text_config().vocab_size for path in (model.path, teacher)]
    if heads[0] != heads[1] and recipe.distill.divergence != "sampled":
        raise ConfigError(
            f"distill.divergence = {recipe.distill.divergence!r} compares whole vocabularies, but the student's output head has {heads[0]:,} rows and "
            f"the teacher's {heads[1]:,}: use distill.divergence = 'sampled', which compares the sampled tokens alone"
        )
