"""Shared tokens computed once give the gradients of packed rows, each row causal on its own, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.trainer.split_forward.cases import CHUNK, TEMPERATURE, Case, by_packed_rows, by_split, every_kind, exact, gap, group, model, plans
from trainer.split_forward.executor import Executor, PromptState, Split

EXACT = 1e-12


@pytest.fixture(autouse=True)
def float64(monkeypatch: pytest.MonkeyPatch) -> None:
    exact(monkeypatch)


def check(one: PreTrainedModel, case: Case, entropy_gradient: bool = True, fused: bool = False, **options: int) -> None:
    logprobs, gradients = by_packed_rows(one, case, entropy_gradient)
    seen = []
    for plan in plans(one, case, **options):
        plan.validate([len(t) for t in case[0]])
        found = by_split(one, case, plan, entropy_gradient, fused=fused)
        seen += list(found)
        assert all(torch.allclose(found[s], logprobs[s], rtol=0, atol=EXACT) for s in found)
    assert sorted(seen) == list(range(len(case[0])))
    assert gap(one, gradients) < EXACT


@pytest.mark.parametrize("capacity", [1, 20, 40, 1000])
@pytest.mark.parametrize("world", [1, 3])
def test_every_way_of_sharing_in_every_size_of_pass(capacity: int, world: int) -> None:
    """One rank after the other in one process: their gradients add up as FSDP's do."""
    check(model(), every_kind(), capacity=capacity, world=world)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["stored", "checkpointed"])
@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": False}, {"fused": True}], ids=["tied", "untied", "fused layers"])
def test_dense_models(options: dict[str, bool], checkpointed: bool) -> None:
    check(model(checkpointed=checkpointed, **options), every_kind(), capacity=30)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["stored", "checkpointed"])
def test_mixture_of_experts(checkpointed: bool) -> None:
    check(model("qwen3_moe", checkpointed=checkpointed), every_kind(), capacity=30)


def test_a_frozen_model_with_few_trained_projections() -> None:
    """As with adapters on queries and values: the first layer's keys need no gradient."""
    one = model().requires_grad_(False)
    for layer in one.model.layers:
        layer.self_attn.q_proj.requires_grad_()
        layer.self_attn.v_proj.requires_grad_()
    check(one, every_kind(), capacity=30)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_other_families(kind: str) -> None:
    """Their norms stay in float32."""
    one, case = model(kind), every_kind()
    _, gradients = by_packed_rows(one, case)
    by_split(one, case, plans(one, case)[0])
    assert gap(one, gradients) < 1e-5


@pytest.mark.parametrize("size", [1, 2, 7, 16])
@pytest.mark.parametrize("prompt", [1, 11])
def test_groups_of_any_size(size: int, prompt: int) -> None:
    check(model(), group(prompt, [(3 * i + 1) % 5 for i in range(size)]))


def test_an_entropy_without_gradient() -> None:
    check(model(), every_kind(), entropy_gradient=False)


def test_the_fused_loss() -> None:
    """Where answers share no scored token; the others take the plain one."""
    check(model(), every_kind(), fused=True)
    check(model(), group(9, [3, 5, 4, 20]), fused=True, capacity=20)


def test_pairs_stay_together() -> None:
    tokens, prompts = every_kind()
    check(model(), (tokens[:12], prompts[:12]), capacity=10, together=2)
    for plan in plans(model(), (tokens[:12], prompts[:12]), capacity=10, together=2, world=2):
        assert all(a + 1 == b and a % 2 == 0 for one in plan.passes for a, b in zip(one.samples[::2], one.samples[1::2], strict=True))


def test_turns_of_an_agent_share_deeper_than_the_prompt() -> None:
    """Loss on what several samples have in common: each counts."""
    random = np.random.default_rng(5)
    turn = [random.integers(0, 101, 6) for _ in range(7)]
    tokens = [np.concatenate([turn[i] for i in path]) for path in ([0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 5], [0, 6])]
    case = tokens, [6] * 4
    plan = plans(model(), case)[0]
    assert plan.computed == 7 * 6
    assert [plan.segments[s].count for s in range(3)] == [4, 3, 2]
    check(model(), case)


@pytest.mark.parametrize("forgotten", ["last_SD", "logprobs_N", "keys"])
def test_a_forgotten_root_is_found_out(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt learns from the first token of its answers through its last hidden state, too."""
    one, case = model(), every_kind()
    _, gradients = by_packed_rows(one, case)
    backward = PromptState.backward

    def without(state: PromptState) -> None:
        leaves = getattr(state, forgotten)
        for leaf in [leaves] if isinstance(leaves, Tensor) else leaves:
            leaf.grad = None
        backward(state)

    monkeypatch.setattr(PromptState, "backward", without)
    by_split(one, case, plans(one, case)[0])
    assert gap(one, gradients) > 1e-3


def test_nothing_is_left_behind() -> None:
    one, case = model(), every_kind()
    executors: list[Executor] = []
    by_split(one, case, plans(one, case, capacity=30)[0], watch=executors.append)
    assert not executors[0]._states
    assert not executors[0]._steps


def test_scores_without_a_graph() -> None:
    one, case = model(), every_kind()
    logprobs, _ = by_packed_rows(one, case)
    plan = plans(one, case, capacity=30)[0]
    with torch.no_grad():
        executor = Executor(one, Split(plan, *case, torch.device("cpu")), CHUNK)
        for step in plan.steps:
            if step.kind == "replay":
                found, _ = executor.replay(step.number, TEMPERATURE, False, False)
                expected = torch.cat([logprobs[s] for s in plan.passes[step.number].samples])
                assert torch.allclose(found, expected, rtol=0, atol=EXACT)
                assert not found.requires_grad
                executor.settle()
    assert not executor._states


def test_dropout_is_refused() -> None:
    one, case = model(), every_kind()
    with pytest.raises(ValueError, match="eval mode"):
        by_split(one.train(), case, plans(one, case)[0])


def test_a_sliding_window_that_would_cut_is_refused() -> None:
    one, case = model("mistral", sliding_window=8), every_kind()
    with pytest.raises(ValueError, match=r"sliding window of 8.*prompt_sharing = false"):
        by_split(one, case, plans(one, case)[0])
