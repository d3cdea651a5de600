"""The `[checkpoint]` section."""

from __future__ import annotations

from pydantic import Field

from miles.config import Section


class CheckpointConfig(Section):
    """Checkpoints under RUN/checkpoints."""

    every: int = Field(0, ge=0, description="steps between checkpoints; 0: only at the end")
    keep: int = Field(2, ge=1, description="how many of the latest are kept")
    asynchronous: bool = Field(True, description="write while training goes on")
    export: bool = Field(True, description="write a Hugging Face directory at the end of the run")
