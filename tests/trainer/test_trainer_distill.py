"""Distillation in the trainer, with real ranks on gloo, against whole softmaxes in float64 of one sequence at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles.core.model.compare import compare
from miles.core.model.tiny import make_tiny_model
from miles.data.types import Group
from tests.trainer_cases import (
    VOCABULARY,
    gradients,
    make_backend,
    make_group,
    make_sample,
    mixed_groups,
    plain_gradients,
    plain_model,
    relative_difference,
)
from tests.trainer_pool import Pool

pytestmark = pytest.mark.usefixtures("one_rank")

EXACT = 1e-12
KINDS = ["sampled", "forward", "reverse", "jensen"]
BETA = 0.3


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A student, and a teacher of another width and depth."""
    alphabet, folder = "".join(chr(0x100 + i) for i in range(VOCABULARY - 9)), tmp_path_factory.mktemp("distill")
    student = make_tiny_model(folder / "student", alphabet=alphabet, hidden=16, heads=2, kv_heads=1, layers=1, context=128)
    return student, make_tiny_model(folder / "teacher", alphabet=alphabet, hidden=24, heads=2, kv_heads=1, context=128, seed=1)


def expected_divergence(student: torch.Tensor, teacher: torch.Tensor, kind: str) -> torch.Tensor:
    """[R] from probabilities [R, V], by the definitions."""
    if kind == "forward":
        return (teacher * (teacher / student).log()).sum(-1)
    if kind == "reverse":
        return (student * (student / teacher).log()).sum(-1)
    mixture = BETA * teacher + (1 - BETA) * student
    return BETA * (teacher * (teacher / mixture).log()).sum(-1) + (1 - BETA) * (student * (student / mixture).log()).sum(-1)


def expected(paths: tuple[Path, Path], groups: list[Group], kind: str, temperature: float = 1.0) -> tuple[float, dict[str, Any]]:
    """The mean divergence over trained tokens and the gradient. `sampled`: that of -(log teacher - log student) x pi / pi_rollout, clipped as in PPO."""
    student, teacher = plain_model(paths[0]), plain_model(paths[1])
    tokens = sum(int(s.loss_mask.sum()) for g in groups for s in g.samples)
    total = 0.0
    for sample in [s for g in groups for s in g.samples if s.loss_mask.any()]:
        ids, mask = torch.from_numpy(sample.tokens), torch.from_numpy(sample.loss_mask)
        p, q = (
            torch.softmax(m(input_ids=ids[None], use_cache=False).logits[0, sample.prompt_length - 1 : -1][mask] / temperature, -1) for m in (student, teacher)
        )
        if kind != "sampled":
            loss = value = expected_divergence(p, q.detach(), kind).sum() / tokens
        else:
            log_p, log_q = (x.gather(1, ids[sample.prompt_length :][mask][:, None])[:, 0].log() for x in (p, q))
            advantage = (log_q - log_p).detach()
            value = -advantage.sum() / tokens
            ratio = (log_p - torch.from_numpy(sample.logprobs).double()[mask]).exp()
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).sum() / tokens
        loss.backward()
        total += float(value.detach())
    return total, {name: parameter.grad.numpy() for name, parameter in student.named_parameters()}


def step(rank: int, world: int, paths: tuple[Path, Path], groups: list[Group], kind: str, options: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    distill = {"teacher": str(paths[1]), "divergence": kind, "beta": BETA} | options.pop("distill", {})
    backend = make_backend(paths[0], rank=rank, world=world, distill=distill, **options)
    metrics = backend.step_rl(groups).metrics
    return metrics["distill/kl"], gradients(backend)


@pytest.mark.parametrize("chunk", [1, 7, 1024])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_whole_softmaxes_whatever_the_chunk(paths: tuple[Path, Path], kind: str, chunk: int) -> None:
    value, found = step(0, 1, paths, mixed_groups(), kind, {"trainer": {"logprob_chunk": chunk}})
    expected_value, gradient = expected(paths, mixed_groups(), kind)
    assert value == pytest.approx(expected_value, rel=EXACT)
    assert relative_difference(found, gradient) < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_and_small_rows_give_the_gradient_of_one(paths: tuple[Path, Path], two_ranks: Pool, kind: str) -> None:
    value, found = two_ranks.run(step, paths, mixed_groups(), kind, {"trainer": {"max_tokens_per_microbatch": 24}})[0]
    expected_value, gradient = expected(paths, mixed_groups(), kind)
    assert value == pytest.approx(expected_value, rel=EXACT)
    assert relative_difference(found, gradient) < EXACT


def test_a_rank_without_rows_takes_part(paths: tuple[Path, Path], two_ranks: Pool) -> None:
    groups = [make_group(0, [make_sample(0, 0, 3, 6)])]
    assert relative_difference(two_ranks.run(step, paths, groups, "reverse", {})[0][1], expected(paths, groups, "reverse")[1]) < EXACT


@pytest.mark.parametrize("kind", ["sampled", "jensen"])
def test_both_are_compared_at_the_sampling_temperature(paths: tuple[Path, Path], kind: str) -> None:
    found = step(0, 1, paths, mixed_groups(), kind, {"temperature": 0.6})[1]
    assert relative_difference(found, expected(paths, mixed_groups(), kind, temperature=0.6)[1]) < EXACT


def test_the_rewards_join_with_their_weight(paths: tuple[Path, Path]) -> None:
    """Reverse divergence + GRPO on the rewards: the gradient is the sum of both oracles' (clipping does not depend on a positive weight)."""
    found = step(0, 1, paths, mixed_groups(), "reverse", {"distill": {"policy_weight": 0.5}})[1]
    divergence, policy = expected(paths, mixed_groups(), "reverse")[1], plain_gradients(paths[0], mixed_groups())
    assert relative_difference(found, {name: divergence[name] + 0.5 * policy[name] for name in divergence}) < EXACT


def test_without_rewards_the_teacher_alone_teaches(paths: tuple[Path, Path]) -> None:
    """Rewards of None everywhere, in groups of one."""
    groups = [make_group(g, [make_sample(g, 0, 3, 5 + g, masked=(1,))]) for g in range(3)]
    assert relative_difference(step(0, 1, paths, groups, "sampled", {})[1], expected(paths, groups, "sampled")[1]) < EXACT


def test_a_batch_without_trained_tokens_moves_nothing(paths: tuple[Path, Path]) -> None:
    backend = make_backend(paths[0], distill={"teacher": str(paths[1])})
    assert backend.step_rl([make_group(0, [make_sample(0, 0, 3, 4, masked=range(4))])]).empty


def measured(rank: int, world: int, paths: tuple[Path, Path], kind: str) -> float:
    backend = make_backend(paths[0], rank=rank, world=world, distill={"teacher": str(paths[1]), "divergence": kind})
    return backend.divergence([s for g in mixed_groups() for s in g.samples])


@pytest.mark.parametrize("kind", ["sampled", "reverse"])
def test_the_divergence_of_held_out_samples_is_measured(paths: tuple[Path, Path], two_ranks: Pool, kind: str) -> None:
    assert two_ranks.run(measured, paths, kind) == pytest.approx([expected(paths, mixed_groups(), kind)[0]] * 2, rel=EXACT)


def test_no_samples_have_no_divergence(paths: tuple[Path, Path]) -> None:
    assert make_backend(paths[0], distill={"teacher": str(paths[1])}).divergence([]) == 0.0


def test_no_teacher_is_measured_where_there_is_none(paths: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match=r"no teacher: it is loaded where the recipe has a \[distill\] section"):
        make_backend(paths[0]).divergence([make_sample(0, 0, 3, 4)])


def test_no_logits_outlive_their_chunk() -> None:
    """What the graph keeps of 512 tokens and a vocabulary of 4,096 is far less than one 512 x 4,096 matrix."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    hidden_ND, weight_VD = torch.randn(512, 8, requires_grad=True), torch.randn(4096, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        teacher_VD = torch.randn(4096, 8)
        compare(hidden_ND, weight_VD, lambda s_CV, t_CD: (s_CV.softmax(-1) * (t_CD @ teacher_VD.T)).sum(-1), [torch.randn(512, 8)], 1.0, 16)
    assert sum(kept.values()) < 512 * 4096 * 4 / 8


@pytest.mark.parametrize("kind", ["sampled", "forward"])
def test_masked_places_may_be_nan(paths: tuple[Path, Path], kind: str) -> None:
    """The engine's record is NaN at masked places of these samples; the gradient holds no trace of it, in the policy loss ("sampled") neither."""
    groups = [make_group(0, [make_sample(0, i, 3, 6, masked=(2, 3)) for i in range(2)])]
    assert all(np.isnan(s.logprobs[[2, 3]]).all() for s in groups[0].samples)
    found = step(0, 1, paths, groups, kind, {})[1]
    assert relative_difference(found, expected(paths, groups, kind)[1]) < EXACT
