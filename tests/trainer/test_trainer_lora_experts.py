"""Adapters on the experts of a Qwen3-MoE: gradients and files are peft's."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file

from miles.config import ConfigError, load
from miles.core.model.config import LoraConfig, ModelConfig
from miles.core.model.lora import adapter_tensors
from miles.run.footprint import adapter_parameters
from miles.run.preflight import check_rl
from miles.run.recipe import RLRecipe
from rollout.engines.contracts import Generation, Request, SamplingParams
from rollout.engines.torch_engine import TorchEngine
from tests.lora_cases import LORA, lora_gradients, peft_gradients, peft_model, stir
from tests.trainer_cases import make_backend, make_sample, mixed_groups, plain_logprobs, plain_model, relative_difference
from tests.trainer_pool import Pool

EXPERTS: dict[str, Any] = LORA | {"targets": ["q_proj", "gate_up_proj", "down_proj"]}


@pytest.fixture(scope="module")
def mixture(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("mixture")
    dense = json.loads((model / "config.json").read_text())
    sizes = {name: dense[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**sizes, intermediate_size=32, moe_intermediate_size=12, num_experts=4, num_experts_per_tok=2, max_position_embeddings=128)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def test_gradients_are_pefts_on_one_and_two_ranks(mixture: Path, two_ranks: Pool, one_rank: None) -> None:
    expected = peft_gradients(mixture, mixed_groups(), EXPERTS)
    assert sum(".experts." in name for name in expected) == 8
    for trainer in ({"max_tokens_per_microbatch": 24, "activations": "recompute"}, {}):
        assert relative_difference(lora_gradients(0, 1, mixture, mixed_groups(), {"lora": EXPERTS, "trainer": trainer}), expected) < 1e-12
    assert relative_difference(two_ranks.run(lora_gradients, mixture, mixed_groups(), {"lora": EXPERTS})[0], expected) < 1e-12


def test_the_exported_model_and_adapter_are_what_peft_makes_of_them(mixture: Path, one_rank: None, tmp_path: Path) -> None:
    backend = make_backend(mixture, lora=EXPERTS, dtype=torch.float32)
    stir(backend)
    backend.export(tmp_path / "model")
    backend.export_adapter(tmp_path / "adapter")
    stirred = peft_model(mixture, torch.float32, lora=EXPERTS)
    read = peft.PeftModel.from_pretrained(plain_model(mixture, torch.float32), str(tmp_path / "adapter"))
    sample = make_sample(0, 0, 3, 20)
    assert torch.equal(plain_logprobs(read, sample), plain_logprobs(stirred, sample))
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert stored.keys() == load_file(mixture / "model.safetensors").keys()
    torch.testing.assert_close(plain_logprobs(plain_model(tmp_path / "model", torch.float32), sample), plain_logprobs(stirred, sample), rtol=0, atol=2e-5)


def test_the_torch_engine_serves_them_as_the_trainer_scores_them(mixture: Path, one_rank: None) -> None:
    backend = make_backend(mixture, lora=EXPERTS, dtype=torch.float32)
    stir(backend)
    engine = TorchEngine(ModelConfig(path=str(mixture)), max_running=4, threads=1, lora=LoraConfig(**EXPERTS))
    assert engine.weight_specs() == backend.weight_specs()
    served = adapter_tensors(engine._weights._model)
    with torch.no_grad():
        for name, tensor in backend.weight_tensors(list(served)):
            served[name].copy_(tensor)
    sample = make_sample(0, 0, 3, 20)
    request = Request(request_id="0", prompt=sample.tokens[:3], sampling=SamplingParams(temperature=1.0, max_new_tokens=20, seed=1, stop_token_ids=()))

    async def answer() -> Generation:
        try:
            return (await engine.generate([request]))[0]
        finally:
            await engine.close()

    made = asyncio.run(answer())
    answered = replace(sample, tokens=np.concatenate([request.prompt, made.tokens]))
    assert np.abs(made.logprobs - np.array(backend.logprobs([answered])[0])).max() < 2e-5


def test_the_footprint_counts_what_is_trained(mixture: Path, one_rank: None) -> None:
    for lora in (EXPERTS, LORA | {"targets": ["gate_up_proj"]}, LORA):
        trained = sum(p.numel() for p in make_backend(mixture, lora=lora).model.parameters() if p.requires_grad)
        assert adapter_parameters(mixture, LoraConfig(**lora)) == trained


@pytest.mark.parametrize(
    ("override", "message"),
    [("rollout.engine=sglang", "which rollout.engine = 'sglang' does not go with"), ("tenants.a.trainer.lr=1e-3", "which [tenants] does not go with")],
)
def test_who_serves_no_adapters_of_experts(mixture: Path, tmp_path: Path, override: str, message: str) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "answer": "b"}\n')
    targets = 'lora.targets=["q_proj", "k_proj", "v_proj", "down_proj"]'
    recipe = load(RLRecipe, None, [f"model.path={mixture}", f"run.folder={tmp_path / 'run'}", f'data.paths=["{data}"]', "cluster.cpus=8", targets, override])
    with pytest.raises(ConfigError) as caught:
        check_rl(recipe)
    assert message in str(caught.value)


def test_experts_have_no_dora(mixture: Path, one_rank: None) -> None:
    with pytest.raises(ValueError, match="experts have no DoRA in peft"):
        make_backend(mixture, lora=EXPERTS | {"dora": True})
