"""A sample in a teacher's tokens: a character tokenizer and a byte-level BPE trained here, which share hardly a boundary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from miles.core.model.tiny import character_tokenizer
from miles.data.chat import render
from miles.data.reading import Reader, end_of_turn
from miles.data.types import Prompt, Sample, Status
from tests.data.tokenizers_for_tests import byte_tokenizer, user

TEMPLATE = "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + '<end>' }}{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
TEXT = "the theatre there; naïve café — 漢字 and 😀😀 the end"


@pytest.fixture(scope="module")
def bpe() -> PreTrainedTokenizerFast:
    """Trained on the spot; its post-processor trims offsets, as GPT-2's does."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=266, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    core.train_from_iterator(["the then there theatre " * 4, "the end and the end " * 4], trainer)
    core.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    core.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def characters() -> PreTrainedTokenizerFast:
    return character_tokenizer("".join(sorted(set(TEXT + "[]askuernt"))), 256)


def prompt_of(tokenizer: Any, text: str = "end") -> Prompt:
    rendered = render(tokenizer, [user(text)], generate=True)
    return Prompt(prompt_id=0, tokens=np.array(tokenizer(rendered)["input_ids"]), text=rendered, columns={}, messages=[user(text)])


def sample_of(prompt: Prompt, response: list[int], status: Status = Status.COMPLETED, masked: tuple[int, ...] = ()) -> Sample:
    mask = ~np.isin(np.arange(len(response)), masked)
    return Sample(
        sample_id="s",
        group_id="g",
        tokens=[*prompt.tokens, *response],
        prompt_length=len(prompt.tokens),
        loss_mask=mask,
        logprobs=np.zeros(len(response)),
        weight_versions=np.zeros(len(response)),
        status=status,
    )


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("direction", ["characters learn from bpe", "bpe learns from characters"])
def test_every_span_is_the_same_text_of_both(characters: Any, bpe: Any, direction: str) -> None:
    student, teacher = (characters, bpe) if direction.startswith("char") else (bpe, characters)
    prompt, response = prompt_of(student), [*ids(student, TEXT), student.eos_token_id]
    (reading,) = Reader(student, teacher, ends=[student.eos_token_id], context=512).read(prompt, [sample_of(prompt, response)])
    assert (reading.span_R >= 0).all()
    written = reading.tokens[reading.prompt_length :]
    for span in range(reading.span_R.max()):
        left = student.decode([response[i] for i in np.flatnonzero(reading.span_R == span)])
        assert left == teacher.decode(written[reading.span_Q == span].tolist())
    assert teacher.decode(written.tolist()) == TEXT + teacher.eos_token
    assert reading.span_R[-1] == reading.span_Q[-1] == reading.span_R.max(), "the ends of both turns are one span"
    assert 20 < reading.span_R.max() < len(TEXT), "and there is something to align"


def test_the_prompt_is_in_the_teachers_own_template(characters: Any, bpe: Any) -> None:
    prompt = prompt_of(characters)
    (reading,) = Reader(characters, bpe, ends=[3], context=512).read(prompt, [sample_of(prompt, [3])])
    assert bpe.decode(reading.tokens.tolist()) == "[user]end<end>[assistant]<end>"
    assert bpe.decode(reading.tokens[: reading.prompt_length].tolist()) == "[user]end<end>[assistant]"


def test_a_prompt_without_a_template_stays_without_one(characters: Any, bpe: Any) -> None:
    prompt = Prompt(prompt_id=0, tokens=np.array(ids(characters, "the ")), text="the ", columns={})
    (reading,) = Reader(characters, bpe, ends=[3], context=512).read(prompt, [sample_of(prompt, ids(characters, "end"), Status.TRUNCATED)])
    assert bpe.decode(reading.tokens.tolist()) == "the end"


def test_with_equal_tokenizers_each_token_is_a_span(bpe: Any) -> None:
    prompt, response = prompt_of(bpe), [*ids(bpe, TEXT), bpe.eos_token_id]
    (reading,) = Reader(bpe, bpe, ends=[bpe.eos_token_id], context=512).read(prompt, [sample_of(prompt, response)])
    assert reading.tokens.tolist() == [*prompt.tokens, *response]
    whole = [piece for piece in range(len(response)) if "�" not in bpe.decode([response[piece]])]
    spans = reading.span_R[whole].tolist()
    assert spans == reading.span_Q[whole].tolist()
    assert len(set(spans)) == len(whole)


def test_tokens_that_the_student_would_not_choose_itself(bpe: Any) -> None:
    """Sampled letter by letter what the tokenizer writes in one token: that text is one span, of three tokens and one."""
    letters = bpe.convert_tokens_to_ids(list("the"))
    prompt = prompt_of(bpe)
    (reading,) = Reader(bpe, bpe, ends=[], context=512).read(prompt, [sample_of(prompt, letters, Status.TRUNCATED)])
    assert (reading.span_R.tolist(), reading.span_Q.tolist()) == ([0, 0, 0], [0])


def test_a_character_that_was_cut_off_is_not_compared(bpe: Any) -> None:
    tokenizer = byte_tokenizer()
    response = ids(tokenizer, "the 漢")[:-1]
    prompt = prompt_of(tokenizer)
    (reading,) = Reader(tokenizer, bpe, ends=[], context=512).read(prompt, [sample_of(prompt, response, Status.TRUNCATED)])
    assert (reading.span_R >= 0).tolist() == [True] * 4 + [False] * 2
    assert bpe.decode(reading.tokens[reading.prompt_length :].tolist()) == "the "


def test_an_end_behind_bytes_that_are_no_text_is_not_compared(bpe: Any) -> None:
    tokenizer = byte_tokenizer()
    prompt, response = prompt_of(tokenizer), [*ids(tokenizer, "漢")[:-1], tokenizer.eos_token_id]
    (reading,) = Reader(tokenizer, bpe, ends=[tokenizer.eos_token_id], context=512).read(prompt, [sample_of(prompt, response)])
    assert (reading.span_R == -1).all()
    assert len(reading.span_Q) == 0


def test_a_character_that_the_teacher_does_not_know_is_its_unknown_token(bpe: Any) -> None:
    teacher = character_tokenizer("abcdefgh", 64)
    prompt, response = prompt_of(bpe), [*ids(bpe, "a"), *ids(bpe, "é"), *ids(bpe, "b")]
    (reading,) = Reader(bpe, teacher, ends=[], context=512).read(prompt, [sample_of(prompt, response, Status.TRUNCATED)])
    assert reading.span_R.tolist() == [0, 1, 1, 2]
    assert teacher.convert_ids_to_tokens(reading.tokens[reading.prompt_length :].tolist()) == ["a", "<|unk|>", "b"]


def test_a_span_with_a_token_that_is_not_trained_is_not_compared(characters: Any, bpe: Any) -> None:
    prompt = prompt_of(characters)
    sample = sample_of(prompt, ids(characters, "the end"), Status.TRUNCATED, masked=(1,))
    (reading,) = Reader(characters, bpe, ends=[], context=512).read(prompt, [sample])
    the = bpe.decode(reading.tokens[reading.prompt_length : reading.prompt_length + 1].tolist())
    assert the == "the"
    assert (reading.span_R >= 0).tolist() == [False] * 3 + [True] * 4


def test_what_does_not_fit_the_teachers_context_is_not_compared(characters: Any, bpe: Any) -> None:
    prompt, response = prompt_of(characters), ids(characters, TEXT)
    sample = sample_of(prompt, response, Status.TRUNCATED)
    (whole,) = Reader(characters, bpe, ends=[], context=512).read(prompt, [sample])
    (cut,) = Reader(characters, bpe, ends=[], context=whole.prompt_length + 3).read(prompt, [sample])
    assert cut.tokens.tolist() == whole.tokens[: whole.prompt_length + 3].tolist()
    assert len(cut.span_Q) == 3
    assert set(cut.span_R.tolist()) == {-1, *cut.span_Q.tolist()}
    (nothing,) = Reader(characters, bpe, ends=[], context=2).read(prompt, [sample])
    assert (nothing.span_R == -1).all()


def test_the_end_of_a_turn_is_what_the_template_writes() -> None:
    """As Gemma's: the turn's end is not eos."""
    tokenizer = byte_tokenizer()
    assert end_of_turn(tokenizer) == tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokenizer.eos_token = "<s>"
    assert end_of_turn(tokenizer) == tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokenizer.chat_template = None
    assert end_of_turn(tokenizer) == tokenizer.convert_tokens_to_ids("<s>")
