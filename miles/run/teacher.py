"""Whether a teacher can teach this student. Checked from both directories' files, before anything starts."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from miles.config import ConfigError
from miles.core.model.load import context_length, end_tokens, load_config, load_tokenizer
from miles.data.reading import Reader
from miles.run.reader import check_reader
from miles.run.recipe import DistillRecipe

_CURE = "Use a teacher of the student's family, or distill.divergence = 'sampled', which compares texts, or train on its answers with `miles sft`"


def check_teacher(recipe: DistillRecipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """`tokenizer`: the student's.

    Raises:
        ConfigError: with the student's own tokenizer, its sequences may be longer than the teacher's context. With another, the divergence is over the
            vocabulary, or a tokenizer does not tell what its tokens write. Output heads are of different sizes where they are compared,
            or smaller than top_k.
    """
    model, distill = recipe.model, recipe.distill
    trust = model.trust_remote_code
    other = load_tokenizer(distill.teacher, trust_remote_code=trust)
    if distill.divergence != "sampled" or other.get_vocab() == tokenizer.get_vocab():
        check_reader("distill.teacher", distill.teacher, model, tokenizer, whose="student", cure=_CURE)
    else:
        try:
            Reader(tokenizer, other, ends=end_tokens(model, tokenizer, ()), context=context_length(distill.teacher, trust_remote_code=trust))
        except ValueError as error:
            raise ConfigError(
                f"distill.teacher = {distill.teacher!r} has another tokenizer than the student, and their texts cannot be aligned: {error}"
            ) from error
    heads = [load_config(path, trust_remote_code=trust).get_text_config().vocab_size for path in (model.path, distill.teacher)]
    if heads[0] != heads[1] and distill.divergence != "sampled":
        raise ConfigError(
            f"distill.divergence = {distill.divergence!r} compares whole vocabularies, but the student's output head has {heads[0]:,} rows and "
            f"the teacher's {heads[1]:,}: use distill.divergence = 'sampled', which compares the sampled tokens alone"
        )
    if distill.top_k is not None and distill.top_k > heads[1]:
        raise ConfigError(f"distill.top_k = {distill.top_k:,} is more than the teacher's vocabulary of {heads[1]:,} tokens: lower it, 32 is usual")
