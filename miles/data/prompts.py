"""Prompt datasets, read and checked whole at the start, and the endless shuffled stream that claims are served from."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from miles.config import ConfigError
from miles.data import chat, rows
from miles.data.config import PromptDataConfig
from miles.data.order import EpochOrder
from miles.data.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PromptReport:
    """What loading did. `rows` were read, `too_long` of them left out, `kept` remain; lengths are in tokens, of those kept."""

    rows: int
    blank_lines: int
    too_long: int
    kept: int
    max_tokens: int
    longest: int

    def __str__(self) -> str:
        return (
            f"{self.kept} prompts of {self.rows} rows, the longest {self.longest} tokens; "
            f"left out: {self.too_long} longer than {self.max_tokens} tokens, {self.blank_lines} blank lines"
        )


class PromptDataset:
    """Prompts with the chat template applied once; immutable. `shuffle` is the configuration's, for the stream."""

    def __init__(self, prompts: Sequence[Prompt], report: PromptReport, shuffle: bool) -> None:
        self._prompts = tuple(prompts)
        self.report = report
        self.shuffle = shuffle

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)

    @classmethod
    def load(cls, config: PromptDataConfig, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> PromptDataset:
        """Read `config.paths`, render, tokenise and filter by length.

        `Prompt.columns` has every column but the prompt's, under its own name, and `config.answer_column` as `answer` too.

        Args:
            max_tokens: the most tokens a prompt may have; `config.max_prompt_tokens` can only lower it.
        Raises:
            ConfigError: whatever is wrong with a file, a row or a column, by file, line and column (see `miles.data.rows`); a prompt
                is empty; prompts are of mixed kinds, or of one that the options do not fit; no prompt is left.
        """
        limit = min(config.max_prompt_tokens or max_tokens, max_tokens)
        if limit < 1:
            raise ConfigError(f"no room for a prompt: at most {limit} tokens are left once max_new_tokens is taken from the context; lower max_new_tokens")
        table = rows.read(config.paths)
        texts, tokens, messages = _encode(config, tokenizer, table)
        columns = _columns(config, table)
        kept = [i for i, ids in enumerate(tokens) if len(ids) <= limit]
        lengths = [len(ids) for ids in tokens]
        if not kept:
            raise ConfigError(
                f"no prompt is left: all {len(table.rows)} rows of {', '.join(config.paths)} are longer than {limit} tokens; the shortest has {min(lengths)}"
            )
        prompts = [Prompt(prompt_id=n, tokens=tokens[i], text=texts[i], columns=columns[i], messages=messages[i]) for n, i in enumerate(kept)]
        report = PromptReport(
            rows=len(table.rows),
            blank_lines=table.blank_lines,
            too_long=len(lengths) - len(kept),
            kept=len(kept),
            max_tokens=limit,
            longest=max(lengths[i] for i in kept),
        )
        if report.blank_lines or report.too_long:
            logger.warning("%s: %s", ", ".join(config.paths), report)
        return cls(prompts, report, config.shuffle)


class PromptStream:
    """The dataset without end: claim 0, 1, 2, ... each has its prompt, a pure function of (seed, claim_id).

    Every epoch (each `len(dataset)` claims) holds every prompt once. The cursor is one integer, so a resumed run replays none and
    skips none, across an epoch's end as well.
    """

    def __init__(self, dataset: PromptDataset, seed: int) -> None:
        self.dataset = dataset
        self._order = EpochOrder(len(dataset), seed, dataset.shuffle)

    def check_step(self, prompts: int, extra: int = 0) -> None:
        """Raises ConfigError where a step of `prompts` prompts, begun with `extra` more, would hold one of them twice."""
        if prompts + extra > len(self.dataset):
            asked = f"rollout.prompts_per_step = {prompts}" + (f" and rollout.extra_prompts = {extra}" if extra else "")
            raise ConfigError(
                f"{asked}, but there are {len(self.dataset)} prompts in {self.dataset.report.rows} rows: a step would answer some "
                f"twice. Use at most {len(self.dataset)}; rollout.samples_per_prompt gives more answers to each"
            )

    def prompt(self, claim_id: int) -> Prompt:
        return self.dataset[self._order[claim_id]]

    @cached_property
    def fingerprint(self) -> str:
        """Equal for streams whose claims all have the same prompts."""
        return self._order.fingerprint(self.dataset[i].tokens for i in range(len(self.dataset)))


_Encoded = tuple[list[str], list[NDArray[np.int64]], "Sequence[list[chat.Message] | None]"]
"""Texts, ids and messages of every row."""


def _encode(config: PromptDataConfig, tokenizer: PreTrainedTokenizerBase, table: rows.Table) -> _Encoded:
    prompts = table.column(config.prompt_column, "data.prompt_column")
    kind = table.one_kind(config.prompt_column, prompts)
    _check_kind(config, kind, table)
    refuse_empty(table, config.prompt_column, prompts)
    if not config.apply_chat_template:
        return prompts, chat.encode_plain(tokenizer, prompts), [None] * len(prompts)
    texts, conversations = [], []
    for value, place in zip(prompts, table.places, strict=True):
        messages = _messages(config, value, place)
        conversations.append(messages)
        try:
            texts.append(chat.render(tokenizer, messages, generate=True))
        except chat.ChatError as error:
            raise ConfigError(f"{place}: {error}") from error
    return texts, chat.encode(tokenizer, texts), conversations


def _check_kind(config: PromptDataConfig, kind: str | None, table: rows.Table) -> None:
    column = config.prompt_column
    if kind not in ("string", "list"):
        raise ConfigError(f"column {column!r} is a {kind} at {table.places[0]}: a prompt is a string or a list of messages")
    if kind == "list" and not config.apply_chat_template:
        raise ConfigError(f"data.apply_chat_template = false needs prompts as strings, but column {column!r} has messages ({table.places[0]})")
    if kind == "list" and config.system is not None:
        raise ConfigError(f"data.system is put before string prompts, but column {column!r} has messages ({table.places[0]}): write it there, or leave it out")
    if config.system is not None and not config.apply_chat_template:
        raise ConfigError("data.system needs the chat template: set data.apply_chat_template = true, or leave data.system out")


def refuse_empty(table: rows.Table, column: str, values: Sequence[Any]) -> None:
    """Raises ConfigError naming the first row whose value has no text at all, and the number of such rows."""
    empty = [i for i, value in enumerate(values) if not _has_text(value)]
    if empty:
        raise ConfigError(f"{table.places[empty[0]]}: column {column!r} is empty; {len(empty)} of {len(values)} rows are like that: fill or remove them")


def _has_text(value: Any) -> bool:
    if isinstance(value, list):
        return any(not isinstance(m, dict) or _has_text(m.get("content", True)) or m.get("tool_calls") for m in value)
    return bool(value.strip()) if isinstance(value, str) else value is not None


def _messages(config: PromptDataConfig, value: Any, place: str) -> list[chat.Message]:
    if isinstance(value, str):
        system = [{"role": "system", "content": config.system}] if config.system is not None else []
        return [*system, {"role": "user", "content": value}]
    messages = checked_messages(value, place, config.prompt_column)
    if messages[-1]["role"] == "assistant":
        raise ConfigError(f"{place}: column {config.prompt_column!r} ends with an assistant turn, which the model is to write: remove it")
    return messages


def checked_messages(value: list[Any], place: str, column: str) -> list[chat.Message]:
    """The messages of one row, without keys that are null (parquet gives every message every key).

    Raises:
        ConfigError: a message is no object, or lacks a `role` string or any content.
    """
    messages = []
    for number, message in enumerate(value):
        at = f"{place}: column {column!r}, message {number}"
        if not isinstance(message, dict):
            raise ConfigError(f"{at} is a {rows.kind(message)}: it must be an object with role and content")
        message = {key: item for key, item in message.items() if item is not None}
        if not isinstance(message.get("role"), str):
            raise ConfigError(f"{at} has no role; it has {', '.join(map(repr, message)) or 'nothing'}")
        if not message.get("tool_calls") and not isinstance(message.get("content"), (str, list)):
            raise ConfigError(f"{at} has no content (a string); it has {', '.join(map(repr, message))}")
        # Templates read `content` of every message, also of one that only calls tools.
        messages.append({"content": "", **message})
    return messages


def _columns(config: PromptDataConfig, table: rows.Table) -> list[dict[str, Any]]:
    answer = config.answer_column
    columns = [{name: value for name, value in row.items() if name != config.prompt_column} for row in table.rows]
    if answer is not None:
        answers = table.column(answer, "data.answer_column; leave it out where rewards need no answer")
        table.one_kind(answer, answers)
        refuse_empty(table, answer, answers)
        columns = [{**row, "answer": value} for row, value in zip(columns, answers, strict=True)]
    return columns
