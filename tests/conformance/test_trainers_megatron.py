"""The `megatron` backend is held to what the suite of trainers asks for, at every layout of its ranks. The oracle is plain transformers.

Gradients are compared in float64; Megatron-Core's optimizer steps in float32 alone.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from algorithms.preference.config import PreferenceConfig, RewardModelConfig
from miles.core.checkpoint.store import CheckpointError
from miles.core.model.scoring import score
from miles.core.model.tiny import make_tiny_model
from miles.data.types import Group, Sample
from tests.lora_cases import LORA, peft_gradients, peft_model
from tests.trainer_cases import (
    assembled,
    make_backend,
    make_group,
    make_sample,
    mixed_groups,
    plain_gradients,
    plain_logprobs,
    plain_model,
    relative_difference,
    restore_norm,
    slices,
    weights,
)
from tests.trainer_pool import Pool

EXACT = 1e-12
TENSOR = {"tensor_parallel": 2}
DATA: dict[str, Any] = {}
PIPELINE = {"pipeline_parallel": 2}
TWO = {"tensor": TENSOR, "data": DATA, "pipeline": PIPELINE}
FOUR = {
    "tensor x data": TENSOR,
    "tensor x pipeline": TENSOR | PIPELINE,
    "data x pipeline": PIPELINE,
    "pipeline of 4": {"pipeline_parallel": 4, "max_tokens_per_microbatch": 24},
    "interleaved": {"pipeline_parallel": 4, "pipeline_chunks": 2, "max_tokens_per_microbatch": 24},
}


def _full(*layouts: str) -> list[Any]:
    """For the long matrix alone."""
    return [pytest.param(layout, marks=pytest.mark.full) for layout in layouts]


def saved(built: Any, folder: Path, model: Path) -> Path:
    """`built` under `folder`, with the tokenizer of `model`."""
    built.save_pretrained(folder)
    for file in model.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied, over 50 tokens: no layout divides the vocabulary. Eight layers, for four stages of two pieces."""
    alphabet = "".join(chr(0x100 + i) for i in range(41))
    return make_tiny_model(tmp_path_factory.mktemp("megatron") / "model", alphabet=alphabet, hidden=16, heads=4, kv_heads=2, layers=8, context=128)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """Untied, without norms in its attention, rotary embeddings scaled as Llama 3's."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        max_position_embeddings=128, tie_word_embeddings=False, pad_token_id=0,
        rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 32},
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("llama") / "model"
    return saved(LlamaForCausalLM(config), folder, model)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """Four experts in each of two layers, two for a token; the widths of attention and experts are no multiples of each other."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, moe_intermediate_size=6, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=128,
        tie_word_embeddings=False, pad_token_id=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("experts") / "model"
    return saved(Qwen3MoeForCausalLM(config), folder, model)


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """DeepSeek-V3's parts, small: latent attention under YaRN, a layer without experts, then eight of which a token is given four out of
    two of four groups, by biased scores, beside a shared one."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=50, hidden_size=16, intermediate_size=32, moe_intermediate_size=6, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8, n_routed_experts=8, num_experts_per_tok=4, n_group=4,
        topk_group=2, n_shared_experts=1, first_k_dense_replace=1, max_position_embeddings=128, tie_word_embeddings=False, pad_token_id=0,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
                         "original_max_position_embeddings": 32},
    )  # fmt: skip
    drawn = DeepseekV3ForCausalLM(config)
    for name, tensor in drawn.state_dict().items():
        if "e_score_correction_bias" in name:
            tensor.normal_(std=0.1)
    folder = tmp_path_factory.mktemp("latent") / "model"
    return saved(drawn, folder, model)


@pytest.fixture(scope="module", autouse=True)
def norms() -> Iterator[None]:
    yield
    restore_norm()


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def four() -> Iterator[Pool]:
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def expected_gradients(model: Path) -> dict[str, Any]:
    return plain_gradients(model, mixed_groups())


def megatron(path: Path, rank: int, world: int, trainer: dict[str, Any], **options: Any) -> Any:
    return make_backend(path, rank=rank, world=world, trainer={"backend": "megatron", "ranks": world} | trainer, **options)


def gradients_and_metrics(rank: int, world: int, path: Path, groups: list[Group], trainer: dict[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """One step up to the optimizer: its gradients, under a checkpoint's names, put together from all ranks."""
    backend = megatron(path, rank, world, trainer)

    from trainer.megatron.checkpoint import Saved, _described, _span
    from trainer.megatron.export import Exporter
    from trainer.megatron.names import buffers
    from trainer.rows.schedule import Update

    backend._trained.optimizer.step = lambda: Update(0.0, 0.0, True)
    metrics = backend.step_rl(groups).metrics
    own: list[dict[str, Any]] = [{} for _ in backend._trained.chunks]
    for name, _, parameter, part in _described(Saved("", backend._trained.chunks, backend._trained.optimizer)):
        number, _, key = name.partition(".")
        full = torch.zeros_like(parameter).detach().view(-1)
        if parameter in part.model_param_group_index_map:
            start, stop = _span(part, parameter)
            full[start:stop] = parameter.main_grad.view(-1)[start:stop]
        dist.all_reduce(full, group=part.data_parallel_group)
        own[int(number)][key] = full.view(parameter.shape)
    exporter = Exporter(backend.architecture, backend.mesh, own, torch.float64)
    trained = [s.name for s in exporter.specs() if s.name not in buffers(backend.architecture)]
    return {name: tensor.numpy().copy() for name, tensor in exporter.tensors(trained)}, metrics


@pytest.mark.parametrize("layout", TWO)
def test_gradients_are_those_of_one_process(model: Path, two: Pool, expected_gradients: dict[str, Any], layout: str) -> None:
    (found, metrics), (_, others) = two.run(gradients_and_metrics, model, mixed_groups(), TWO[layout])
    assert relative_difference(found, expected_gradients) < EXACT
    assert metrics == others


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_recomputed_activations_give_equal_gradients(model: Path, two: Pool, expected_gradients: dict[str, Any], layout: str) -> None:
    options = TWO[layout] | {"activations": "recompute", "max_tokens_per_microbatch": 24}
    assert relative_difference(two.run(gradients_and_metrics, model, mixed_groups(), options)[0][0], expected_gradients) < EXACT


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_gradients_of_an_untied_llama(llama: Path, two: Pool, layout: str) -> None:
    """transformers computes the norms of Llama in float32, a floor that is not ours."""
    found = two.run(gradients_and_metrics, llama, mixed_groups(), TWO[layout])[0][0]
    assert relative_difference(found, plain_gradients(llama, mixed_groups())) < 2e-6


@pytest.mark.full
@pytest.mark.parametrize("layout", FOUR)
def test_gradients_on_four_ranks_are_those_of_one_process(model: Path, four: Pool, expected_gradients: dict[str, Any], layout: str) -> None:
    results = four.run(gradients_and_metrics, model, mixed_groups(), FOUR[layout])
    assert relative_difference(results[0][0], expected_gradients) < EXACT
    assert all(metrics == results[0][1] for _, metrics in results)


EXPERT = {"expert_parallel": 2}
EXPERTS_TWO = {"experts over data": EXPERT, "experts over tensor": EXPERT | TENSOR, "experts on every tensor rank": TENSOR, "pipeline": PIPELINE}
EXPERTS_FOUR = {
    "experts over data": {"expert_parallel": 4},
    "tensor x data": TENSOR | EXPERT,
    "pipeline": PIPELINE | EXPERT,
    "all": TENSOR | {"expert_parallel": 4},
}


@pytest.mark.parametrize("layout", EXPERTS_TWO)
def test_gradients_of_experts(experts: Path, two: Pool, layout: str) -> None:
    """transformers routes in float32, and so does Megatron-Core keep its router: a floor that is not ours."""
    found = two.run(gradients_and_metrics, experts, mixed_groups(), EXPERTS_TWO[layout] | {"max_tokens_per_microbatch": 25})[0][0]
    assert relative_difference(found, plain_gradients(experts, mixed_groups(), per_expert=True)) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("layout", EXPERTS_FOUR)
def test_gradients_of_experts_on_four_ranks(experts: Path, four: Pool, layout: str) -> None:
    found = four.run(gradients_and_metrics, experts, mixed_groups(), EXPERTS_FOUR[layout])[0][0]
    assert relative_difference(found, plain_gradients(experts, mixed_groups(), per_expert=True)) < 1e-5


@pytest.mark.parametrize("layout", ["experts over tensor", "pipeline", *_full("experts over data", "experts on every tensor rank")])
def test_gradients_of_latent_attention_and_biased_routing(latent: Path, two: Pool, layout: str) -> None:
    """transformers computes norms and routes in float32: a floor that is not ours."""
    found = two.run(gradients_and_metrics, latent, mixed_groups(), EXPERTS_TWO[layout] | {"max_tokens_per_microbatch": 25})[0][0]
    assert relative_difference(found, plain_gradients(latent, mixed_groups(), per_expert=True)) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("layout", EXPERTS_FOUR)
def test_gradients_of_latent_attention_on_four_ranks(latent: Path, four: Pool, layout: str) -> None:
    found = four.run(gradients_and_metrics, latent, mixed_groups(), EXPERTS_FOUR[layout] | {"activations": "recompute"})[0][0]
    assert relative_difference(found, plain_gradients(latent, mixed_groups(), per_expert=True)) < 1e-5


@pytest.mark.parametrize("layout", ["experts over tensor", *_full("experts over data")])
@pytest.mark.parametrize("family", ["experts", "latent"])
def test_experts_leave_as_they_came_and_resume(request: pytest.FixtureRequest, family: str, two: Pool, layout: str, tmp_path: Path) -> None:
    experts = request.getfixturevalue(family)
    held = two.run(exported, experts, EXPERTS_TWO[layout], tmp_path / "export")
    expected, found = (load_file(folder / "model.safetensors") for folder in (experts, tmp_path / "export"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    check_slices(held, expected)
    then, _, metrics = two.run(save_and_go_on, experts, EXPERTS_TWO[layout], tmp_path / "step_00000002")[0]
    for name in (layout, "pipeline"):
        restored, _, again, _ = two.run(load_and_go_on, experts, EXPERTS_TWO[name], tmp_path / "step_00000002")[0]
        assert all(np.array_equal(then[n], restored[n]) for n in then)
        assert name != layout or again == metrics


def test_fewer_rows_than_ranks(model: Path, two: Pool) -> None:
    groups = [make_group(0, [make_sample(0, i, 3, length, reward=float(i)) for i, length in enumerate((40, 5, 6))])]
    found = two.run(gradients_and_metrics, model, groups, {"max_tokens_per_microbatch": 1})[0][0]
    assert relative_difference(found, plain_gradients(model, groups)) < EXACT


def test_logprobs_of_latent_attention_are_those_of_a_plain_forward(latent: Path, two: Pool) -> None:
    test_logprobs_are_those_of_a_plain_forward(latent, two, "tensor")


@pytest.mark.parametrize("layout", TWO)
def test_logprobs_are_those_of_a_plain_forward(model: Path, two: Pool, layout: str) -> None:
    samples = [s for g in mixed_groups() for s in g.samples]
    plain = plain_model(model, torch.float32)
    with torch.no_grad():
        expected = np.concatenate([plain_logprobs(plain, s) for s in samples])
    for found in two.run(logprobs_of, model, samples, TWO[layout]):
        np.testing.assert_allclose(np.concatenate(found), expected, atol=5e-6)


def logprobs_of(rank: int, world: int, path: Path, samples: list[Sample], trainer: dict[str, Any], temperature: float = 1.0) -> list[list[float]]:
    return megatron(path, rank, world, trainer, dtype=torch.float32, temperature=temperature).logprobs(samples)


TRAINED = {"lr": 1e-2, "clip_norm": 0.5, "weight_decay": 0.1, "schedule": "cosine", "warmup_steps": 1, "max_tokens_per_microbatch": 24}
SMOOTH = TRAINED | {"eps": 1e-3}
"""AdamW makes a step of full length of a gradient that is nothing but rounding; a larger epsilon does not."""


@pytest.mark.parametrize("layout", TWO)
def test_steps_are_those_of_fsdp(model: Path, two: Pool, layout: str) -> None:
    """Clipped, decayed, scheduled, against a reference: three steps of AdamW in float32, and one of SFT."""
    alone, steps = trained(0, 1, model, SMOOTH)
    found, metrics = two.run(trained, model, {"backend": "megatron", "ranks": 2} | SMOOTH | TWO[layout])[0]
    assert found.keys() == alone.keys()
    for name, tensor in alone.items():
        np.testing.assert_allclose(found[name], tensor, atol=2e-5, err_msg=name)
    for one, other in zip(metrics, steps, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


def trained(rank: int, world: int, path: Path, trainer: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, float]]]:
    options = {"algorithm": {"kl_coef": 0.1, "entropy_coef": 0.01}, "total_steps": 4, "dtype": torch.float32}
    backend = make_backend(path, rank=rank, world=world, trainer=trainer, **options)
    metrics = [backend.step_rl(mixed_groups()).metrics for _ in range(3)]
    metrics.append(backend.step_sft([s for g in mixed_groups() for s in g.samples]).metrics)
    return weights(backend), metrics


PAIRS = [
    ("kto", "tensor"),
    ("dpo", "data"),
    ("orpo", "pipeline"),
    *(pytest.param(name, layout, marks=pytest.mark.full) for name in ("kto", "ipo", "simpo") for layout in ("data", "pipeline")),
]


@pytest.mark.parametrize(("objective", "layout"), PAIRS)
def test_steps_on_pairs_are_those_of_fsdp(model: Path, two: Pool, objective: str, layout: str) -> None:
    """Three steps, from the second on away from the reference, and an evaluation; of five pairs, so that one data-parallel rank has fewer."""
    alone, expected = trained_on_pairs(0, 1, model, objective, SMOOTH)
    found, metrics = two.run(trained_on_pairs, model, objective, {"backend": "megatron", "ranks": 2} | SMOOTH | TWO[layout])[0]
    for name, tensor in alone.items():
        np.testing.assert_allclose(found[name], tensor, atol=2e-5, err_msg=name)
    for one, other in zip(metrics, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


def trained_on_pairs(
    rank: int, world: int, path: Path, objective: Any, trainer: dict[str, Any], folder: Path | None = None
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    samples = [
        make_sample(pair, side, 3, length, masked=masked) for pair, masked in enumerate([(1,), (), (), (), ()]) for side, length in enumerate((4 + pair, 9))
    ]
    reward = objective == "reward"
    pairs = RewardModelConfig(margin=0.2, centre=0.01) if reward else PreferenceConfig(objective=objective, beta=0.2, bad_weight=1.5)
    options: dict[str, Any] = {"total_steps": 3, "dtype": torch.float32, "pairs": pairs}
    backend = make_backend(path, rank=rank, world=world, trainer=trainer, **options)
    metrics = [backend.step_pairs(samples).metrics for _ in range(3)]
    metrics.append(backend.evaluate_pairs(samples))
    if folder is not None:
        backend.export(folder)
    return weights(backend), metrics


@pytest.mark.parametrize("layout", ["pipeline", *_full("tensor", "data")])
def test_steps_with_a_critic_are_those_of_fsdp(model: Path, two: Pool, layout: str, tmp_path: Path) -> None:
    """Four steps of which the first is the critic's alone, and the last two again from a checkpoint."""
    alone, expected, _ = trained_with_critic(0, 1, model, SMOOTH, tmp_path / "fsdp" / "step_00000002")
    options = {"backend": "megatron", "ranks": 2} | SMOOTH | TWO[layout]
    found, metrics, again = two.run(trained_with_critic, model, options, tmp_path / "megatron" / "step_00000002")[0]
    for name, tensor in alone.items():
        np.testing.assert_allclose(found[name], tensor, atol=2e-5, err_msg=name)
    for one, other in zip(metrics, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
    assert again == metrics[2:]


def trained_with_critic(rank: int, world: int, path: Path, trainer: dict[str, Any], folder: Path) -> tuple[dict[str, Any], list[dict[str, float]], Any]:
    smooth = {"lr": 1e-2, "eps": 1e-3, "head_start": 1}
    options: dict[str, Any] = {"algorithm": {"advantages": "gae"}, "critic": smooth, "total_steps": 4, "dtype": torch.float32}
    backends = [make_backend(path, rank=rank, world=world, trainer=trainer, **options)]
    metrics = [backends[0].step_rl(mixed_groups()).metrics for _ in range(2)]
    backends[0].save(folder, {}, asynchronous=False)
    metrics += [backends[0].step_rl(mixed_groups()).metrics for _ in range(2)]
    found = weights(backends[0])
    backends[0].close()
    backends.append(make_backend(path, rank=rank, world=world, trainer=trainer, **options))
    backends[1].load(folder)
    again = [backends[1].step_rl(mixed_groups()).metrics for _ in range(2)]
    backends[1].close()
    return found, metrics, again


@pytest.mark.parametrize("layout", ["tensor", *_full("pipeline", "data")])
def test_steps_beside_a_teacher_are_those_of_fsdp(model: Path, llama: Path, two: Pool, layout: str) -> None:
    """A teacher of another family and width, beside rewards; and how far it is at the end."""
    alone, expected, far = trained_beside(0, 1, model, llama, SMOOTH)
    found, metrics, distance = two.run(trained_beside, model, llama, {"backend": "megatron", "ranks": 2} | SMOOTH | TWO[layout])[0]
    for name, tensor in alone.items():
        np.testing.assert_allclose(found[name], tensor, atol=2e-5, err_msg=name)
    for one, other in zip(metrics, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
    assert distance == pytest.approx(far, rel=1e-4)


def trained_beside(rank: int, world: int, path: Path, teacher: Path, trainer: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, float]], float]:
    options: dict[str, Any] = {"distill": {"teacher": str(teacher), "divergence": "sampled", "policy_weight": 0.5}, "total_steps": 3, "dtype": torch.float32}
    backend = make_backend(path, rank=rank, world=world, trainer=trainer, **options)
    metrics = [backend.step_rl(mixed_groups()).metrics for _ in range(3)]
    return weights(backend), metrics, backend.divergence([s for g in mixed_groups() for s in g.samples])


def test_a_divergence_over_the_vocabulary_is_refused(model: Path, two: Pool) -> None:
    with pytest.raises(RuntimeError, match=r"distill\.divergence = 'reverse' is not there for trainer\.backend = 'megatron'"):
        two.run(with_divergence, model)


def with_divergence(rank: int, world: int, path: Path) -> None:
    megatron(path, rank, world, TENSOR, distill={"teacher": str(path), "divergence": "reverse"})


@pytest.mark.parametrize("layout", ["tensor", *_full("data", "pipeline")])
def test_a_reward_model_is_that_of_fsdp(model: Path, two: Pool, layout: str, tmp_path: Path) -> None:
    """Three steps, an evaluation, and what transformers loads of it."""
    _, expected = trained_on_pairs(0, 1, model, "reward", SMOOTH, tmp_path / "fsdp")
    _, metrics = two.run(trained_on_pairs, model, "reward", {"backend": "megatron", "ranks": 2} | SMOOTH | TWO[layout], tmp_path / "megatron")[0]
    for one, other in zip(metrics, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
    ours, theirs = (AutoModelForSequenceClassification.from_pretrained(tmp_path / name) for name in ("megatron", "fsdp"))
    assert ours.config.architectures == theirs.config.architectures == ["Qwen3ForSequenceClassification"]
    assert (ours.config.num_labels, ours.config.pad_token_id) == (theirs.config.num_labels, theirs.config.pad_token_id)
    for name, tensor in theirs.state_dict().items():
        np.testing.assert_allclose(ours.state_dict()[name].numpy(), tensor.numpy(), atol=2e-5, err_msg=name)


def adapters_of_a_rank(backend: Any) -> list[tuple[torch.Tensor, Any]]:
    """Each adapter tensor of the rank, and what part of which it is."""
    from trainer.megatron.names import adapters_of, parts

    wanted = parts(adapters_of(backend.architecture, backend._lora), backend.mesh.layout, backend.rank)
    return [(own[name], part) for own, chunk in zip(backend._trained.adapters, wanted, strict=True) for name, part in chunk.items()]


def adapter_gradients(rank: int, world: int, path: Path, trainer: dict[str, Any], values: dict[str, torch.Tensor], kl_coef: float) -> dict[str, Any]:
    """Of the first step from adapters of `values`, under peft's names."""
    from trainer.megatron.export import Exporter
    from trainer.megatron.names import adapters_of
    from trainer.rows.schedule import Update

    backend = megatron(path, rank, world, trainer, lora=LORA, algorithm={"kl_coef": kl_coef})
    with torch.no_grad():
        for tensor, part in adapters_of_a_rank(backend):
            (block,) = part.blocks
            tensor.copy_(values[block.name][tuple(slice(*r) for r in block.there)])
    backend._trained.optimizer.step = lambda: Update(0.0, 0.0, True)
    backend.step_rl(mixed_groups())
    own = [{name: tensor.main_grad.clone() for name, tensor in chunk.items()} for chunk in backend._trained.adapters]
    group = backend.mesh.data
    if group.size() > 1:  # each data-parallel rank has reduced its share of them
        for (name, _, parameter, part), whole in reduced_shares(backend):
            dist.all_reduce(whole, group=part.data_parallel_group)
            own[int(name[0])][name[2:].replace("._pairs", "")] = whole.view(parameter.shape)
    exporter = Exporter(adapters_of(backend.architecture, backend._lora), backend.mesh, own, torch.float64)
    return {name: tensor.numpy().copy() for name, tensor in exporter.tensors([s.name for s in exporter.specs()])}


def reduced_shares(backend: Any) -> Iterator[Any]:
    from trainer.megatron.checkpoint import _described, _span

    for found in _described(backend._saved()[0]):
        _, _, parameter, part = found
        whole = torch.zeros_like(parameter).detach().view(-1)
        if parameter in part.model_param_group_index_map:
            start, stop = _span(part, parameter)
            whole[start:stop] = parameter.main_grad.view(-1)[start:stop]
        yield found, whole


@pytest.mark.parametrize(("layout", "kl_coef"), [("tensor", 0.3), ("pipeline", 0.0), pytest.param("data", 0.0, marks=pytest.mark.full)])
def test_gradients_of_adapters_are_pefts(model: Path, two: Pool, layout: str, kl_coef: float) -> None:
    """Against a reference, which is the model without them; recomputed over the pipeline."""
    oracle = peft_model(model, lora=LORA)
    values = {name.replace(".default", ""): p.detach() for name, p in oracle.named_parameters() if p.requires_grad}
    options = TWO[layout] | ({"activations": "recompute"} if layout == "pipeline" else {})
    found = two.run(adapter_gradients, model, options, values, kl_coef)[0]
    expected = peft_gradients(model, mixed_groups(), LORA, kl_coef)
    expected = {f"base_model.model.{name.replace('.default', '')}": gradient for name, gradient in expected.items()}
    assert relative_difference(found, expected) < (1e-9 if kl_coef else EXACT)


@pytest.mark.parametrize("layout", ["tensor", *_full("pipeline")])
def test_adapters_learn_alone_and_peft_reads_them(model: Path, two: Pool, layout: str, tmp_path: Path) -> None:
    """The base keeps its bytes; engines get adapters and nothing else; a resumed run is the one that went on; an export has them merged in."""
    same, specs, after, again = two.run(train_adapters, model, TWO[layout], tmp_path)[0]
    assert same
    assert after == again
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == specs
    assert any(tensor.any() for name, tensor in stored.items() if "lora_B" in name)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    expected = PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload().state_dict()
    found = load_file(tmp_path / "export" / "model.safetensors")
    for name, tensor in found.items():
        np.testing.assert_allclose(tensor.numpy(), expected[name].numpy(), atol=1e-6, err_msg=name)


def train_adapters(rank: int, world: int, path: Path, trainer: dict[str, Any], folder: Path) -> tuple[Any, ...]:
    options: dict[str, Any] = {"lora": LORA | {"rslora": True}, "dtype": torch.float32}
    backend = megatron(path, rank, world, TRAINED | trainer, **options)
    before = [t.detach().clone() for chunk in backend._trained.chunks for t in chunk.module.tensors().values()]
    for _ in range(2):
        backend.step_rl(mixed_groups())
    backend.save(folder / "step_00000002", {}, asynchronous=False)
    backend.export_adapter(folder / "adapter")
    backend.export(folder / "export")
    after = [backend.step_rl(mixed_groups()).metrics for _ in range(2)]
    base = [t for chunk in backend._trained.chunks for t in chunk.module.tensors().values()]
    same, specs = all(map(torch.equal, before, base)), {s.name: s.shape for s in backend.weight_specs()}
    backend.close()
    backend = megatron(path, rank, world, TRAINED | trainer, **options)
    backend.load(folder / "step_00000002")
    again = [backend.step_rl(mixed_groups()).metrics for _ in range(2)]
    backend.close()
    return same, specs, after, again


def test_a_batch_that_is_masked_throughout_moves_nothing(model: Path, two: Pool) -> None:
    groups = [make_group(0, [make_sample(0, i, 3, 4, reward=float(i), masked=range(4)) for i in range(2)])]
    assert two.run(moved_by, model, groups, False)[0] == ([], True)


def test_a_gradient_that_is_not_finite_moves_nothing(model: Path, two: Pool) -> None:
    assert two.run(moved_by, model, mixed_groups(), True)[0] == ([], True)


def moved_by(rank: int, world: int, path: Path, groups: list[Group], spoilt: bool) -> tuple[list[str], bool]:
    backend = megatron(path, rank, world, TENSOR, dtype=torch.float32)
    if spoilt:
        backend._trained.chunks[0].module.decoder.final_layernorm.register_forward_hook(lambda module, inputs, output: output * float("inf"))
    before = weights(backend)
    result = backend.step_rl(groups)
    after = weights(backend)
    return [n for n in before if not np.array_equal(before[n], after[n])], result.empty and result.metrics["optimizer/empty_steps"] == 1


@pytest.mark.parametrize("layout", TWO)
def test_an_export_is_the_import_bit_for_bit(model: Path, two: Pool, layout: str, tmp_path: Path) -> None:
    held = two.run(exported, model, TWO[layout], tmp_path / "export")
    expected, found = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "export"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    check_slices(held, expected)
    assert plain_model(tmp_path / "export").config.architectures == ["Qwen3ForCausalLM"]


def exported(rank: int, world: int, path: Path, trainer: dict[str, Any], folder: Path) -> list[Any]:
    """Writes the export; returns the rank's own slices of it."""
    backend = megatron(path, rank, world, trainer, dtype=torch.float32)
    backend.export(folder)
    return slices(backend)


def check_slices(held: list[list[Any]], expected: dict[str, torch.Tensor]) -> None:
    """What the ranks hold apart makes up the checkpoint."""
    found = assembled(held)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(array, expected[name].numpy()) for name, array in found.items())


def test_bfloat16_computes_in_bfloat16_on_float32_masters(model: Path, two: Pool) -> None:
    """Log-probs are near those of float32 but not they; masters are the checkpoint's own, and move by less than bfloat16 could hold."""
    found = two.run(bfloat16_step, model)[0]
    samples = list(mixed_groups()[0].samples)
    plain = plain_model(model, torch.float32)
    with torch.no_grad():
        exact = np.concatenate([plain_logprobs(plain, s) for s in samples])
    assert 1e-6 < np.abs(np.concatenate(found["logprobs"]) - exact).max() < 0.1
    assert np.array_equal(found["before"], load_file(model / "model.safetensors")["model.norm.weight"].numpy())
    assert 0 < np.abs(found["after"] - found["before"]).max() < 1e-4
    assert found["dtypes"] == {"bfloat16"}


def bfloat16_step(rank: int, world: int, path: Path) -> dict[str, Any]:
    backend = megatron(path, rank, world, TENSOR | {"lr": 1e-5}, model={"dtype": "bfloat16"}, dtype=torch.float32)
    logprobs = backend.logprobs(list(mixed_groups()[0].samples))
    master = dict(backend._trained.chunks[0].module.named_parameters())["decoder.final_layernorm.weight"].main_param
    before = master.detach().numpy().copy()
    backend.step_rl(mixed_groups())
    return {"logprobs": logprobs, "before": before, "after": master.detach().numpy().copy(), "dtypes": {s.dtype for s in backend.weight_specs()}}


@pytest.mark.full
@pytest.mark.parametrize("saved", FOUR)
def test_every_layout_of_four_ranks_reads_the_checkpoints_of_every_other(model: Path, four: Pool, saved: str, tmp_path: Path) -> None:
    then, _, metrics = four.run(save_and_go_on, model, FOUR[saved], tmp_path / "step_00000002")[0]
    for name, options in FOUR.items():
        restored, _, again, _ = four.run(load_and_go_on, model, options, tmp_path / "step_00000002")[0]
        assert all(np.array_equal(then[n], restored[n]) for n in then), name
        assert name != saved or again == metrics


def save_and_go_on(rank: int, world: int, path: Path, trainer: dict[str, Any], folder: Path) -> tuple[Any, Any, list[dict[str, float]]]:
    """Two steps, a checkpoint, two more: weights at the checkpoint and at the end, and the metrics since."""
    backend = megatron(path, rank, world, TRAINED | trainer, dtype=torch.float32)
    for _ in range(2):
        backend.step_rl(mixed_groups())
    then = weights(backend)
    backend.save(folder, {"cursor": 7})
    metrics = [backend.step_rl(mixed_groups()).metrics for _ in range(2)]
    backend.wait_saved()
    backend.close()
    return then, weights(backend), metrics


def load_and_go_on(rank: int, world: int, path: Path, trainer: dict[str, Any], folder: Path) -> tuple[Any, Any, list[dict[str, float]], Any]:
    backend = megatron(path, rank, world, TRAINED | trainer, dtype=torch.float32)
    backend.step_rl(mixed_groups())
    extra = backend.load(folder)
    then = weights(backend)
    metrics = [backend.step_rl(mixed_groups()).metrics for _ in range(2)]
    backend.close()
    return then, weights(backend), metrics, extra


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_a_resumed_run_is_the_one_that_went_on_and_other_layouts_read_its_checkpoint(model: Path, two: Pool, layout: str, tmp_path: Path) -> None:
    """Weights, masters and moments: at its own layout all further steps are equal bit for bit, at another one the weights, and steps to rounding."""
    folder = tmp_path / "step_00000002"
    then, end, metrics = two.run(save_and_go_on, model, TWO[layout], folder)[0]
    for name in {layout, "data"}:
        restored, last, again, extra = two.run(load_and_go_on, model, TWO[name], folder)[0]
        assert extra == {"cursor": 7}
        assert all(np.array_equal(then[n], restored[n]) for n in then), name
        if name == layout:
            assert again == metrics
            assert all(np.array_equal(end[n], last[n]) for n in end)
        else:
            assert all(np.allclose(end[n], last[n], atol=1e-6) for n in end), name


def test_a_checkpoint_of_the_other_backend_is_refused(model: Path, two: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "step_00000000"
    backend = make_backend(model, dtype=torch.float32)
    backend.save(folder, {}, asynchronous=False)
    backend.close()
    assert "was not written by trainer.backend = 'megatron'" in two.run(refused_load, model, folder)[0]


def refused_load(rank: int, world: int, path: Path, folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        megatron(path, rank, world, TENSOR, dtype=torch.float32).load(folder)
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sleeper_wakes_as_it_was(model: Path, two: Pool, dtype: str) -> None:
    """What `sleep` does on a GPU, done in CPU memory: storage is given back, and what comes after is equal bit for bit."""
    freed, slept, awake = two.run(around_a_sleep, model, dtype)[0]
    assert freed == 0
    assert slept == awake


def around_a_sleep(rank: int, world: int, path: Path, dtype: str) -> tuple[int, Any, Any]:
    metrics, freed = [], 0
    for sleeps in (True, False):
        backend = megatron(path, rank, world, TENSOR, model={"dtype": dtype}, dtype=torch.float32)
        backend.step_rl(mixed_groups())
        if sleeps:
            backend._trained.optimizer.sleep()
            freed = sum(data.untyped_storage().size() for b in backend._trained.optimizer._buffers() for data in (b.param_data, b.grad_data))
            backend._trained.optimizer.wake()
        metrics.append([backend.step_rl(mixed_groups()).metrics for _ in range(2)])
    return freed, *metrics


@pytest.mark.parametrize(("temperature", "chunk"), [(1.0, 100), (0.7, 3), (0.002, 100)])
def test_scores_over_a_divided_vocabulary_are_those_over_a_whole_one(two: Pool, temperature: float, chunk: int) -> None:
    """Values and gradients of log-probs and entropies, for 70 tokens on two ranks of 64 rows: the second has 6 and padding. At the lowest
    temperature the less probable part's share is no float64 any more."""
    generator = torch.Generator().manual_seed(0)
    hidden_ND, weight_VD = (torch.randn(shape, 8, generator=generator, dtype=torch.float64) for shape in (10, 70))
    targets_N = torch.arange(0, 70, 7)
    hidden_ND.requires_grad_()
    weight_VD.requires_grad_()
    logprobs_N, entropy_N = score(hidden_ND, weight_VD, targets_N, temperature, 4, entropy=True)
    assert entropy_N is not None
    (logprobs_N.cos() + entropy_N.sin()).sum().backward()
    expected = [t.detach().numpy() for t in (logprobs_N, entropy_N, hidden_ND.grad, weight_VD.grad)]
    results = two.run(scores_of_a_rank, hidden_ND.detach(), weight_VD.detach(), targets_N, temperature, chunk)
    for found in results:
        for one, other in zip(found[:3], expected[:3], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(np.concatenate([r[3] for r in results])[:70], expected[3], rtol=1e-12, atol=1e-14)
    assert not np.concatenate([r[3] for r in results])[70:].any()


def scores_of_a_rank(rank: int, world: int, hidden_ND: Any, weight_VD: Any, targets_N: Any, temperature: float, chunk: int) -> list[Any]:
    from trainer.megatron.layout import Layout
    from trainer.megatron.mesh import open_mesh
    from trainer.megatron.scoring import score_parallel

    mesh = open_mesh(Layout(tensor=2), rank, 60.0)
    padded_VD = torch.full((128, 8), 9.0, dtype=torch.float64)
    padded_VD[:70] = weight_VD
    own_WD = padded_VD[rank * 64 : (rank + 1) * 64].clone().requires_grad_()
    hidden_ND.requires_grad_()
    options: dict[str, Any] = {"temperature": temperature, "chunk": chunk, "entropy": True, "entropy_gradient": True}
    logprobs_N, entropy_N = score_parallel(hidden_ND, own_WD, targets_N, mesh=mesh, vocabulary=70, **options)
    assert entropy_N is not None
    (logprobs_N.cos() + entropy_N.sin()).sum().backward()
    return [t.detach().numpy() for t in (logprobs_N, entropy_N, hidden_ND.grad, own_WD.grad)]


def test_ranks_wait_for_each_other_as_long_as_the_recipe_says(two: Pool) -> None:
    assert two.run(patience)[0] == {75.0}


def patience(rank: int, world: int) -> set[float]:
    """Seconds, of every group of a mesh."""
    from trainer.megatron.layout import Layout
    from trainer.megatron.mesh import open_mesh

    mesh = open_mesh(Layout(pipeline=2), rank, 75.0)
    groups = (mesh.everyone, mesh.tensor, mesh.data, mesh.pipeline)
    return {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}


def test_a_new_mesh_closes_the_groups_of_the_one_before(two: Pool) -> None:
    """Each has a thread that wakes all the time: those of forty meshes took two cores whole."""
    first, second = two.run(threads_of_meshes)[0]
    assert first == second > 0


def threads_of_meshes(rank: int, world: int) -> list[int]:
    """Threads of gloo, after one mesh and after another. A first one closes what the tests before have left."""
    from trainer.megatron.layout import Layout
    from trainer.megatron.mesh import open_mesh

    counts = []
    for _ in range(3):
        open_mesh(Layout(tensor=2), rank, 60.0)
        gc.collect()  # whoever still knows a group keeps it
        counts.append(sum(name.read_text().startswith("gloo") for name in Path("/proc/self/task").glob("*/comm")))
    return counts[1:]


def test_a_temperature_at_which_nothing_can_be_scored_is_refused(model: Path, two: Pool) -> None:
    with pytest.raises(RuntimeError, match=r"temperature = 0\.0 cannot be scored"):
        two.run(logprobs_of, model, [mixed_groups()[0].samples[0]], TENSOR, 0.0)
