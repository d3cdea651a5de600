"""The `[distill]` section of `miles distill`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from miles.config import Section


class DistillConfig(Section):
    """The teacher, and how the student is pulled towards it."""

    teacher: str = Field(description="Hugging Face directory of the teacher; its tokenizer must be the student's")
    divergence: Literal["sampled", "forward", "reverse", "jensen"] = Field(
        "reverse",
        description="what falls: KL(student || teacher) estimated from the sampled tokens, or over the whole vocabulary KL(teacher || student), "
        "KL(student || teacher), or their Jensen-Shannon mixture",
    )
    beta: float = Field(0.5, gt=0, lt=1, description="jensen: weight of KL(teacher || mixture), and the teacher's share of the mixture")
    policy_weight: float = Field(0.0, ge=0, description="weight of the rewards' advantages beside the teacher; 0: the teacher alone teaches")
