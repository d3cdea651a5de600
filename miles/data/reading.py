"""A sample as a teacher with another tokenizer reads it: its prompt in the teacher's own template, and its answer's text in the teacher's tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from miles.data import chat
from miles.data.pieces import Pieces
from miles.data.spans import character_offsets, common_spans
from miles.data.taught import Reading
from miles.data.types import Prompt, Sample, Status

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


class Reader:
    """Reads samples of one tokenizer in the tokens of another.

    Not compared are tokens behind bytes that are no text (a character cut off at the end, say), and spans with a token that is not trained. A
    character that the teacher does not know is its unknown token, which it expects as little: left out, it would be a way around the teacher.

    Args:
        ends: ids that end the student's turn; they stand for the token that ends the teacher's.
        context: the most tokens the teacher takes. What lies behind is not compared.
    Raises:
        ValueError: the student's tokenizer does not tell what its tokens write, or the teacher's is not a fast one.
    """

    def __init__(self, student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, *, ends: Iterable[int], context: int) -> None:
        self._pieces = Pieces(student)
        self._teacher, self._core = teacher, _untrimmed(teacher)
        self._ends, self._context = frozenset(ends), context
        self._end = end_of_turn(teacher)

    def read(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Reading]:
        """How the teacher reads `samples`, all of which answer `prompt`."""
        if prompt.messages is None:
            (before,) = chat.encode_plain(self._teacher, [prompt.text])
        else:
            (before,) = chat.encode(self._teacher, [chat.render(self._teacher, prompt.messages, generate=True)])
        return [self._read(sample, before) for sample in samples]

    def _read(self, sample: Sample, before: NDArray[np.int64]) -> Reading:
        response = sample.response_tokens.tolist()
        ended = sample.status is Status.COMPLETED and bool(response) and response[-1] in self._ends
        ids, span_R, span_Q, count = self._aligned(response[:-1] if ended else response)
        if ended and (span_R.size == 0 or span_R[-1] >= 0):
            ids, span_R, span_Q = np.append(ids, self._end), np.append(span_R, np.int32(count)), np.append(span_Q, np.int32(count))
        elif ended:
            span_R = np.append(span_R, np.int32(-1))  # the teacher has read another text before it
        tokens = np.concatenate([before, ids])[: self._context]
        prompt_length = min(len(before), len(tokens))
        fits = np.arange(len(span_Q)) < len(tokens) - prompt_length
        dropped = np.concatenate([span_R[~sample.loss_mask], span_Q[~fits]])
        span_R, span_Q = (np.where(np.isin(span, dropped), np.int32(-1), span) for span in (span_R, span_Q))
        return Reading(tokens=tokens, prompt_length=prompt_length, span_R=span_R, span_Q=span_Q[fits])

    def _aligned(self, response: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32], int]:
        """The teacher's ids for the text that `response` writes, and the spans of both."""
        pieces = self._pieces.of(response)
        text = _text(b"".join(pieces))
        encoding = self._core.encode(text, add_special_tokens=False)
        offsets_Q2 = character_offsets(text)[np.array(encoding.offsets, np.int64).reshape(-1, 2)]
        ends_N = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        span_N, span_Q, count = common_spans(ends_N, offsets_Q2[:, 0], offsets_Q2[:, 1])
        silent_N = np.array([not piece for piece in pieces], bool)
        return np.array(encoding.ids, np.int64), np.where(silent_N, np.int32(-1), span_N), span_Q, count


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that the chat template writes behind an assistant's words; eos where there is no template, or it writes no special token there.

    Raises:
        ValueError: neither is there.
    """
    if tokenizer.chat_template is not None:
        text = chat.render(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], generate=False)
        (ids,) = chat.encode(tokenizer, [text[text.rindex("b") + 1 :]])
        if len(ids) and ids[0] in tokenizer.all_special_ids:
            return int(ids[0])
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer {tokenizer.name_or_path!r} has no token that ends a turn: neither its template writes one nor has it an eos token")
    return int(tokenizer.eos_token_id)


def _text(written: bytes) -> str:
    """The text that the bytes begin with: all of it, unless some are no UTF-8."""
    try:
        return written.decode()
    except UnicodeDecodeError as error:
        return written[: error.start].decode()


def _untrimmed(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """A copy of the tokenizer's core whose offsets are those of whole tokens: a post-processor may leave the space before a word out of them."""
    from tokenizers import Tokenizer

    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer {tokenizer.name_or_path!r} is not a fast one (tokenizer.json): it does not tell which text its tokens stand for")
    return Tokenizer.from_str(json.dumps(json.loads(tokenizer.backend_tokenizer.to_str()) | {"post_processor": None, "truncation": None, "padding": None}))
