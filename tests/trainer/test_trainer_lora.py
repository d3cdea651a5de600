"""A trainer with adapters: gradients against peft, the reference without a copy, checkpoints, exports, and what is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from algorithms.preference.config import PreferenceConfig, RewardModelConfig
from tests.lora_cases import LORA, lora_gradients, peft_gradients, peft_model, stir
from tests.trainer_cases import make_backend, make_sample, mixed_groups, plain_logprobs, plain_model, relative_difference
from tests.trainer_pool import Pool

pytestmark = pytest.mark.usefixtures("one_rank")

EXACT = 1e-12


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Any]:
    return peft_gradients(model, mixed_groups(), LORA)


@pytest.mark.parametrize("trainer", [{"max_tokens_per_microbatch": 1}, {"max_tokens_per_microbatch": 24, "activations": "recompute"}, {}])
def test_gradients_are_pefts_whatever_the_split(model: Path, expected: dict[str, Any], trainer: dict[str, Any]) -> None:
    assert relative_difference(lora_gradients(0, 1, model, mixed_groups(), {"trainer": trainer}), expected) < EXACT


def test_gradients_are_pefts_with_prompts_that_are_computed_once(model: Path, expected: dict[str, Any]) -> None:
    assert relative_difference(lora_gradients(0, 1, model, mixed_groups(), {"trainer": {"prompt_sharing": True}}), expected) < EXACT


@pytest.mark.parametrize("max_tokens", [24, 8192])
def test_gradients_on_two_ranks_are_pefts(model: Path, two: Pool, expected: dict[str, Any], max_tokens: int) -> None:
    found = two.run(lora_gradients, model, mixed_groups(), {"trainer": {"max_tokens_per_microbatch": max_tokens}})[0]
    assert relative_difference(found, expected) < EXACT


@pytest.mark.parametrize("kind", ["rslora", "dora"])
def test_gradients_of_variants_are_pefts_on_two_ranks(model: Path, two: Pool, kind: str) -> None:
    lora = LORA | {kind: True}
    found = two.run(lora_gradients, model, mixed_groups(), {"lora": lora})[0]
    assert relative_difference(found, peft_gradients(model, mixed_groups(), lora)) < EXACT


def test_the_reference_is_the_model_without_its_adapter(model: Path, two: Pool) -> None:
    found = two.run(lora_gradients, model, mixed_groups(), {"algorithm": {"kl_coef": 0.3}})[0]
    assert relative_difference(found, peft_gradients(model, mixed_groups(), LORA, kl_coef=0.3)) < 1e-9


def test_a_reference_costs_no_parameters(model: Path) -> None:
    def count(**options: Any) -> int:
        backend = make_backend(model, algorithm={"kl_coef": 0.1}, **options)
        models = {id(m): m for m in (backend.model, backend._reference.model)}
        return sum(p.numel() for m in models.values() for p in m.parameters())

    base = sum(p.numel() for p in plain_model(model).parameters())
    adapters = sum(p.numel() for p in peft_model(model, lora=LORA).parameters() if p.requires_grad)
    assert count(lora=LORA) == base + adapters
    assert count() == 2 * base


def test_preference_pairs_are_measured_against_the_model_without_its_adapter(model: Path) -> None:
    backend = make_backend(model, lora=LORA, pairs=PreferenceConfig(objective="dpo", beta=0.2))
    stir(backend)
    samples = [make_sample(0, i, 3, 5) for i in range(2)]
    metrics = backend.step_pairs(samples).metrics
    stirred = peft_model(model, lora=LORA)
    moved = [(plain_logprobs(stirred, s) - plain_logprobs(plain_model(model), s)).sum().item() for s in samples]
    assert metrics["preference/margin"] == pytest.approx(0.2 * (moved[0] - moved[1]), rel=1e-9)


def test_only_adapters_are_trained_kept_and_sent(model: Path, tmp_path: Path) -> None:
    backend = make_backend(model, lora=LORA, dtype=torch.float32)
    base = {n: p.detach().clone() for n, p in backend.model.named_parameters() if not p.requires_grad}
    before = _shas(model)
    backend.step_rl(mixed_groups())
    backend.save(tmp_path / "step_00000001", {}, asynchronous=False)
    backend.close()
    assert all(torch.equal(p, base[n]) for n, p in backend.model.named_parameters() if n in base)
    assert _shas(model) == before
    assert all(".lora_" in name for name in backend._state())
    assert all(".lora_" in spec.name for spec in backend.weight_specs())
    kept = set(FileSystemReader(tmp_path / "step_00000001").read_metadata().state_dict_metadata)
    assert kept
    assert all(".lora_" in name or name.startswith("rng.") for name in kept)


@pytest.mark.parametrize("lora", [LORA, LORA | {"dora": True}])
def test_a_resumed_run_goes_on_bit_for_bit(model: Path, tmp_path: Path, lora: dict[str, Any]) -> None:
    options: dict[str, Any] = {"lora": lora, "dtype": torch.float32, "algorithm": {"kl_coef": 0.1}, "trainer": {"lr": 1e-2, "schedule": "cosine"}}
    backend = make_backend(model, **options)
    backend.step_rl(mixed_groups())
    backend.save(tmp_path / "step_00000001", {}, asynchronous=False)
    other = make_backend(model, **options)
    other.load(tmp_path / "step_00000001")
    for _ in range(2):
        assert other.step_rl(mixed_groups()).metrics == backend.step_rl(mixed_groups()).metrics
    one, two = backend._state(), other._state()
    assert one.keys() == two.keys()
    assert all(torch.equal(one[n], two[n]) for n in one)


def export_both(rank: int, world: int, path: Path, folder: Path, lora: dict[str, Any]) -> None:
    backend = make_backend(path, rank=rank, world=world, lora=lora, dtype=torch.float32)
    stir(backend, rank)
    backend.export(folder / "model")
    backend.export_adapter(folder / "adapter")


@pytest.mark.parametrize("lora", [LORA, LORA | {"rslora": True}, LORA | {"dora": True}])
def test_the_exported_model_and_adapter_are_what_peft_makes_of_them(model: Path, two: Pool, tmp_path: Path, lora: dict[str, Any]) -> None:
    two.run(export_both, model, tmp_path, lora)
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert stored.keys() == load_file(model / "model.safetensors").keys()
    read = peft.PeftModel.from_pretrained(plain_model(model, torch.float32), str(tmp_path / "adapter"))
    stirred = peft_model(model, torch.float32, lora=lora)
    sample = make_sample(0, 0, 3, 20)
    assert torch.equal(plain_logprobs(read, sample), plain_logprobs(stirred, sample))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(plain_logprobs(merged, sample), plain_logprobs(stirred, sample), rtol=0, atol=2e-5)
    by_peft = stirred.merge_and_unload().state_dict()
    for name, tensor in stored.items():
        torch.testing.assert_close(tensor, by_peft[name], rtol=1e-6, atol=1e-6)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def sent_merged(rank: int, world: int, path: Path, folder: Path, lora: dict[str, Any]) -> dict[str, NDArray[Any]]:
    backend = make_backend(path, rank=rank, world=world, lora=lora | {"served": "merged"})
    stir(backend, rank)
    backend.export(folder / "merged")
    return {name: tensor.numpy().copy() for name, tensor in backend.weight_tensors([spec.name for spec in backend.weight_specs()])}


@pytest.mark.parametrize("lora", [LORA, LORA | {"dora": True}], ids=["lora", "dora"])
def test_what_is_sent_merged_is_what_is_exported_bit_for_bit(model: Path, two: Pool, tmp_path: Path, lora: dict[str, Any]) -> None:
    """Which is what peft makes of it, see above."""
    sent = two.run(sent_merged, model, tmp_path, lora)[0]
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    assert sent.keys() == stored.keys()
    assert all(np.array_equal(sent[name], tensor.numpy()) for name, tensor in stored.items())


def test_exact_operators_take_adapters_too(model: Path) -> None:
    """Each token's log-prob is the same, bit for bit, in whatever row it is computed."""
    backends = [make_backend(model, lora=LORA, dtype=torch.float32, model={"true_on_policy": True}, trainer={"max_tokens_per_microbatch": m}) for m in (1, 999)]
    samples = [s for g in mixed_groups() for s in g.samples]
    found = []
    for backend in backends:
        stir(backend)
        found.append(backend.logprobs(samples))
    assert found[0] == found[1]


def test_targets_are_the_named_layers_alone(model: Path) -> None:
    backend = make_backend(model, lora=LORA | {"targets": ["q_proj", "v_proj"]})
    assert {spec.name.split(".")[-3] for spec in backend.weight_specs()} == {"q_proj", "v_proj"}


def test_a_target_that_is_no_linear_layer_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match=r"lora\.targets has 'query', which is no linear layer of Qwen3ForCausalLM; there are down_proj"):
        make_backend(model, lora=LORA | {"targets": ["query"]})


def test_what_has_no_adapters_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="a reward model is trained whole"):
        make_backend(model, lora=LORA, pairs=RewardModelConfig())
    with pytest.raises(ValueError, match="there is no adapter"):
        make_backend(model).export_adapter(model.parent / "adapter")


def _shas(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}
