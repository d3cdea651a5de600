"""Prompts computed before there are answers: the step's parameters are, bit for bit, those of the same step that computes them with the answers."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles.core.planning.meters import SavedMeter
from miles.data.types import Group, Sample
from tests.trainer_cases import (
    gradients,
    make_backend,
    make_group,
    make_sample,
    plain_gradients,
    relative_difference,
    sharing_groups,
    weights,
)
from trainer.contracts import ClaimedPrompt
from trainer.fsdp.backend import FSDPBackend
from trainer.split_forward.executor import PromptState
from trainer.split_forward.residency import counted_bytes

pytestmark = pytest.mark.usefixtures("one_rank")

EXACT = 1e-12


def overlapping(path: Path, trainer: dict[str, Any] | None = None, **options: Any) -> FSDPBackend:
    """A backend that takes prompts early; one that is never given any computes them late, by the same plan."""
    return make_backend(path, trainer={"prompt_sharing": True, "max_tokens_per_microbatch": 60} | (trainer or {}), prefix_overlap=True, **options)


def announced(groups: Sequence[Group]) -> list[ClaimedPrompt]:
    firsts = [(g, g.samples[0]) for g in groups]
    return [ClaimedPrompt(claim_id=g.claim_id, tokens=s.tokens[: s.prompt_length], count=len(g.samples)) for g, s in firsts]


def one_prompt(claim: int, samples: Sequence[Sample]) -> Group:
    """The first sample's, before all answers."""
    prompt = samples[0].tokens[: samples[0].prompt_length]
    return make_group(claim, [replace(s, tokens=np.concatenate([prompt, s.response_tokens])) for s in samples])


def claims(groups: Sequence[Group]) -> set[int]:
    return {g.claim_id for g in groups}


def early(backend: FSDPBackend, groups: Sequence[Group], *, open_claims: set[int] | None = None) -> None:
    backend.prefill(announced(groups), claims(groups) if open_claims is None else open_claims, backend.version)


def assert_same(found: FSDPBackend, expected: FSDPBackend) -> None:
    """Parameters and optimizer state, the critic's too."""
    for name, tensor in expected._state().items():
        assert torch.equal(found._state()[name], tensor), name


@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        ({}, {}),
        ({"max_tokens_per_microbatch": 24}, {}),
        pytest.param({"activations": "recompute"}, {}, marks=pytest.mark.full),
        ({}, {"algorithm": {"kl_coef": 0.1, "entropy_coef": 0.01}}),
        pytest.param({}, {"algorithm": {"kl_coef": 0.1, "kl_in": "reward"}}, marks=pytest.mark.full),
        pytest.param({}, {"algorithm": {"kl_coef": 0.1}, "lora": {"rank": 2}}, marks=pytest.mark.full),
        pytest.param({}, {"algorithm": {"advantages": "gae"}, "critic": {}}, marks=pytest.mark.full),
        pytest.param({}, {"model": {"dtype": "bfloat16"}}, marks=pytest.mark.full),
    ],
    ids=["plain", "small passes", "recomputed", "reference and entropy", "reference in the reward", "adapters", "critic", "bfloat16"],
)
def test_early_and_late_prompts_end_at_the_same_bits(model: Path, trainer: dict[str, Any], options: dict[str, Any]) -> None:
    ahead, serial = (overlapping(model, {"lr": 1e-2} | trainer, dtype=torch.float32, **options) for _ in range(2))
    for _ in range(2):
        early(ahead, sharing_groups())
        metrics = ahead.step_rl(sharing_groups()).metrics
        expected = serial.step_rl(sharing_groups()).metrics
        assert metrics.pop("sharing/ahead") > 0
        assert metrics == expected
    assert_same(ahead, serial)


def test_gradients_are_those_of_a_plain_forward_sample_by_sample(model: Path) -> None:
    backend = overlapping(model)
    early(backend, sharing_groups())
    backend.step_rl(sharing_groups())
    assert relative_difference(gradients(backend), plain_gradients(model, sharing_groups())) < EXACT


def test_dropped_groups_free_their_prompts_and_leave_no_trace(model: Path) -> None:
    """Dynamic sampling: the second wave comes when two groups of the first have been dropped."""
    groups = sharing_groups()
    more = [one_prompt(7, [make_sample(7, i, 6, n, reward=float(n)) for i, n in enumerate((2, 5, 9))])]
    backend = overlapping(model, algorithm={"dynamic_sampling": True})
    with SavedMeter() as meter:
        early(backend, groups)
        before = meter.saved_bytes
        early(backend, more, open_claims=claims([groups[0], groups[3], *more]))
        assert 0 < meter.saved_bytes < before
        backend.step_rl([groups[0], groups[3], *more])
    assert meter.saved_bytes == 0
    assert relative_difference(gradients(backend), plain_gradients(model, [groups[0], groups[3], *more])) < EXACT


def test_a_group_that_comes_back_at_its_second_attempt_uses_its_first_prompt(model: Path) -> None:
    """A retried claim is announced once: with the first attempt."""
    groups = sharing_groups()
    ahead, serial = overlapping(model, dtype=torch.float32), overlapping(model, dtype=torch.float32)
    early(ahead, groups)
    early(ahead, [], open_claims=claims(groups))
    ahead.step_rl(groups)
    serial.step_rl(groups)
    assert_same(ahead, serial)


def test_nothing_is_trained_and_nothing_stays(model: Path) -> None:
    groups = [one_prompt(0, [make_sample(0, i, 3, 4, reward=1.0, masked=range(4)) for i in range(2)])]
    backend = overlapping(model)
    before = weights(backend)
    early(backend, groups)
    assert backend.step_rl(groups).empty
    assert all(np.array_equal(before[name], tensor) for name, tensor in weights(backend).items())
    assert not backend._policy.readers


def test_weights_that_are_read_meanwhile_are_the_old_version(model: Path) -> None:
    """A fresh engine takes them up during the overlap; and a checkpoint that is loaded lets go of the prompts."""
    backend, serial = overlapping(model, dtype=torch.float32), overlapping(model, dtype=torch.float32)
    before = weights(backend)
    early(backend, sharing_groups())
    assert all(np.array_equal(before[name], tensor) for name, tensor in weights(backend).items())
    backend.step_rl(sharing_groups())
    serial.step_rl(sharing_groups())
    assert_same(backend, serial)


def test_a_reader_that_outlives_the_step_is_found_out(model: Path) -> None:
    backend = overlapping(model)
    before = weights(backend)
    early(backend, sharing_groups())
    kept = list(backend._policy.readers)
    with pytest.raises(AssertionError, match=r"prefills of version 0 are alive at the optimizer step"):
        backend.step_rl(sharing_groups())
    assert all(np.array_equal(before[name], tensor) for name, tensor in weights(backend).items())
    del kept
    gc.collect()


def test_another_version_than_the_trainers_is_refused(model: Path) -> None:
    backend = overlapping(model)
    with pytest.raises(AssertionError, match=r"version 1, but the trainer's weights are version 0"):
        backend.prefill(announced(sharing_groups()), claims(sharing_groups()), 1)


def test_the_memory_plan_is_what_was_counted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts before there are answers, by policy and reference; gradients of keys and values when a prefill's backward comes; the peak of all."""
    backend = overlapping(model, {"max_tokens_per_microbatch": 40}, algorithm={"kl_coef": 0.1}, dtype=torch.float32)
    gradients: list[int] = []
    backward = PromptState.backward

    def counting(state: PromptState) -> None:
        leaves = [*state.keys, *state.values, state.last_SD]
        gradients.append(sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None))
        backward(state)

    monkeypatch.setattr(PromptState, "backward", counting)
    with SavedMeter() as meter:
        early(backend, sharing_groups())
        answers = meter.saved_bytes
        assert backend._reference is not None
        reference = sum(counted_bytes(state) for state in backend._reference._early.values())
        backend.step_rl(sharing_groups())
    plan = backend.residency(None)
    assert plan is not None
    assert plan.of_kind("prompts: policy")[0] == answers > 0
    assert plan.of_kind("prompts: reference")[0] == reference > 0
    assert [r.bytes for r in sorted(plan.residents, key=lambda r: r.last) if r.kind == "prompts: gradients"] == gradients
    held = np.add(plan.of_kind("prompts: policy"), plan.of_kind("answers"))
    assert held.max() == meter.peak_saved_bytes
    assert plan.of_kind("weights")[0] == plan.of_kind("gradients")[-1] == sum(p.nbytes for p in backend.model.parameters())
    with pytest.raises(ValueError, match=r"above the budget of .* Lower trainer.max_tokens_per_microbatch"):
        backend.residency(plan.at(plan.peak) - 1)
    assert backend.residency(plan.at(plan.peak)) is not None


def test_there_is_no_memory_plan_of_operators_that_pad(model: Path) -> None:
    backend = overlapping(model, model={"true_on_policy": True}, dtype=torch.float32)
    early(backend, sharing_groups())
    backend.step_rl(sharing_groups())
    assert backend.residency(None) is None
