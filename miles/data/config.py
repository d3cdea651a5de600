"""The `[data]` and `[evaluate]` data sources and the SFT data section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from miles.config import Section


class PromptDataConfig(Section):
    """Where prompts come from. Paths may carry a slice: `train.jsonl@[0:1000]`."""

    paths: list[str] = Field(default_factory=list, description="JSONL or parquet files, each optionally with a slice: file.jsonl@[a:b]")
    prompt_column: str = Field("prompt", description="column with the prompt: a string, or a list of {role, content} messages")
    answer_column: str | None = Field("answer", description="column that rewards compare with; null when there is none")
    system: str | None = Field(None, description="system message put before string prompts")
    apply_chat_template: bool = Field(True, description="false: the prompt string is used as it is")
    max_prompt_tokens: int | None = Field(None, ge=1, description="longer prompts are left out and counted; null: the model's context less max_new_tokens")
    shuffle: bool = Field(True, description="a new order each epoch, from the run's seed")


class SFTDataConfig(Section):
    """Conversations to imitate."""

    paths: list[str] = Field(default_factory=list, description="JSONL or parquet files, each optionally with a slice: file.jsonl@[a:b]")
    messages_column: str | None = Field(None, description="column with a list of {role, content} messages; null: prompt_column and completion_column")
    prompt_column: str = Field("prompt", description="column with the prompt string or messages")
    completion_column: str = Field("completion", description="column with the answer string")
    train_on: Literal["completion", "assistant", "all"] = Field(
        "assistant",
        description='which tokens count: the last answer, every assistant turn (but those of messages with "train": false), all',
    )
    weight_column: str | None = Field(
        None, description="column with each row's weight, above 0; a row of weight 2 counts as if it stood there twice; null: all count alike"
    )
    max_tokens: int | None = Field(None, ge=2, description="longer rows are left out and counted; null: the model's context")
    shuffle: bool = Field(True, description="a new order each epoch, from the run's seed")


class PairDataConfig(Section):
    """Pairs of answers, one of which is preferred."""

    paths: list[str] = Field(default_factory=list, description="JSONL or parquet files, each optionally with a slice: file.jsonl@[a:b]")
    prompt_column: str | None = Field(
        "prompt", description="column with the prompt string or messages; null: chosen and rejected are whole conversations, each a list of messages"
    )
    chosen_column: str = Field("chosen", description="column with the better answer: a string, or a list of messages that ends with it")
    rejected_column: str = Field("rejected", description="column with the worse answer, of the same kind")
    max_tokens: int | None = Field(None, ge=2, description="pairs with a longer conversation are left out and counted; null: the model's context")
    shuffle: bool = Field(True, description="a new order each epoch, from the run's seed")
