"""Chat templates at token level: prompts, whole conversations with the tokens of each assistant turn, and what follows a turn.

The rendered text is tokenised as a whole and never gets special tokens on top, so the ids are those that the model's own
template gives, with one BOS where it writes one. Places inside it are found by token prefixes: the template is rendered again up to
a turn, and those ids must be a prefix of the whole. Where they are not, the template rewrites history or a token spans the
boundary, and the caller gets an error instead of a mask that is silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2.exceptions import TemplateError
from numpy.typing import NDArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
"""As templates take it, and with `train: False` on an assistant's turn that is context alone; no template sees that key."""
Tools = list[dict[Any, Any] | Callable[..., Any]] | None
"""Tools as `apply_chat_template` takes them: JSON schemas or documented functions."""


class ChatError(ValueError):
    """A conversation that this template or tokenizer cannot turn into a trajectory."""


class RewritesHistory(ChatError):
    """The template shows an earlier turn in another way than when the model wrote it, for example without its thinking."""


class UnalignedTurn(ChatError):
    """A token spans the boundary between the template's text and the assistant's, so that neither side owns it."""


@dataclass(frozen=True)
class Turn:
    """Tokens `start:stop` are what the model writes in message `index`, its end token included."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Conversation:
    """A whole conversation: `tokens_T` int64 [T] and the assistant turns that were asked for, in order."""

    tokens_T: NDArray[np.int64]
    turns: tuple[Turn, ...]

    @property
    def mask_T(self) -> NDArray[np.bool_]:
        """bool [T]; True on the tokens of `turns`."""
        mask_T = np.zeros(len(self.tokens_T), np.bool_)
        for turn in self.turns:
            mask_T[turn.start : turn.stop] = True
        return mask_T


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, generate: bool, tools: Tools = None) -> str:
    """The template's text; with `generate`, ending where the assistant is to write.

    Raises:
        ChatError: there is no template, no message, or the template itself refuses the conversation.
    """
    if tokenizer.chat_template is None:
        raise ChatError(f"the tokenizer {tokenizer.name_or_path!r} has no chat template: set data.apply_chat_template = false and give prompts as strings")
    if not messages:
        raise ChatError("the conversation has no message before the assistant's first turn")
    try:
        return str(tokenizer.apply_chat_template([_shown(m) for m in messages], tools=tools, add_generation_prompt=generate, tokenize=False))
    except TemplateError as error:
        raise ChatError(f"the chat template refuses the conversation: {error}") from error


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[NDArray[np.int64]]:
    """Ids of rendered texts, int64, with nothing added. One call a text: a batched call took five times as long for short ones."""
    return [np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int64) for text in texts]


def encode_plain(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[NDArray[np.int64]]:
    """Ids of texts that no template wrote: with the tokenizer's BOS in front, once, if it is one that adds it."""
    added = tokenizer.encode("", add_special_tokens=True)
    bos = [tokenizer.bos_token_id] if added[:1] == [tokenizer.bos_token_id] else []
    return [ids if not bos or ids[:1].tolist() == bos else np.concatenate([np.array(bos, np.int64), ids]) for ids in encode(tokenizer, texts)]


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools = None) -> Conversation:
    """The conversation with every assistant turn that is to be trained.

    Raises:
        RewritesHistory, UnalignedTurn, ChatError: see there; `split_turns` is the way out of the first.
    """
    return _encode(tokenizer, messages, [i for i, m in enumerate(messages) if is_trained(m)], tools)


def encode_last_turn(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools = None) -> Conversation:
    """The conversation with its last message, an assistant turn, alone. Earlier turns are context, shown however the template likes.

    Raises:
        UnalignedTurn, ChatError: see there.
    """
    assert messages[-1]["role"] == "assistant"
    return _encode(tokenizer, messages, [len(messages) - 1], tools)


def split_turns(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools = None) -> list[Conversation]:
    """One conversation per assistant turn that is to be trained, each ending with it and marking it alone: exactly what the model saw and wrote then."""
    return [encode_last_turn(tokenizer, messages[: i + 1], tools) for i, m in enumerate(messages) if is_trained(m)]


def is_trained(message: Message) -> bool:
    """Whether the message is an assistant's turn and not marked as context."""
    return message["role"] == "assistant" and message.get("train", True)


def following_tokens(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], added: Sequence[Message], tools: Tools = None) -> NDArray[np.int64]:
    """Ids int64 that stand between the assistant turn ending `messages` and the next one, when `added` (tool results, a user) comes.

    A trajectory that goes on appends these to the ids that were sampled, which are never made again from text. All results of one turn
    must come in one call, since templates may join neighbours; the ids then equal the full chat template's.

    Raises:
        RewritesHistory: after `added` the template shows the earlier turns in another way.
    """
    assert messages[-1]["role"] == "assistant"
    whole = render(tokenizer, [*messages, *added], generate=True, tools=tools)
    before = render(tokenizer, messages, generate=False, tools=tools)
    opening = render(tokenizer, messages[:-1], generate=True, tools=tools)
    if not (whole.startswith(before) and before.startswith(opening)):
        raise RewritesHistory(_rewrites(len(messages) - 1))
    tokens, before_tokens, opening_tokens = encode(tokenizer, [whole, before, opening])
    if not (_is_prefix(before_tokens, tokens) and _is_prefix(opening_tokens, tokens)):
        raise UnalignedTurn(_unaligned(len(messages) - 1))
    return tokens[_end_of_turn(tokenizer, tokens, len(opening_tokens), len(before_tokens)) :]


def _encode(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], wanted: Sequence[int], tools: Tools) -> Conversation:
    whole = render(tokenizer, messages, generate=False, tools=tools)
    bounds = []
    for i in wanted:
        opening = render(tokenizer, messages[:i], generate=True, tools=tools)
        closing = whole if i == len(messages) - 1 else render(tokenizer, messages[: i + 1], generate=False, tools=tools)
        if not (whole.startswith(closing) and closing.startswith(opening)):
            raise RewritesHistory(_rewrites(i))
        bounds.append((opening, closing))
    # The last closing is often the whole text: each text is tokenised once.
    texts = list(dict.fromkeys([whole, *(text for bound in bounds for text in bound)]))
    ids = dict(zip(texts, encode(tokenizer, texts), strict=True))
    tokens_T = ids[whole]
    turns = []
    for i, (opening, closing) in zip(wanted, bounds, strict=True):
        opening_ids, closing_ids = ids[opening], ids[closing]
        if not (_is_prefix(opening_ids, tokens_T) and _is_prefix(closing_ids, tokens_T)):
            raise UnalignedTurn(_unaligned(i))
        turns.append(Turn(i, len(opening_ids), _end_of_turn(tokenizer, tokens_T, len(opening_ids), len(closing_ids))))
    return Conversation(tokens_T, tuple(turns))


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, tokens_T: NDArray[np.int64], start: int, stop: int) -> int:
    """One past the turn's end token, its last special token: a template's newline after it is not the model's to write.

    Told by place and not by id alone, so a pad token with the same id changes nothing. A template without an end token keeps all.
    """
    special = set(tokenizer.all_special_ids) | {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    last = next((t for t in range(stop - 1, start - 1, -1) if int(tokens_T[t]) in special), None)
    return stop if last is None else last + 1


def _shown(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "train"}


def _is_prefix(short: NDArray[np.int64], long: NDArray[np.int64]) -> bool:
    return len(short) <= len(long) and np.array_equal(short, long[: len(short)])


def _rewrites(index: int) -> str:
    return (
        f"the chat template shows the assistant's turn (message {index}) in another way once the conversation goes on, for example without its "
        "thinking: the tokens that the model wrote are not those of the full conversation"
    )


def _unaligned(index: int) -> str:
    return f"a token spans the boundary of the assistant's turn (message {index}): its text begins or ends so that it merges with the template's"
