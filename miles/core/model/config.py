"""The `[model]` and `[lora]` sections, shared by trainers and engines."""

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


class LoraConfig(Section):
    """Low-rank adapters on frozen weights (Hu et al. 2021, arXiv:2106.09685). They have no dropout: the ratio of a token sampled just now would not be 1."""

    rank: int = Field(16, ge=1, description="inner width of each adapter")
    alpha: int = Field(32, ge=1, description="an adapter's output is scaled by alpha / rank")
    targets: list[str] = Field(
        [],
        description='last parts of names of linear layers, such as ["q_proj", "v_proj"]; empty: every one but the output head; experts of a '
        "mixture go by the names that transformers gives their fused weights, gate_up_proj and down_proj, and are not among the empty list's",
    )
    rslora: bool = Field(False, description="scale by alpha / sqrt(rank), which suits large ranks (rsLoRA)")
    dora: bool = Field(False, description="the length of each row of a weight is learned beside the adapter, which turns it (DoRA)")
    served: Literal["apart", "merged"] = Field(
        "apart",
        description="what engines get. apart: the adapters alone, beside the weights they have; merged: whole weights with the adapters in them, which are "
        "more bytes, in bfloat16 rounded once more, and go into any engine",
    )

    @property
    def scaling(self) -> float:
        """What an adapter's output is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)
