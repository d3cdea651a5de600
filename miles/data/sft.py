"""Conversations to imitate: rows become `Sample`s whose loss mask says which tokens count, and an endless shuffled stream of batches."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from miles.config import ConfigError
from miles.data import chat, rows
from miles.data.config import SFTDataConfig
from miles.data.order import EpochOrder
from miles.data.prompts import checked_messages, refuse_empty
from miles.data.types import Sample, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SFTReport:
    """What loading did: `rows` became `kept` samples. `split` rows gave one sample per assistant turn, because the template rewrites
    history; `too_long` and `unaligned` (see `chat.UnalignedTurn`) count samples left out. Lengths are in tokens."""

    rows: int
    blank_lines: int
    split: int
    too_long: int
    unaligned: int
    kept: int
    max_tokens: int
    longest: int

    def __str__(self) -> str:
        return (
            f"{self.kept} samples of {self.rows} rows, the longest {self.longest} tokens; {self.split} rows split by turn; left out: "
            f"{self.too_long} longer than {self.max_tokens} tokens, {self.unaligned} unaligned, {self.blank_lines} blank lines"
        )


class SFTDataset:
    """Samples with the chat template applied; immutable. `shuffle` is the configuration's, for the stream."""

    def __init__(self, samples: Sequence[Sample], report: SFTReport, shuffle: bool) -> None:
        self._samples = tuple(samples)
        self.report = report
        self.shuffle = shuffle

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index]

    @classmethod
    def load(cls, config: SFTDataConfig, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> SFTDataset:
        """Read `config.paths`, render, mask and filter by length (`config.max_tokens` can only lower `max_tokens`).

        A tokenizer without a chat template takes prompt and completion strings, joined as they are, with its end token after them.

        Raises:
            ConfigError: whatever is wrong with a file, a row or a column, by file, line and column; a conversation has nothing to
                train; the template rewrites history and `train_on = "all"` asks for the tokens of one rendering; nothing is left.
        """
        limit = min(config.max_tokens or max_tokens, max_tokens)
        table = rows.read(config.paths)
        weights = _weights(config, table)
        conversations: Sequence[_Conversation] = _plain(config, tokenizer, table) if tokenizer.chat_template is None else _chats(config, table)
        counts: Counter[str] = Counter()
        samples: list[Sample] = []
        lengths: list[int] = []
        for number, (conversation, place, weight) in enumerate(zip(conversations, table.places, weights, strict=True)):
            for part, (tokens, mask) in enumerate(_trajectories(config, tokenizer, conversation, place, counts)):
                lengths.append(len(tokens))
                if len(tokens) <= limit:
                    sample = sample_of(f"{number}/{part}", tokens, np.ones_like(mask) if config.train_on == "all" else mask)
                    samples.append(sample if weight is None else replace(sample, metadata={"weight": weight}))
        if not samples:
            raise ConfigError(
                f"no conversation is left of {len(table.rows)} rows of {', '.join(config.paths)}: {len(lengths)} are longer than {limit} tokens"
                f"{f' (the shortest has {min(lengths)})' if lengths else ''}, {counts['unaligned']} unaligned"
            )
        report = SFTReport(
            rows=len(table.rows),
            blank_lines=table.blank_lines,
            split=counts["split"],
            too_long=len(lengths) - len(samples),
            unaligned=counts["unaligned"],
            kept=len(samples),
            max_tokens=limit,
            longest=max(len(s.tokens) for s in samples),
        )
        if report.blank_lines or report.too_long or report.unaligned:
            logger.warning("%s: %s", ", ".join(config.paths), report)
        if report.split:
            logger.warning("the chat template rewrites history: %d of %d rows became one sample per assistant turn", report.split, report.rows)
        return cls(samples, report, config.shuffle)


class SFTStream:
    """The dataset without end. The batch of a step is a pure function of (seed, step, batch_size): the step is the whole cursor."""

    def __init__(self, dataset: SFTDataset, seed: int) -> None:
        self.dataset = dataset
        self._order = EpochOrder(len(dataset), seed, dataset.shuffle)

    def batch(self, step: int, batch_size: int) -> list[Sample]:
        """Samples at positions step x batch_size and on; a batch may span the end of an epoch."""
        return [self.dataset[self._order[position]] for position in range(step * batch_size, (step + 1) * batch_size)]

    @cached_property
    def fingerprint(self) -> str:
        """Equal for streams whose positions all have the same tokens."""
        return self._order.fingerprint(self.dataset[i].tokens for i in range(len(self.dataset)))


_Trajectory = tuple[NDArray[np.int64], NDArray[np.bool_]]
"""Token ids [T] and which of them count [T]."""
_Conversation = list[chat.Message] | _Trajectory


def _chats(config: SFTDataConfig, table: rows.Table) -> list[list[chat.Message]]:
    column = config.messages_column
    if column is not None:
        values = table.column(column, "data.messages_column")
        if (kind := table.one_kind(column, values)) != "list":
            raise ConfigError(f"column {column!r} is a {kind} at {table.places[0]}: messages are a list of objects with role and content")
        refuse_empty(table, column, values)
        return [_checked(value, place, column, config.train_on) for value, place in zip(values, table.places, strict=True)]
    prompts, completions = _pairs(config, table)
    conversations = []
    for prompt, completion, place in zip(prompts, completions, table.places, strict=True):
        before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else checked_messages(prompt, place, config.prompt_column)
        conversations.append([*before, {"role": "assistant", "content": completion}])
    return conversations


def _weights(config: SFTDataConfig, table: rows.Table) -> list[float] | list[None]:
    column = config.weight_column
    if column is None:
        return [None] * len(table.rows)
    values = table.column(column, "data.weight_column")
    for value, place in zip(values, table.places, strict=True):
        if rows.kind(value) != "number" or not 0 < value < math.inf:
            raise ConfigError(f"{place}: column {column!r} is {value!r:.80}: a weight is a number above 0; leave rows out that are not to count")
    return [float(value) for value in values]


def _pairs(config: SFTDataConfig, table: rows.Table) -> tuple[list[Any], list[str]]:
    prompts = table.column(config.prompt_column, "data.prompt_column; for conversations set data.messages_column")
    completions = table.column(config.completion_column, "data.completion_column")
    prompt_kind = table.one_kind(config.prompt_column, prompts)
    completion_kind = table.one_kind(config.completion_column, completions)
    if prompt_kind not in ("string", "list"):
        raise ConfigError(f"column {config.prompt_column!r} is a {prompt_kind} at {table.places[0]}: a prompt is a string or a list of messages")
    if completion_kind != "string":
        raise ConfigError(f"column {config.completion_column!r} is a {completion_kind} at {table.places[0]}: a completion is a string")
    refuse_empty(table, config.prompt_column, prompts)
    refuse_empty(table, config.completion_column, completions)
    return prompts, completions


def _checked(value: list[Any], place: str, column: str, train_on: str) -> list[chat.Message]:
    messages = checked_messages(value, place, column)
    _check_marks(messages, place, column, train_on)
    if train_on == "completion" and messages[-1]["role"] != "assistant":
        raise ConfigError(f"{place}: data.train_on = 'completion' needs a conversation that ends with an assistant turn, not {messages[-1]['role']!r}")
    if not any(m["role"] == "assistant" for m in messages) and train_on != "all":
        raise ConfigError(f"{place}: the conversation has no assistant turn to train; its roles are {', '.join(m['role'] for m in messages)}")
    return messages


def _check_marks(messages: list[chat.Message], place: str, column: str, train_on: str) -> None:
    """Marks of turns that are context alone (`"train": false`) must be booleans, fit `train_on` and leave something to train."""
    for number, message in enumerate(messages):
        if not isinstance(message.get("train", True), bool):
            raise ConfigError(f"{place}: column {column!r}, message {number}: train is {message['train']!r:.80}, but it is either true or false")
    untrained = [n for n, m in enumerate(messages) if not m.get("train", True)]
    if untrained and train_on == "all":
        raise ConfigError(f"{place}: message {untrained[0]} has \"train\": false, but data.train_on = 'all' trains every token: use 'assistant'")
    asked = messages[-1:] if train_on == "completion" else messages
    if untrained and not any(chat.is_trained(m) for m in asked):
        raise ConfigError(f'{place}: "train": false on message {untrained[-1]} leaves nothing to train')


def _plain(config: SFTDataConfig, tokenizer: PreTrainedTokenizerBase, table: rows.Table) -> list[_Trajectory]:
    """Prompt and completion strings without a template. The two are tokenised apart, as they will be when the model answers."""
    if config.messages_column is not None:
        raise ConfigError(f"data.messages_column = {config.messages_column!r}, but the tokenizer has no chat template: give prompt and completion strings")
    prompts, completions = _pairs(config, table)
    if table.one_kind(config.prompt_column, prompts) == "list":
        raise ConfigError(f"column {config.prompt_column!r} has messages ({table.places[0]}), but the tokenizer has no chat template: give strings")
    return plain_trajectories(tokenizer, prompts, completions)


def plain_trajectories(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], completions: Sequence[str]) -> list[_Trajectory]:
    """Token ids of each prompt, completion and end token, and the mask of the latter two. Raises ConfigError without an end token."""
    if tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has neither a chat template nor an end token (eos): the model could never learn to stop")
    pieces = zip(chat.encode_plain(tokenizer, prompts), chat.encode(tokenizer, completions), strict=True)
    end = np.array([tokenizer.eos_token_id], np.int64)
    return [(np.concatenate([p, c, end]), np.arange(len(p) + len(c) + 1) >= len(p)) for p, c in pieces]


def _trajectories(
    config: SFTDataConfig, tokenizer: PreTrainedTokenizerBase, conversation: _Conversation, place: str, counts: Counter[str]
) -> list[_Trajectory]:
    if isinstance(conversation, tuple):
        return [conversation]
    try:
        trajectories = [(c.tokens_T, c.mask_T) for c in _encode(config, tokenizer, conversation, counts)]
        if config.train_on != "all" and not all(mask.any() for _, mask in trajectories):
            raise ConfigError(f"{place}: an assistant turn is empty and the template ends it with no token either, so there is nothing to train")
        return trajectories
    except chat.UnalignedTurn:
        counts["unaligned"] += 1
        return []
    except chat.ChatError as error:
        raise ConfigError(f"{place}: {error}") from error


def _encode(config: SFTDataConfig, tokenizer: PreTrainedTokenizerBase, messages: list[chat.Message], counts: Counter[str]) -> list[chat.Conversation]:
    if config.train_on == "completion":
        return [chat.encode_last_turn(tokenizer, messages)]
    try:
        return [chat.encode_chat(tokenizer, messages)]
    except chat.RewritesHistory as error:
        if config.train_on == "all":
            raise chat.ChatError(f"{error}; data.train_on = 'all' cannot be right here, use 'assistant' (one sample per turn) or 'completion'") from error
        counts["split"] += 1
        return chat.split_turns(tokenizer, messages)


def sample_of(sample_id: str, tokens_T: NDArray[np.int64], mask_T: NDArray[np.bool_]) -> Sample:
    """A sample whose response starts at the first token that counts and ends with the last: what follows cannot matter to the loss."""
    counted = np.flatnonzero(mask_T)
    start, stop = max(1, int(counted[0])), int(counted[-1]) + 1
    return Sample(
        sample_id=sample_id,
        group_id=sample_id,
        tokens=tokens_T[:stop],
        prompt_length=start,
        loss_mask=mask_T[start:stop],
        logprobs=np.zeros(stop - start, np.float32),
        weight_versions=np.full(stop - start, -1, np.int32),
        status=Status.COMPLETED,
    )
