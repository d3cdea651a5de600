"""What every trainer backend must do, with real ranks on gloo. The oracle is plain transformers, one sequence at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from algorithms import registry
from algorithms.config import TURN_CREDIT
from miles.core.model.config import ModelConfig
from miles.core.model.tiny import make_tiny_model
from miles.data.types import Group, Sample
from tests.critic_cases import plain_ppo, ppo_groups, ppo_step, reward_model
from tests.trainer_cases import (
    VOCABULARY,
    assembled,
    gradients,
    make_backend,
    make_group,
    make_sample,
    mixed_groups,
    plain_gradients,
    plain_logprobs,
    plain_model,
    relative_difference,
    slices,
    small_model,
    weights,
)
from tests.trainer_pool import Pool
from trainer.config import TrainerConfig
from trainer.fsdp.backend import FSDPBackend

pytestmark = pytest.mark.usefixtures("one_rank")

EXACT = 1e-12
PENALISED = 1e-9
"""A penalty by the reference subtracts two log-probs that are nearly equal."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("trainers"))


@pytest.fixture(scope="module")
def expected_gradients(model: Path) -> dict[str, Any]:
    return plain_gradients(model, mixed_groups())


def rl_gradients(rank: int, world: int, path: Path, groups: list[Group], options: dict[str, Any]) -> dict[str, Any]:
    backend = make_backend(path, rank=rank, world=world, **options)
    backend.step_rl(groups)
    return gradients(backend)


@pytest.mark.parametrize("max_tokens", [1, 24, 8192])
def test_gradients_do_not_depend_on_the_microbatch_split(model: Path, expected_gradients: dict[str, Any], max_tokens: int) -> None:
    found = rl_gradients(0, 1, model, mixed_groups(), {"trainer": {"max_tokens_per_microbatch": max_tokens}})
    assert relative_difference(found, expected_gradients) < EXACT


def test_gradients_do_not_depend_on_the_packing_order(model: Path, expected_gradients: dict[str, Any]) -> None:
    found = rl_gradients(0, 1, model, mixed_groups()[::-1], {})
    assert relative_difference(found, expected_gradients) < EXACT


@pytest.mark.parametrize("max_tokens", [24, 8192])
def test_gradients_on_two_ranks_are_those_of_one(model: Path, two_ranks: Pool, expected_gradients: dict[str, Any], max_tokens: int) -> None:
    found = two_ranks.run(rl_gradients, model, mixed_groups(), {"trainer": {"max_tokens_per_microbatch": max_tokens}})[0]
    assert relative_difference(found, expected_gradients) < EXACT


def test_gradients_on_four_ranks_are_those_of_one(model: Path, four_ranks: Pool, expected_gradients: dict[str, Any]) -> None:
    found = four_ranks.run(rl_gradients, model, mixed_groups(), {"trainer": {"max_tokens_per_microbatch": 24}})[0]
    assert relative_difference(found, expected_gradients) < EXACT


@pytest.fixture(scope="module")
def critic(model: Path) -> Path:
    return reward_model(model, model.parent)


@pytest.fixture(scope="module")
def expected_ppo(model: Path, critic: Path) -> tuple[Any, Any, Any]:
    return plain_ppo(model, critic, ppo_groups(), gamma=0.97, lam=0.9, kl_coef=0.1)


PPO = {"gamma": 0.97, "gae_lambda": 0.9, "kl_coef": 0.1, "kl_in": "reward"}


def is_ppo(found: tuple[Any, Any, Any], expected: tuple[Any, Any, Any]) -> None:
    assert relative_difference(found[0], expected[0]) < PENALISED
    assert relative_difference(found[1], expected[1]) < PENALISED
    assert {name: found[2][name] for name in expected[2]} == pytest.approx(expected[2], rel=PENALISED)


@pytest.mark.parametrize("max_tokens", [1, 24])
def test_ppos_gradients_do_not_depend_on_the_microbatch_split(model: Path, critic: Path, expected_ppo: Any, max_tokens: int) -> None:
    is_ppo(ppo_step(0, 1, model, critic, ppo_groups(), {"max_tokens_per_microbatch": max_tokens}, PPO), expected_ppo)


def test_ppos_gradients_do_not_depend_on_the_packing_order(model: Path, critic: Path, expected_ppo: Any) -> None:
    is_ppo(ppo_step(0, 1, model, critic, ppo_groups()[::-1], {}, PPO), expected_ppo)


def test_ppos_gradients_on_two_ranks_are_those_of_one(model: Path, two_ranks: Pool, critic: Path, expected_ppo: Any) -> None:
    results = two_ranks.run(ppo_step, model, critic, ppo_groups(), {"max_tokens_per_microbatch": 24}, PPO)
    is_ppo(results[0], expected_ppo)
    assert results[0][2] == results[1][2]


@pytest.mark.full
@pytest.mark.parametrize("max_tokens", [1, 24, 8192])
def test_ppos_gradients_on_four_ranks_are_those_of_one(model: Path, four_ranks: Pool, critic: Path, expected_ppo: Any, max_tokens: int) -> None:
    trainer = {"max_tokens_per_microbatch": max_tokens, "activations": "recompute"}
    is_ppo(four_ranks.run(ppo_step, model, critic, ppo_groups(), trainer, PPO)[0], expected_ppo)


def test_ranks_without_samples_take_part(model: Path, two_ranks: Pool) -> None:
    """Rows of one sample each, and one long one: a rank has one row, the other two."""
    groups = [make_group(0, [make_sample(0, i, 3, length, reward=float(i)) for i, length in enumerate((40, 5, 6))])]
    found = two_ranks.run(rl_gradients, model, groups, {"trainer": {"max_tokens_per_microbatch": 1}})[0]
    assert relative_difference(found, plain_gradients(model, groups)) < EXACT


def test_fewer_samples_than_ranks(model: Path, four_ranks: Pool) -> None:
    groups = [make_group(0, [make_sample(0, i, 3, 6, reward=float(i)) for i in range(2)])]
    assert relative_difference(four_ranks.run(rl_gradients, model, groups, {})[0], plain_gradients(model, groups)) < EXACT


@pytest.mark.parametrize("world", [1, 2])
def test_checkpointed_activations_give_equal_gradients(model: Path, two_ranks: Pool, expected_gradients: dict[str, Any], world: int) -> None:
    options = {"trainer": {"activations": "recompute", "max_tokens_per_microbatch": 24}}
    found = rl_gradients(0, 1, model, mixed_groups(), options) if world == 1 else two_ranks.run(rl_gradients, model, mixed_groups(), options)[0]
    assert relative_difference(found, expected_gradients) < EXACT


def all_metrics(rank: int, world: int, path: Path, groups: list[Group], options: dict[str, Any], steps: int) -> list[dict[str, float]]:
    backend = make_backend(path, rank=rank, world=world, **options)
    return [backend.step_rl(groups).metrics for _ in range(steps)]


def test_metrics_are_equal_on_every_rank(model: Path, two_ranks: Pool) -> None:
    first, second = two_ranks.run(all_metrics, model, mixed_groups(), {"algorithm": {"kl_coef": 0.1}, "dtype": torch.float32}, 2)
    assert first == second


def test_metrics_on_two_ranks_are_those_of_one(model: Path, two_ranks: Pool) -> None:
    options = {"algorithm": {"kl_coef": 0.1}}
    one, both = all_metrics(0, 1, model, mixed_groups(), options, 2), two_ranks.run(all_metrics, model, mixed_groups(), options, 2)[0]
    for alone, together in zip(one, both, strict=True):
        assert together == pytest.approx(alone, rel=1e-9, abs=1e-12)


def test_logprobs_are_those_of_a_plain_forward(model: Path, two_ranks: Pool) -> None:
    samples = [s for g in mixed_groups() for s in g.samples]
    plain = plain_model(model, torch.float32)
    with torch.no_grad():
        expected = [plain_logprobs(plain, s).tolist() for s in samples]
    found = two_ranks.run(logprobs_of, model, samples)[1]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=5e-6)


def logprobs_of(rank: int, world: int, path: Path, samples: list[Sample]) -> list[list[float]]:
    return make_backend(path, rank=rank, world=world, dtype=torch.float32, trainer={"max_tokens_per_microbatch": 24}).logprobs(samples)


def test_scores_after_a_step_see_the_new_weights(model: Path, two_ranks: Pool) -> None:
    """FSDP2 keeps the root's gathered parameters after a forward without backward: they must not outlive a change of the shards."""
    before, after, restored = two_ranks.run(scores_around_a_step, model, mixed_groups())[0]
    assert before != after
    assert before == restored


def scores_around_a_step(rank: int, world: int, path: Path, groups: list[Group]) -> list[list[list[float]]]:
    backend = make_backend(path, rank=rank, world=world, dtype=torch.float32)
    samples = list(groups[0].samples)
    start = {name: tensor.detach().clone() for name, tensor in backend.model.named_parameters()}
    before = backend.logprobs(samples)
    backend.step_rl(groups)
    after = backend.logprobs(samples)
    with torch.no_grad():
        for name, parameter in backend.model.named_parameters():
            parameter.copy_(start[name])
    return [before, after, backend.logprobs(samples)]


def test_sft_loss_is_the_negative_log_likelihood(model: Path) -> None:
    samples = [s for g in mixed_groups() for s in g.samples]
    plain, total, tokens = plain_model(model), 0.0, 0
    for sample in samples:
        with torch.no_grad():
            logits = plain(input_ids=torch.from_numpy(sample.tokens)[None]).logits[0].numpy()
        for place in np.flatnonzero(sample.loss_mask) + sample.prompt_length:
            row = logits[place - 1]
            total -= row[sample.tokens[place]] - row.max() - np.log(np.exp(row - row.max()).sum())
            tokens += 1
    result = make_backend(model, trainer={"max_tokens_per_microbatch": 24}, temperature=0.5).step_sft(samples)
    assert result.metrics["loss/nll"] == pytest.approx(total / tokens, rel=1e-12)
    assert result.metrics["tokens/trained"] == tokens


def test_a_batch_that_is_masked_throughout_moves_nothing(model: Path) -> None:
    groups = [make_group(0, [make_sample(0, i, 3, 4, reward=float(i), masked=range(4)) for i in range(2)])]
    backend = make_backend(model)
    before = weights(backend)
    result = backend.step_rl(groups)
    after = weights(backend)
    assert result.empty
    assert result.metrics["optimizer/empty_steps"] == 1
    assert all(np.isfinite(value) for value in result.metrics.values())
    assert all(np.array_equal(before[n], after[n]) for n in before)


@pytest.mark.parametrize("world", [1, 2])
def test_a_gradient_that_is_not_finite_moves_nothing(model: Path, two_ranks: Pool, world: int) -> None:
    moved, result = spoilt_step(0, 1, model, mixed_groups()) if world == 1 else two_ranks.run(spoilt_step, model, mixed_groups())[0]
    assert moved == []
    assert result.empty
    assert result.metrics["optimizer/empty_steps"] == 1


def spoilt_step(rank: int, world: int, path: Path, groups: list[Group]) -> tuple[list[str], Any]:
    backend = make_backend(path, rank=rank, world=world, dtype=torch.float32)
    backend.model.model.norm.register_forward_hook(lambda module, inputs, output: output * float("inf"))
    before = weights(backend)
    result = backend.step_rl(groups)
    after = weights(backend)
    return [n for n in before if not np.array_equal(before[n], after[n])], result


def test_scoring_at_the_sampling_temperature_gives_ratio_one(model: Path) -> None:
    plain = plain_model(model, torch.float32)
    groups = []
    for group in mixed_groups():
        samples = []
        for sample in group.samples:
            with torch.no_grad():
                logprobs = plain_logprobs(plain, sample, temperature=0.7).numpy()
            samples.append(Sample(**(vars(sample) | {"logprobs": np.where(sample.loss_mask, logprobs, np.nan)})))
        groups.append(make_group(group.claim_id, samples))
    metrics = make_backend(model, temperature=0.7, dtype=torch.float32).step_rl(groups).metrics
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["mismatch/logprob_abs_max"] < 1e-5
    assert metrics["policy/clip_fraction"] == 0


def test_recomputed_old_logprobs_are_those_before_the_first_update(model: Path) -> None:
    """Two updates: the second one's ratio is taken against the start of the step, so it has moved away from 1 by then."""
    options = {"algorithm": {"old_logprobs": "recompute"}, "trainer": {"optimizer_steps_per_batch": 2, "lr": 1e-2}}
    groups = mixed_groups()
    backend = make_backend(model, **options)
    samples = [s for g in groups[2:] for s in g.samples]
    start = backend.logprobs(samples)
    only_first = make_backend(model, algorithm={"old_logprobs": "recompute"}, trainer={"lr": 1e-2})
    only_first.step_rl(groups[:2])
    moved = only_first.logprobs(samples)
    ratios = [np.exp(np.array(m) - np.array(s))[sample.loss_mask] for m, s, sample in zip(moved, start, samples, strict=True)]
    first_tokens = sum(int(s.loss_mask.sum()) for g in groups[:2] for s in g.samples)
    second = np.concatenate(ratios)
    expected = (first_tokens * 1.0 + second.sum()) / (first_tokens + len(second))
    metrics = backend.step_rl(groups).metrics
    assert abs(expected - 1) > 1e-4
    assert metrics["policy/ratio_mean"] == pytest.approx(expected, rel=1e-9)


def test_the_reference_stays_where_the_policy_began(model: Path) -> None:
    backend = make_backend(model, algorithm={"kl_coef": 0.1})
    samples = [s for g in mixed_groups() for s in g.samples]
    start = backend.logprobs(samples)
    first, second = backend.step_rl(mixed_groups()).metrics, backend.step_rl(mixed_groups()).metrics
    assert first["policy/kl"] == pytest.approx(0, abs=1e-12)
    assert second["policy/kl"] > 1e-6
    assert backend.logprobs(samples, reference=True) == start


def test_training_on_kl_alone_brings_the_policy_back(model: Path) -> None:
    """Rewards all equal: only the KL to the reference is left, and it must fall."""
    backend = make_backend(model, algorithm={"kl_coef": 1.0, "old_logprobs": "recompute"}, trainer={"lr": 3e-3})
    with torch.no_grad():
        for parameter in backend.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0), dtype=parameter.dtype))
    groups = [make_group(0, [make_sample(0, i, 3, 12, reward=1.0) for i in range(8)])]
    kl = [backend.step_rl(groups).metrics["policy/kl"] for _ in range(8)]
    assert kl[-1] < 0.5 * kl[0]


@pytest.mark.parametrize("world", [1, 2])
def test_bfloat16_computes_in_bfloat16_on_float32_masters(model: Path, two_ranks: Pool, world: int) -> None:
    """Log-probs are near those of float32 but not they; masters move by less than bfloat16 could hold."""
    found = bfloat16_step(0, 1, model, mixed_groups()) if world == 1 else two_ranks.run(bfloat16_step, model, mixed_groups())[0]
    exact = make_backend(model, dtype=torch.float32).logprobs(list(mixed_groups()[0].samples))
    difference = np.concatenate([np.abs(np.array(a) - np.array(b)) for a, b in zip(found["logprobs"], exact, strict=True)])
    assert 1e-6 < difference.max() < 0.1
    assert found["master"] == "torch.float32"
    assert found["export"] == {"bfloat16"}
    assert 0 < found["moved"] < 1e-4


def bfloat16_step(rank: int, world: int, path: Path, groups: list[Group]) -> dict[str, Any]:
    backend = make_backend(path, rank=rank, world=world, model={"dtype": "bfloat16"}, dtype=torch.float32, trainer={"lr": 1e-5})
    logprobs = backend.logprobs(list(groups[0].samples))
    parameter = dict(backend.model.named_parameters())["model.norm.weight"]
    before = parameter.detach().full_tensor().clone()
    backend.step_rl(groups)
    moved = float((parameter.detach().full_tensor() - before).abs().max())
    return {"logprobs": logprobs, "master": str(parameter.dtype), "export": {s.dtype for s in backend.weight_specs()}, "moved": moved}


def test_weights_reach_rank_0_once_and_whole(model: Path, two_ranks: Pool) -> None:
    expected = {n: p.detach().numpy() for n, p in plain_model(model, torch.float32).named_parameters()}
    first, second = two_ranks.run(exported_weights, model)
    assert "lm_head.weight" not in first
    assert all(np.array_equal(first[n], expected[n]) for n in expected)
    assert first.keys() == expected.keys() == second.keys()
    assert all(tensor.size == 0 for tensor in second.values())


def test_shards_that_are_uneven_or_empty_arrive_whole(four_ranks: Pool, tmp_path: Path) -> None:
    """11 tokens over four ranks, and norms of 2 values of which two ranks hold nothing."""
    path = make_tiny_model(tmp_path / "model", alphabet="ab", hidden=4, layers=1, heads=2, kv_heads=1, context=64)
    expected = {n: p.detach().numpy() for n, p in plain_model(path, torch.float32).named_parameters()}
    assert {len(expected["model.embed_tokens.weight"]), len(expected["model.layers.0.self_attn.q_norm.weight"])} == {11, 2}
    (arrived, _), *_ = results = four_ranks.run(weights_and_slices, path)
    assert assembled([own for _, own in results]).keys() == expected.keys()
    assert all(np.array_equal(found, expected[n]) for n, found in assembled([own for _, own in results]).items())
    assert arrived.keys() == expected.keys()
    assert all(np.array_equal(arrived[n], expected[n]) for n in expected)


def exported_weights(rank: int, world: int, path: Path) -> dict[str, Any]:
    return weights(make_backend(path, rank=rank, world=world, dtype=torch.float32))


def weights_and_slices(rank: int, world: int, path: Path) -> tuple[dict[str, Any], list[Any]]:
    backend = make_backend(path, rank=rank, world=world, dtype=torch.float32)
    return weights(backend), slices(backend)


def test_an_export_is_an_ordinary_directory_with_equal_logits(model: Path, two_ranks: Pool, tmp_path: Path) -> None:
    scores = two_ranks.run(step_and_export, model, mixed_groups(), tmp_path / "export")[0]
    plain = plain_model(tmp_path / "export", torch.float32)
    assert plain.config.architectures == ["Qwen3ForCausalLM"]
    with torch.no_grad():
        expected = [plain_logprobs(plain, s).tolist() for s in mixed_groups()[0].samples]
    for one, other in zip(scores, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=5e-6)


def step_and_export(rank: int, world: int, path: Path, groups: list[Group], folder: Path) -> list[list[float]]:
    backend = make_backend(path, rank=rank, world=world, dtype=torch.float32)
    backend.step_rl(groups)
    backend.export(folder)
    return backend.logprobs(list(groups[0].samples))


def test_what_a_step_holds_does_not_grow_with_tokens_times_vocabulary(tmp_path: Path) -> None:
    """Bytes that autograd saves between forward and backward, parameters left out, for two vocabularies: at most the projection's gradient."""
    held = {}
    for vocabulary in (60, 6000):
        alphabet = "".join(chr(0x4E00 + i) for i in range(vocabulary - 9))
        path = make_tiny_model(tmp_path / str(vocabulary), alphabet=alphabet, hidden=16, heads=2, kv_heads=1, context=512)
        held[vocabulary] = _saved_bytes(path)
    tokens = 4 * 200
    assert held[6000] - held[60] - 4 * 16 * (6000 - 60) < 0.001 * tokens * 6000 * 4


def _saved_bytes(path: Path) -> int:
    backend = make_backend(path, dtype=torch.float32, trainer={"logprob_chunk": 32})
    samples = [make_sample(0, i, 4, 200, reward=float(i)) for i in range(4)]
    held: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter) and not isinstance(tensor._base, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    def linear(hidden_ND: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        assert len(hidden_ND) <= 32
        return hidden_ND @ weight_VD.T

    backend.model.batch_invariant_linear = linear  # it takes the plain one's place in the head
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        backend.step_rl([make_group(0, samples)])
    return sum(held.values())


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_are_clipped_to_the_global_norm(model: Path, two_ranks: Pool, expected_gradients: dict[str, Any], world: int) -> None:
    norm = float(np.sqrt(sum((g**2).sum() for g in expected_gradients.values())))
    arguments = (model, mixed_groups(), norm / 4)
    found, reported = clipped_gradients(0, 1, *arguments) if world == 1 else two_ranks.run(clipped_gradients, *arguments)[0]
    assert reported == pytest.approx(norm, rel=1e-12)
    assert relative_difference(found, {n: g / 4 for n, g in expected_gradients.items()}) < EXACT


def clipped_gradients(rank: int, world: int, path: Path, groups: list[Group], clip_norm: float) -> tuple[dict[str, Any], float]:
    backend = make_backend(path, rank=rank, world=world, trainer={"clip_norm": clip_norm})
    metrics = backend.step_rl(groups).metrics
    return gradients(backend), metrics["optimizer/grad_norm"]


def test_weight_decay_is_for_matrices_alone(model: Path) -> None:
    """Equal rewards give no gradient, so decay is all that moves: w -> (1 - lr * decay) w."""
    backend = make_backend(model, trainer={"lr": 0.01, "weight_decay": 0.5})
    before = weights(backend)
    backend.step_rl([make_group(0, [make_sample(0, i, 3, 4, reward=1.0) for i in range(2)])])
    for name, after in weights(backend).items():
        expected = before[name] * (1 - 0.005 if before[name].ndim > 1 else 1)
        np.testing.assert_allclose(after, expected, rtol=1e-14, err_msg=name)


def test_the_learning_rate_follows_its_schedule_through_empty_steps(model: Path) -> None:
    masked = [make_group(0, [make_sample(0, i, 3, 4, reward=float(i), masked=range(4)) for i in range(2)])]
    backend = make_backend(model, trainer={"lr": 1.0, "schedule": "linear"}, total_steps=4)
    rates = [backend.step_rl(batch).metrics["optimizer/lr"] for batch in (mixed_groups(), masked, mixed_groups())]
    assert rates == pytest.approx([0.75, 0.5, 0.25])


def test_true_on_policy_scores_are_equal_bit_for_bit_however_they_are_packed(model: Path, two_ranks: Pool) -> None:
    samples = [s for g in mixed_groups() for s in g.samples]
    options: dict[str, Any] = {"model": {"true_on_policy": True}, "dtype": torch.float32}
    alone = make_backend(model, trainer={"max_tokens_per_microbatch": 1}, **options).logprobs(samples)
    together = make_backend(model, **options).logprobs(samples)
    assert together == alone
    assert two_ranks.run(true_on_policy_logprobs, model, samples, options) == [alone, alone]


def true_on_policy_logprobs(rank: int, world: int, path: Path, samples: list[Sample], options: dict[str, Any]) -> list[list[float]]:
    return make_backend(path, rank=rank, world=world, **options).logprobs(samples)


def test_staleness_is_measured_against_the_steps_done(model: Path) -> None:
    """Every token of the batch is of version 0."""
    backend = make_backend(model)
    assert [backend.step_rl(mixed_groups()).metrics["staleness/max"] for _ in range(3)] == [0, 1, 2]


def test_a_trainer_without_an_algorithm_says_so(model: Path) -> None:
    backend = FSDPBackend(ModelConfig(path=str(model)), TrainerConfig(), None, temperature=1.0, max_new_tokens=4, seed=0, total_steps=1, rank=0, world=1)
    with pytest.raises(ValueError, match="without an \\[algorithm\\] section"):
        backend.step_rl(mixed_groups())


def test_scoring_by_a_reference_that_was_not_loaded_says_so(model: Path) -> None:
    with pytest.raises(ValueError, match="kl_coef > 0"):
        make_backend(model).logprobs([make_sample(0, 0, 3, 4)], reference=True)


def test_experts_leave_under_the_names_of_a_checkpoint(tmp_path: Path) -> None:
    """Qwen3-MoE is fused in memory and per expert on disk; the oracle is transformers' own `save_pretrained`."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    backend = make_backend(tmp_path, dtype=torch.float32)
    expected = {name: tensor.numpy() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    found = weights(backend)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[n], expected[n]) for n in expected)
    assert {s.name: s.shape for s in backend.weight_specs()} == {n: t.shape for n, t in expected.items()}
    samples = list(mixed_groups()[0].samples)
    plain = plain_model(tmp_path, torch.float32)
    with torch.no_grad():
        np.testing.assert_allclose(backend.logprobs(samples)[0], plain_logprobs(plain, samples[0]).numpy(), atol=5e-6)


def state_of(backend: Any) -> dict[str, Any]:
    return {name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone().numpy() for name, tensor in backend._state().items()}


def train_and_save(
    rank: int, world: int, path: Path, groups: list[Group], folder: Path, options: dict[str, Any], before: int, after: int
) -> tuple[Any, list[Any], list[float]]:
    """`before` steps, a checkpoint, `after` steps: final state, metrics after the checkpoint, and draws of the random generators."""
    backend = make_backend(path, rank=rank, world=world, dtype=torch.float32, trainer=_RESUMED, total_steps=6, **options)
    for _ in range(before):
        backend.step_rl(groups)
    backend.save(folder, {"cursor": 7})
    metrics = [backend.step_rl(groups).metrics for _ in range(after)]
    draws = _draw()
    backend.wait_saved()
    return state_of(backend), metrics, draws


def load_and_train(
    rank: int, world: int, path: Path, groups: list[Group], folder: Path, options: dict[str, Any], after: int
) -> tuple[Any, list[Any], list[float], Any]:
    backend = make_backend(path, rank=rank, world=world, dtype=torch.float32, trainer=_RESUMED, total_steps=6, **options)
    backend.logprobs(list(groups[0].samples))
    _draw()
    extra = backend.load(folder)
    metrics = [backend.step_rl(groups).metrics for _ in range(after)]
    return state_of(backend), metrics, _draw(), extra


def _draw() -> list[float]:
    import random

    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


_WITH_CRITIC: dict[str, Any] = {"algorithm": {"advantages": "gae"}, "critic": {"lr": 1e-2, "schedule": "linear", "warmup_steps": 1, "clip_norm": 1.0}}
_RESUMED = {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 2, "clip_norm": 1.0, "weight_decay": 0.1, "max_tokens_per_microbatch": 24}


@pytest.mark.parametrize(("world", "before", "critic"), [(1, 0, False), (1, 1, True), (1, 3, False), (2, 2, True)])
def test_a_resumed_run_equals_the_one_that_went_on(model: Path, two_ranks: Pool, tmp_path: Path, world: int, before: int, critic: bool) -> None:
    arguments = (model, mixed_groups(), tmp_path / "step_00000001", _WITH_CRITIC if critic else {})
    if world == 1:
        state, metrics, draws = train_and_save(0, 1, *arguments, before, 2)
        resumed, again, drawn, extra = load_and_train(0, 1, *arguments, 2)
    else:
        results = two_ranks.run(train_and_save, *arguments, before, 2)
        others = two_ranks.run(load_and_train, *arguments, 2)
        assert [r[2] for r in results] == [o[2] for o in others]
        (state, metrics, draws), (resumed, again, drawn, extra) = results[0], others[0]
    assert extra == {"cursor": 7}
    assert again == metrics
    assert drawn == draws
    assert state.keys() == resumed.keys()
    assert all(np.array_equal(state[n], resumed[n]) for n in state)


@pytest.mark.parametrize(("saved", "loaded"), [(1, 2), (2, 1)])
def test_a_checkpoint_loads_at_another_number_of_ranks(model: Path, two_ranks: Pool, tmp_path: Path, saved: int, loaded: int) -> None:
    arguments = (model, mixed_groups(), tmp_path / "step_00000001", _WITH_CRITIC)
    state = train_and_save(0, 1, *arguments, 2, 0)[0] if saved == 1 else two_ranks.run(train_and_save, *arguments, 2, 0)[0][0]
    found = load_and_train(0, 1, *arguments, 0)[0] if loaded == 1 else two_ranks.run(load_and_train, *arguments, 0)[0][0]
    assert all(np.array_equal(state[n], found[n]) for n in state)


@pytest.mark.full
@pytest.mark.parametrize("max_tokens", [1, 60, 8192])
def test_gradients_on_four_ranks_with_every_split(model: Path, four_ranks: Pool, expected_gradients: dict[str, Any], max_tokens: int) -> None:
    options = {"trainer": {"max_tokens_per_microbatch": max_tokens, "activations": "recompute"}}
    assert relative_difference(four_ranks.run(rl_gradients, model, mixed_groups(), options)[0], expected_gradients) < EXACT


BY_SEQUENCES = {"loss": "gspo", "aggregation": "sequence_mean", "old_logprobs": "recompute", "correction": "clip", "correction_level": "geometric"}
OBJECTIVES = [
    *[{"loss": name, "kl_coef": 0.1, "entropy_coef": 0.01} for name in registry.loss_names()],
    *[{"advantages": name} for name in registry.advantage_names() if name not in ("gae", "gdpo", *TURN_CREDIT)],
    *[{"old_logprobs": "recompute", "correction": "mask", "correction_level": level, "correction_high": 9.0} for level in ("token", "sequence", "geometric")],
    *[{"entropy_guard": guard, "guard_share": 0.2} for guard in ("clip_cov", "kl_cov")],
    *[{"aggregation": how, "scale": "none", "sequence_mask": 0.1} for how in ("token_mean", "sequence_mean", "sequence_sum_constant")],
    {"kl_coef": 0.1, "kl_in": "reward"},
]


def do_not_differ_on_two_ranks(model: Path, pool: Pool, algorithm: dict[str, Any]) -> None:
    """AdamW's first moment after two updates, the second with ratios that have left 1: in small rows on two ranks, and in one row on one."""
    trainer = {"optimizer_steps_per_batch": 2, "lr": 1e-2}
    expected = rl_gradients(0, 1, model, mixed_groups(), {"algorithm": algorithm, "trainer": trainer})
    found = pool.run(rl_gradients, model, mixed_groups(), {"algorithm": algorithm, "trainer": trainer | {"max_tokens_per_microbatch": 24}})[0]
    assert any(np.abs(gradient).max() > 0 for gradient in expected.values())
    assert relative_difference(found, expected) < PENALISED


def test_a_loss_of_whole_sequences_does_not_depend_on_ranks_and_rows(model: Path, two_ranks: Pool) -> None:
    do_not_differ_on_two_ranks(model, two_ranks, BY_SEQUENCES)


@pytest.mark.full
@pytest.mark.parametrize("algorithm", OBJECTIVES, ids=str)
def test_no_objective_depends_on_ranks_and_rows(model: Path, two_ranks: Pool, algorithm: dict[str, Any]) -> None:
    do_not_differ_on_two_ranks(model, two_ranks, algorithm)
