"""The `[distill]` section of `miles distill`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from miles.config import Section


class DistillConfig(Section):
    """The teacher, where it runs, and how the student is pulled towards it."""

    teacher: str = Field(description="Hugging Face directory of the teacher; with place = 'address' its config and tokenizer are enough")
    place: Literal["trainer", "engine", "address"] = Field(
        "trainer",
        description="trainer: sharded beside the student; engine: in engines of its own, see [teacher_engine]; address: an SGLang server that runs "
        "already, or an sglang-router before several",
    )
    address: str | None = Field(None, description="place = 'address': where that server listens, for example http://127.0.0.1:30000")
    api_key_env: str | None = Field(None, description="place = 'address': environment variable that holds the server's key; null: it has none")
    divergence: Literal["sampled", "forward", "reverse", "jensen"] = Field(
        "reverse",
        description="what falls: KL(student || teacher) estimated from the sampled tokens (the only one for a teacher with another tokenizer), or over "
        "the vocabulary KL(teacher || student), KL(student || teacher), or their Jensen-Shannon mixture",
    )
    top_k: int | None = Field(
        None, ge=1, description="place = 'engine' or 'address': the vocabulary is the teacher's likeliest tokens, so many, and one outcome for all others"
    )
    beta: float = Field(0.5, gt=0, lt=1, description="jensen: weight of KL(teacher || mixture), and the teacher's share of the mixture")
    policy_weight: float = Field(0.0, ge=0, description="weight of the rewards' advantages beside the teacher; 0: the teacher alone teaches")

    @model_validator(mode="after")
    def _consistent(self) -> DistillConfig:
        if (self.place == "address") != (self.address is not None):
            raise ValueError(f"distill.place = {self.place!r} with distill.address = {self.address!r}: place = 'address' and an address belong together")
        if self.api_key_env is not None and self.place != "address":
            raise ValueError(f"distill.api_key_env = {self.api_key_env!r} with distill.place = {self.place!r}: a key is for place = 'address' alone")
        if self.top_k is not None and (self.place == "trainer" or self.divergence == "sampled"):
            raise ValueError(
                f"distill.top_k = {self.top_k} with place = {self.place!r} and divergence = {self.divergence!r}: a teacher in the trainer compares whole "
                "vocabularies, and 'sampled' the sampled tokens alone; leave top_k out"
            )
        if self.top_k is None and self.place != "trainer" and self.divergence != "sampled":
            raise ValueError(
                f"distill.divergence = {self.divergence!r} over the whole vocabulary needs place = 'trainer': set distill.top_k, for example 32, "
                "or divergence = 'sampled'"
            )
        return self
