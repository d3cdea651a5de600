"""A teacher outside of the trainer, or one that reads the student's text in tokens of its own: what it says is laid beside a batch before it is trained."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from miles.core.model.load import context_length, end_tokens, load_tokenizer
from miles.data.reading import Reader
from miles.data.taught import Reading, Taught
from miles.data.types import Group, Sample
from miles.run.cluster import Places
from miles.run.demands import TEACHER
from miles.run.recipe import RLRecipe
from rollout.engines.scoring import Scored, ScoreRequest, ScoringEngine
from rollout.engines.sglang_address import SGLangAddress
from rollout.teacher.actor import TeacherSpec
from rollout.teacher.engines import TeacherEngines


@dataclass(kw_only=True)
class Teaching:
    """Attributes:
    engine: scores what the student wrote; None where the trainer's own teacher does.
    reader: None where the teacher's tokens are the student's.
    top_k: how many of the teacher's likeliest tokens are told; 0 for none.
    """

    engine: ScoringEngine | None
    reader: Reader | None
    top_k: int

    async def start(self) -> None:
        if self.engine is not None:
            await self.engine.start()

    async def teach(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """`groups`, every trainable sample with what the teacher says of it.

        Raises:
            EngineError: the teacher cannot be reached, or its engines keep dying.
        """
        readings = await asyncio.to_thread(self._readings, groups)
        samples = [sample for group in groups for sample in group.trainable]
        scored: Sequence[Scored | None] = [None] * len(samples)
        if self.engine is not None:
            scored = await self.engine.score([self._request(s, r) for s, r in zip(samples, readings, strict=True)])
        taught = iter([replace(s, taught=self._taught(r, told)) for s, r, told in zip(samples, readings, scored, strict=True)])
        return tuple(replace(group, samples=tuple(next(taught) if s.status.trainable else s for s in group.samples)) for group in groups)

    async def close(self) -> None:
        if self.engine is not None:
            await self.engine.close()

    def _readings(self, groups: Sequence[Group]) -> list[Reading | None]:
        if self.reader is None:
            return [None] * sum(len(group.trainable) for group in groups)
        return [reading for group in groups for reading in self.reader.read(group.prompt, group.trainable)]

    def _request(self, sample: Sample, reading: Reading | None) -> ScoreRequest:
        if reading is not None:
            return ScoreRequest(tokens=reading.tokens, start=reading.prompt_length)
        return ScoreRequest(tokens=sample.tokens, start=sample.prompt_length, top_k=self.top_k)

    def _taught(self, reading: Reading | None, scored: Scored | None) -> Taught:
        if scored is None:
            return Taught(reading=reading)
        if not self.top_k:
            return Taught(reading=reading, logprobs_Q=scored.logprobs)
        return Taught(reading=reading, logprobs_Q=scored.logprobs, top_ids_RK=scored.top_ids, top_logprobs_RK=scored.top_logprobs)


def teaching_of(config: RLRecipe, tokenizer: PreTrainedTokenizerBase, places: Places, folder: Path) -> Teaching | None:
    """None where there is no teacher, or the trainer's own reads the student's tokens as they are. `tokenizer`: the student's."""
    distill = config.distillation
    if distill is None:
        return None
    trust = config.model.trust_remote_code
    own = load_tokenizer(distill.teacher, trust_remote_code=trust)
    reader = None
    if own.get_vocab() != tokenizer.get_vocab():
        context = context_length(distill.teacher, trust_remote_code=trust)
        reader = Reader(tokenizer, own, ends=end_tokens(config.model, tokenizer, ()), context=context)
    engine: ScoringEngine | None = None
    if distill.address is not None:
        engine = SGLangAddress(distill.address, api_key_env=distill.api_key_env, timeout_s=config.rollout.timeout_s)
    elif config.teacher_engines is not None:
        model = config.model.model_copy(update={"path": distill.teacher, "tokenizer": None, "context": None, "true_on_policy": False})
        spec = TeacherSpec(model=model, engine=config.teacher_engines, temperature=config.rollout.temperature, log_folder=str(folder / "logs"))
        engine = TeacherEngines(spec, places.of(TEACHER))
    return None if engine is None and reader is None else Teaching(engine=engine, reader=reader, top_k=distill.top_k or 0)
