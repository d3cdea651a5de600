"""Pairs of answers to one prompt, one better than the other, and an endless shuffled stream of batches of them.

A pair is two neighbours in a list of samples: chosen, rejected, chosen, rejected, ... In each, only the answer counts: what the
model would write, its end token included.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from miles.config import ConfigError
from miles.data import chat, rows
from miles.data.config import PairDataConfig
from miles.data.order import EpochOrder
from miles.data.prompts import checked_messages, refuse_empty
from miles.data.sft import plain_trajectories, sample_of
from miles.data.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Pair = tuple[Sample, Sample]
"""The chosen and the rejected answer."""


@dataclass(frozen=True, kw_only=True)
class PairReport:
    """What loading did: `rows` became `kept` pairs. Left out: `too_long` (either conversation), `unaligned` (see
    `chat.UnalignedTurn`) and `identical`, whose answers do not differ. `longest` is in tokens."""

    rows: int
    blank_lines: int
    too_long: int
    unaligned: int
    identical: int
    kept: int
    max_tokens: int
    longest: int

    def __str__(self) -> str:
        return (
            f"{self.kept} pairs of {self.rows} rows, the longest conversation {self.longest} tokens; left out: {self.too_long} longer than "
            f"{self.max_tokens} tokens, {self.unaligned} unaligned, {self.identical} with equal answers, {self.blank_lines} blank lines"
        )


class PairDataset:
    """Pairs with the chat template applied; immutable. `shuffle` is the configuration's, for the stream."""

    def __init__(self, pairs: Sequence[Pair], report: PairReport, shuffle: bool) -> None:
        self._pairs = tuple(pairs)
        self.report = report
        self.shuffle = shuffle

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> Pair:
        return self._pairs[index]

    @classmethod
    def load(cls, config: PairDataConfig, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> PairDataset:
        """Read `config.paths`, render, mask and filter by length (`config.max_tokens` can only lower `max_tokens`).

        A tokenizer without a chat template takes strings, joined as they are, with its end token after them.

        Raises:
            ConfigError: whatever is wrong with a file, a row or a column, by file, line and column; no pair is left.
        """
        limit = min(config.max_tokens or max_tokens, max_tokens)
        table = rows.read(config.paths)
        counts: Counter[str] = Counter()
        pairs = []
        for number, pair in enumerate(_plain(config, tokenizer, table) if tokenizer.chat_template is None else _chats(config, tokenizer, table)):
            why = _left_out(pair, limit)
            counts[why] += 1
            if pair is not None and why == "kept":
                pairs.append((_named(pair[0], f"{number}/chosen"), _named(pair[1], f"{number}/rejected")))
        report = PairReport(
            rows=len(table.rows),
            blank_lines=table.blank_lines,
            too_long=counts["too_long"],
            unaligned=counts["unaligned"],
            identical=counts["identical"],
            kept=len(pairs),
            max_tokens=limit,
            longest=max((len(s.tokens) for pair in pairs for s in pair), default=0),
        )
        if not pairs:
            raise ConfigError(f"no pair is left of {', '.join(config.paths)}: {report}")
        if len(pairs) < len(table.rows) or table.blank_lines:
            logger.warning("%s: %s", ", ".join(config.paths), report)
        return cls(pairs, report, config.shuffle)


class PairStream:
    """The dataset without end. The batch of a step is a pure function of (seed, step, batch_size): the step is the whole cursor."""

    def __init__(self, dataset: PairDataset, seed: int) -> None:
        self.dataset = dataset
        self._order = EpochOrder(len(dataset), seed, dataset.shuffle)

    def batch(self, step: int, batch_size: int) -> list[Sample]:
        """Chosen and rejected answers, in turn, of the `batch_size` pairs at positions step x batch_size and on."""
        return [sample for position in range(step * batch_size, (step + 1) * batch_size) for sample in self.dataset[self._order[position]]]

    @cached_property
    def fingerprint(self) -> str:
        """Equal for streams whose positions all have the same tokens."""
        return self._order.fingerprint(sample.tokens for i in range(len(self.dataset)) for sample in self.dataset[i])


def _left_out(pair: Pair | None, limit: int) -> str:
    if pair is None:
        return "unaligned"
    if max(len(s.tokens) for s in pair) > limit:
        return "too_long"
    return "identical" if np.array_equal(pair[0].tokens, pair[1].tokens) else "kept"


def _named(sample: Sample, name: str) -> Sample:
    return Sample(**(vars(sample) | {"sample_id": name, "group_id": name.partition("/")[0]}))


def _chats(config: PairDataConfig, tokenizer: PreTrainedTokenizerBase, table: rows.Table) -> list[Pair | None]:
    before = _prompts(config, table)
    chosen, rejected = (_answers(config, table, column) for column in (config.chosen_column, config.rejected_column))
    return [_pair(tokenizer, [*prompt, *good], [*prompt, *bad], place) for prompt, good, bad, place in zip(before, chosen, rejected, table.places, strict=True)]


def _pair(tokenizer: PreTrainedTokenizerBase, chosen: list[chat.Message], rejected: list[chat.Message], place: str) -> Pair | None:
    """None where a token spans the boundary of an answer."""
    if chosen[:-1] != rejected[:-1]:
        raise ConfigError(f"{place}: the chosen and the rejected conversation differ before their last turn, so they answer different prompts")
    try:
        good, bad = (chat.encode_last_turn(tokenizer, messages) for messages in (chosen, rejected))
    except chat.UnalignedTurn:
        return None
    except chat.ChatError as error:
        raise ConfigError(f"{place}: {error}") from error
    if not (good.mask_T.any() and bad.mask_T.any()):
        raise ConfigError(f"{place}: an answer is empty and the template ends it with no token either, so there is nothing to train")
    return sample_of(place, good.tokens_T, good.mask_T), sample_of(place, bad.tokens_T, bad.mask_T)


def _prompts(config: PairDataConfig, table: rows.Table) -> list[list[chat.Message]]:
    if config.prompt_column is None:
        return [[] for _ in table.rows]
    values, kind = _column(table, config.prompt_column, "data.prompt_column; null where chosen and rejected are whole conversations")
    if kind == "string":
        return [[{"role": "user", "content": value}] for value in values]
    return [checked_messages(value, place, config.prompt_column) for value, place in zip(values, table.places, strict=True)]


def _answers(config: PairDataConfig, table: rows.Table, column: str) -> list[list[chat.Message]]:
    values, kind = _column(table, column, f"data.{'chosen' if column == config.chosen_column else 'rejected'}_column")
    if kind == "string":
        if config.prompt_column is None:
            raise ConfigError(f"data.prompt_column = null needs whole conversations, but column {column!r} has strings ({table.places[0]})")
        return [[{"role": "assistant", "content": value}] for value in values]
    answers = [checked_messages(value, place, column) for value, place in zip(values, table.places, strict=True)]
    for messages, place in zip(answers, table.places, strict=True):
        if messages[-1]["role"] != "assistant":
            raise ConfigError(f"{place}: column {column!r} must end with an assistant turn, not {messages[-1]['role']!r}")
    return answers


def _plain(config: PairDataConfig, tokenizer: PreTrainedTokenizerBase, table: rows.Table) -> list[Pair | None]:
    """Strings without a template. Prompt and answers are tokenised apart, as they will be when the model answers."""
    columns = [config.prompt_column, config.chosen_column, config.rejected_column]
    texts = []
    for column in columns:
        if column is None:
            raise ConfigError("data.prompt_column = null needs conversations, but the tokenizer has no chat template: give prompt and answer strings")
        values, kind = _column(table, column, "data.prompt_column, data.chosen_column, data.rejected_column")
        if kind != "string":
            raise ConfigError(f"column {column!r} has messages ({table.places[0]}), but the tokenizer has no chat template: give strings")
        texts.append(values)
    prompts, chosen, rejected = texts
    both = zip(plain_trajectories(tokenizer, prompts, chosen), plain_trajectories(tokenizer, prompts, rejected), table.places, strict=True)
    return [(sample_of(place, *good), sample_of(place, *bad)) for good, bad, place in both]


def _column(table: rows.Table, column: str, option: str) -> tuple[list[Any], str]:
    """The values of a column and their one kind, string or list."""
    values = table.column(column, option)
    kind = table.one_kind(column, values)
    if kind not in ("string", "list"):
        raise ConfigError(f"column {column!r} is a {kind} at {table.places[0]}: it must be a string or a list of messages")
    refuse_empty(table, column, values)
    return values, kind
