"""A teacher that runs elsewhere, or reads the text in other tokens: what the trainer makes of its word, against whole softmaxes in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles.core.model.tiny import make_tiny_model
from miles.data.taught import Reading, Taught
from miles.data.types import Group, Sample
from tests.trainer_cases import (
    VOCABULARY,
    gradients,
    make_backend,
    make_group,
    make_sample,
    mixed_groups,
    plain_logprobs,
    plain_model,
    relative_difference,
)
from tests.trainer_pool import Pool

pytestmark = pytest.mark.usefixtures("one_rank")

EXACT = 1e-12
BETA = 0.3
K = 5
KINDS = ["forward", "reverse", "jensen"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A student, and a teacher of another width, depth and vocabulary."""
    alphabet, folder = "".join(chr(0x100 + i) for i in range(VOCABULARY - 9)), tmp_path_factory.mktemp("taught")
    student = make_tiny_model(folder / "student", alphabet=alphabet, hidden=16, heads=2, kv_heads=1, layers=1, context=128)
    return student, make_tiny_model(folder / "teacher", alphabet=alphabet + "abc", hidden=24, heads=2, kv_heads=1, context=128, seed=1)


def step(rank: int, world: int, paths: tuple[Path, Path], groups: list[Group], distill: dict[str, Any], options: dict[str, Any]) -> tuple[Any, Any]:
    backend = make_backend(paths[0], rank=rank, world=world, distill={"teacher": str(paths[1]), "beta": BETA} | distill, **options)
    metrics = backend.step_rl(groups).metrics
    return metrics, gradients(backend)


def with_word(groups: Sequence[Group], word: Any) -> list[Group]:
    return [replace(group, samples=tuple(replace(sample, taught=word(sample)) for sample in group.samples)) for group in groups]


def trained(groups: Sequence[Group]) -> list[Sample]:
    return [s for g in groups for s in g.samples if s.loss_mask.any()]


def distribution(model: Any, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    """Probabilities [R, V] at the response's places."""
    logits = model(input_ids=torch.from_numpy(sample.tokens)[None], use_cache=False).logits[0, sample.prompt_length - 1 : -1]
    return torch.softmax(logits / temperature, -1)


def clipped(log_p: torch.Tensor, sample: Sample, advantages: torch.Tensor) -> torch.Tensor:
    """PPO's loss with its usual bounds, summed over tokens."""
    mask = torch.from_numpy(sample.loss_mask)
    ratio = (log_p - torch.from_numpy(sample.logprobs).double()[mask]).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages).sum()


# The teacher's likeliest tokens, as an engine tells them.


def likeliest(paths: tuple[Path, Path], groups: Sequence[Group]) -> list[Group]:
    teacher = plain_model(paths[1])

    def word(sample: Sample) -> Taught:
        with torch.no_grad():
            top = distribution(teacher, sample)[:, :VOCABULARY].log().topk(K, -1)
        nothing = ~sample.loss_mask[:, None]
        ids, logprobs = top.indices.numpy(), np.where(nothing, np.nan, top.values.numpy())
        return Taught(logprobs_Q=np.zeros(sample.response_length), top_ids_RK=ids, top_logprobs_RK=logprobs)

    return with_word(groups, word)


def expected_of_top_k(paths: tuple[Path, Path], groups: Sequence[Group], kind: str) -> tuple[float, dict[str, Any]]:
    student = plain_model(paths[0])
    samples = trained(groups)
    tokens, total = sum(int(s.loss_mask.sum()) for s in samples), 0.0
    for sample in samples:
        mask = torch.from_numpy(sample.loss_mask)
        assert sample.taught is not None
        t = torch.from_numpy(sample.taught.top_logprobs_RK).exp()[mask]
        s = distribution(student, sample).gather(1, torch.from_numpy(sample.taught.top_ids_RK))[mask]
        s, t = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (s, t))
        m = BETA * t + (1 - BETA) * s
        kl = lambda a, b: (a * (a / b).log()).sum()  # noqa: E731
        value = {"forward": kl(t, s), "reverse": kl(s, t), "jensen": BETA * kl(t, m) + (1 - BETA) * kl(s, m)}[kind] / tokens
        value.backward()
        total += float(value.detach())
    return total, {name: p.grad.numpy() for name, p in student.named_parameters()}


@pytest.mark.parametrize("chunk", [7, 1024])
@pytest.mark.parametrize("kind", KINDS)
def test_of_the_teachers_likeliest_tokens(paths: tuple[Path, Path], kind: str, chunk: int) -> None:
    """The teacher's word is NaN where nothing is trained."""
    groups = likeliest(paths, mixed_groups())
    distill = {"place": "engine", "divergence": kind, "top_k": K}
    metrics, found = step(0, 1, paths, groups, distill, {"trainer": {"logprob_chunk": chunk}})
    value, gradient = expected_of_top_k(paths, groups, kind)
    assert metrics["distill/kl"] == pytest.approx(value, rel=EXACT)
    assert relative_difference(found, gradient) < EXACT


# The sampled tokens' log-probs, as an engine tells them.


def told(paths: tuple[Path, Path], groups: Sequence[Group]) -> list[Group]:
    teacher = plain_model(paths[1])
    with torch.no_grad():
        return with_word(groups, lambda sample: Taught(logprobs_Q=plain_logprobs(teacher, sample).numpy()))


def expected_of_sampled(paths: tuple[Path, Path], groups: Sequence[Group]) -> tuple[float, dict[str, Any]]:
    student, samples = plain_model(paths[0]), trained(groups)
    tokens, total = sum(int(s.loss_mask.sum()) for s in samples), 0.0
    for sample in samples:
        mask = torch.from_numpy(sample.loss_mask)
        assert sample.taught is not None
        log_p, log_q = plain_logprobs(student, sample)[mask], torch.from_numpy(sample.taught.logprobs_Q)[mask]
        advantages = (log_q - log_p).detach()
        (clipped(log_p, sample, advantages) / tokens).backward()
        total -= float(advantages.sum()) / tokens
    return total, {name: p.grad.numpy() for name, p in student.named_parameters()}


def test_of_the_sampled_tokens(paths: tuple[Path, Path]) -> None:
    groups = told(paths, mixed_groups())
    metrics, found = step(0, 1, paths, groups, {"place": "engine", "divergence": "sampled"}, {})
    value, gradient = expected_of_sampled(paths, groups)
    assert metrics["distill/kl"] == pytest.approx(value, rel=EXACT)
    assert "distill/uncompared" not in metrics
    assert relative_difference(found, gradient) < EXACT


# A teacher that reads the text in other tokens.


def reading_of(sample: Sample) -> Reading:
    """Spans of two student tokens and three of the teacher's, in turn with one and one; the last student token has no counterpart."""
    random = np.random.default_rng(sample.tokens.tolist())
    span_R, span_Q = np.full(sample.response_length, -1, np.int32), []
    place = span = 0
    while place < sample.response_length - 1:
        width = 2 if span % 2 else 1
        if sample.loss_mask[place : place + width].all():
            span_R[place : place + width] = span
            span_Q += [span] * (3 if width == 2 else 1)
            span += 1
        else:
            span_Q += [-1]
        place += width
    prompt = 4
    return Reading(tokens=random.integers(0, VOCABULARY + 3, prompt + len(span_Q)), prompt_length=prompt, span_R=span_R, span_Q=np.array(span_Q, np.int32))


def read(groups: Sequence[Group], logprobs: Any = lambda reading: None) -> list[Group]:
    def word(sample: Sample) -> Taught:
        reading = reading_of(sample)
        return Taught(reading=reading, logprobs_Q=logprobs(reading))

    return with_word(groups, word)


def teacher_logprobs(paths: tuple[Path, Path], reading: Reading) -> Any:
    with torch.no_grad():
        logits = plain_model(paths[1])(input_ids=torch.from_numpy(reading.tokens)[None], use_cache=False).logits[0, :-1]
        own = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(reading.tokens)[1:, None])[:, 0]
    return own[reading.prompt_length - 1 :].numpy()


def expected_of_spans(paths: tuple[Path, Path], groups: Sequence[Group]) -> tuple[float, float, dict[str, Any]]:
    """Mean divergence, share of trained tokens that are not compared, gradient."""
    student, samples = plain_model(paths[0]), trained(groups)
    tokens, total, alone = sum(int(s.loss_mask.sum()) for s in samples), 0.0, 0
    for sample in samples:
        reading = reading_of(sample)
        log_p, log_q = plain_logprobs(student, sample), torch.from_numpy(teacher_logprobs(paths, reading))
        advantages = torch.zeros(sample.response_length, dtype=torch.float64)
        for span in set(reading.span_R[reading.span_R >= 0].tolist()):
            mine, theirs = torch.from_numpy(reading.span_R == span), torch.from_numpy(reading.span_Q == span)
            difference = log_q[theirs].sum() - log_p.detach()[mine].sum()
            advantages[mine] = difference
            total -= float(difference) / tokens
        mask = torch.from_numpy(sample.loss_mask)
        alone += int((mask & torch.from_numpy(reading.span_R < 0)).sum())
        (clipped(log_p[mask], sample, advantages[mask]) / tokens).backward()
    return total, alone / tokens, {name: p.grad.numpy() for name, p in student.named_parameters()}


@pytest.mark.parametrize("place", ["trainer", "engine"])
def test_of_spans_of_text(paths: tuple[Path, Path], place: str) -> None:
    groups = read(mixed_groups(), (lambda reading: teacher_logprobs(paths, reading)) if place == "engine" else (lambda reading: None))
    metrics, found = step(0, 1, paths, groups, {"place": place, "divergence": "sampled"}, {"trainer": {"max_tokens_per_microbatch": 40}})
    value, alone, gradient = expected_of_spans(paths, groups)
    assert metrics["distill/kl"] == pytest.approx(value, rel=EXACT)
    assert metrics["distill/uncompared"] == pytest.approx(alone, rel=EXACT)
    assert relative_difference(found, gradient) < EXACT


def on_two(rank: int, world: int, paths: tuple[Path, Path], few: bool) -> dict[str, Any]:
    """Each way of teaching on the same groups; `few`: one sample alone, so that a rank has no row of its own."""
    groups = [make_group(0, [make_sample(0, 0, 3, 6)])] if few else mixed_groups()
    small = {"trainer": {"max_tokens_per_microbatch": 24}}
    return {
        "top_k": step(rank, world, paths, likeliest(paths, groups), {"place": "engine", "divergence": "reverse", "top_k": K}, dict(small)),
        "sampled": step(rank, world, paths, told(paths, groups), {"place": "engine", "divergence": "sampled"}, dict(small)),
        "spans": step(rank, world, paths, read(groups), {"divergence": "sampled"}, dict(small)),
    }


@pytest.mark.parametrize("few", [False, True])
def test_two_ranks_give_the_gradient_of_one(paths: tuple[Path, Path], two_ranks: Pool, few: bool) -> None:
    one, both = on_two(0, 1, paths, few), two_ranks.run(on_two, paths, few)
    for name, (metrics, gradient) in one.items():
        assert both[0][name][0]["distill/kl"] == pytest.approx(metrics["distill/kl"], rel=EXACT)
        assert both[1][name][0]["distill/kl"] == pytest.approx(metrics["distill/kl"], rel=EXACT)
        assert relative_difference(both[0][name][1], gradient) < EXACT


def test_the_divergence_of_held_out_samples_is_measured_too(paths: tuple[Path, Path]) -> None:
    groups = told(paths, mixed_groups())
    backend = make_backend(paths[0], distill={"teacher": str(paths[1]), "place": "engine", "divergence": "sampled"})
    assert backend.divergence([s for g in groups for s in g.samples]) == pytest.approx(expected_of_sampled(paths, groups)[0], rel=EXACT)


def test_a_word_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a teacher's 3 log-probs are not those of 6 tokens"):
        replace(make_sample(0, 0, 3, 6), taught=Taught(logprobs_Q=np.zeros(3, np.float32)))
