"""Prompt sharing on several data-parallel ranks: real processes on gloo. The oracle is plain transformers, one sequence at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from miles.core.planning.meters import Meter
from miles.data.types import Group
from tests.core.model.architectures import random_model
from tests.trainer_cases import (
    gradients,
    make_backend,
    plain_gradients,
    relative_difference,
    restore_norm,
    share_prompts,
    sharing_groups,
    small_model,
    weights,
)
from tests.trainer_pool import Pool
from trainer.contracts import ClaimedPrompt

EXACT = 1e-12
Counts = dict[str, int]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("sharing"))


@pytest.fixture(scope="module")
def expected(model: Path) -> Any:
    yield plain_gradients(model, sharing_groups())
    restore_norm()


def shared(rank: int, world: int, path: Path, groups: list[Group], options: dict[str, Any]) -> tuple[dict[str, Any], list[Counts], list[Counts]]:
    """Gradients with shared prompts, and collectives and their bytes: counted, and predicted."""
    backend = share_prompts(make_backend(path, rank=rank, world=world, trainer={"prompt_sharing": True} | options))
    assert backend._sharing is not None
    with Meter(backend.model) as meter:
        backend.step_rl(groups)
    samples = [s for g in groups for s in g.samples]
    one = backend._sharing.share(samples, range(len(samples)))[0].split
    assert one is not None
    predicted = one.split.plan.predicted
    # The step's metrics are all-reduced besides.
    counted = [{name: found[name] for name in predicted.collectives} for found in (meter.collectives, meter.collective_bytes)]
    return gradients(backend), counted, [predicted.collectives, predicted.collective_bytes]


def within_rows(rank: int, world: int, path: Path, groups: list[Group]) -> dict[str, Any]:
    backend = make_backend(path, rank=rank, world=world)
    backend.step_rl(groups)
    return gradients(backend)


def test_two_ranks_give_the_gradients_of_whole_rows_by_the_predicted_collectives(model: Path, expected: dict[str, Any], two_ranks: Pool) -> None:
    found, counted, predicted = two_ranks.run(shared, model, sharing_groups(), {"max_tokens_per_microbatch": 24})[1]
    assert relative_difference(found, expected) < EXACT
    assert counted == predicted
    assert predicted[0]["all_gather"] > predicted[0]["reduce_scatter"] == 3


def test_two_ranks_whose_rows_compute_common_tokens_once(model: Path, expected: dict[str, Any], two_ranks: Pool) -> None:
    assert relative_difference(two_ranks.run(within_rows, model, sharing_groups())[0], expected) < EXACT


def test_checkpointed_activations_on_two_ranks(model: Path, expected: dict[str, Any], two_ranks: Pool) -> None:
    found = two_ranks.run(shared, model, sharing_groups(), {"max_tokens_per_microbatch": 40, "activations": "recompute"})[0][0]
    assert relative_difference(found, expected) < EXACT


def test_a_group_on_more_ranks_than_it_has_samples(model: Path, four_ranks: Pool) -> None:
    groups = sharing_groups()[:1]
    assert relative_difference(four_ranks.run(shared, model, groups, {})[0][0], plain_gradients(model, groups)) < EXACT


@pytest.mark.full
@pytest.mark.parametrize("max_tokens", [1, 24, 8192])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_four_ranks(model: Path, expected: dict[str, Any], four_ranks: Pool, max_tokens: int, checkpointed: bool) -> None:
    options = {"max_tokens_per_microbatch": max_tokens, "activations": "recompute" if checkpointed else "keep"}
    found, counted, predicted = four_ranks.run(shared, model, sharing_groups(), options)[3]
    assert relative_difference(found, expected) < EXACT
    assert counted == predicted


def scores(rank: int, world: int, path: Path, groups: list[Group]) -> list[list[list[float]]]:
    """By policy and reference, of whole rows and shared, before and after a step."""
    found = []
    for sharing in (False, True):
        options = {"max_tokens_per_microbatch": 24, "prompt_sharing": sharing, "lr": 1e-2}
        backend = make_backend(path, rank=rank, world=world, trainer=options, algorithm={"kl_coef": 0.1})
        if sharing:
            share_prompts(backend)
        backend.step_rl(groups)
        samples = [s for g in groups for s in g.samples]
        found.append([*backend.logprobs(samples), *backend.logprobs(samples, reference=True)])
    return found


def test_scores_of_policy_and_reference_on_two_ranks(model: Path, two_ranks: Pool) -> None:
    whole, split = two_ranks.run(scores, model, sharing_groups())[0]
    for one, other in zip(whole, split, strict=True):
        assert one == pytest.approx(other, rel=1e-12, abs=1e-12)


def overlapped(rank: int, world: int, path: Path, groups: list[Group], early: bool) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Gradients of the first step, weights after the second, and whether those read between prompts and answers were the old ones."""
    options = {"prompt_sharing": True, "max_tokens_per_microbatch": 24, "lr": 1e-2}
    backend = make_backend(path, rank=rank, world=world, trainer=options, algorithm={"kl_coef": 0.1}, prefix_overlap=True)
    first, same = None, True
    for _ in range(2):
        if early:
            before = weights(backend)
            prompts = [ClaimedPrompt(claim_id=g.claim_id, tokens=g.samples[0].tokens[: g.samples[0].prompt_length], count=len(g.samples)) for g in groups]
            backend.prefill(prompts, {g.claim_id for g in groups}, backend.version)
            same &= all((before[name] == tensor).all() for name, tensor in weights(backend).items())
        backend.step_rl(groups)
        first = first or gradients(backend)
    return first, weights(backend), same


def test_early_prompts_on_two_ranks_end_at_the_bits_of_late_ones(model: Path, expected: dict[str, Any], two_ranks: Pool) -> None:
    found, ahead, same = two_ranks.run(overlapped, model, sharing_groups(), True)[0]
    _, serial, _ = two_ranks.run(overlapped, model, sharing_groups(), False)[0]
    assert same
    assert all((ahead[name] == tensor).all() for name, tensor in serial.items())
    # The reference is the policy itself in the first step: its KL has no gradient there.
    assert relative_difference(found, expected) < EXACT


def balanced(rank: int, world: int, path: Path, groups: list[Group], options: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """Gradients with a loss on the experts' loads, and the balance that is reported; float32, in which transformers' routers compute."""
    backend = make_backend(path, rank=rank, world=world, trainer=options, dtype=torch.float32)
    if options.get("prompt_sharing"):
        share_prompts(backend)
    metrics = backend.step_rl(groups).metrics
    return gradients(backend), metrics.get("experts/balance", 0.0)


@pytest.mark.usefixtures("one_rank")
def test_the_balance_of_experts_does_not_depend_on_ranks_rows_or_shared_prompts(two_ranks: Pool, tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    random_model("qwen3_moe", **sizes).save_pretrained(tmp_path)
    small_model(tmp_path / "tokenizer")
    for file in (tmp_path / "tokenizer" / "model").glob("*token*"):
        file.rename(tmp_path / file.name)
    expected, balance = balanced(0, 1, tmp_path, sharing_groups(), {"balance_coef": 0.5})
    without, _ = balanced(0, 1, tmp_path, sharing_groups(), {})
    assert relative_difference(without, expected) > 1e-2
    assert 1 < balance < 4
    for options in ({"max_tokens_per_microbatch": 24}, {"max_tokens_per_microbatch": 24, "prompt_sharing": True, "activations": "recompute"}):
        for found, reported in two_ranks.run(balanced, tmp_path, sharing_groups(), {"balance_coef": 0.5} | options):
            assert relative_difference(found, expected) < 1e-5
            assert reported == pytest.approx(balance, rel=1e-5)
