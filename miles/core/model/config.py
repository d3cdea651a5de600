"""The `[model]` section, shared by trainers and engines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from miles.config import Section


class ModelConfig(Section):
    """The policy."""

    path: str = Field(description="a Hugging Face model directory, or a hub name where the hub can be reached")
    tokenizer: str | None = Field(None, description="tokenizer directory; null: the model's")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of compute and of engine weights; masters and optimizer stay float32")
    context: int | None = Field(None, ge=2, description="longest sequence; null: the model's max_position_embeddings")
    true_on_policy: bool = Field(
        False, description="batch-invariant operators in trainer and engine (SGLang: on CPU): log-probs equal bit for bit (float32, checked each step)"
    )
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model directory")
