"""The `[tracking]` section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from miles.config import Section


class TrackingConfig(Section):
    """Where records go. metrics.jsonl in the run folder is always written."""

    wandb: Literal["online", "offline", "disabled"] = Field("disabled", description="Weights & Biases; online wants WANDB_API_KEY")
    project: str = Field("miles", description="W&B project")
    entity: str | None = Field(None, description="W&B entity; null: your default")
    tensorboard: bool = Field(False, description="write TensorBoard event files into the run folder")
    sample_every: int = Field(10, ge=0, description="steps between sample tables; 0: none")
    samples: int = Field(4, ge=1, description="rows in a sample table")
