"""Models that are read part by part: every value as transformers reads it, every byte once, and nothing that does not fit is taken for what does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from miles.core.model.config import LoraConfig
from miles.core.model.load import load_model
from miles.core.model.lora import add_adapters
from miles.core.model.tensor_files import TensorFiles, open_tensor_files
from miles.core.model.tiny import make_tiny_model
from trainer.fsdp.loading import fill, materialise, shell_of, sources_of
from weight_sync.slices import Block


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("sliced") / "model", alphabet="abcdef", hidden=16, heads=2, kv_heads=1, context=64)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fused in memory, one by one on disk, in several files."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=20, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_experts=3, num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("experts")
    Qwen3MoeForCausalLM(config).save_pretrained(folder, max_shard_size="8KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def read(path: Path, dtype: torch.dtype) -> Any:
    with open_tensor_files(path) as files:
        assert files is not None
        model = shell_of(path, dtype)
        sources = sources_of(model, files)
        assert sources is not None
        materialise(model, torch.device("cpu"))
        fill(model, files, sources)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["tied", "experts"])
def test_every_value_is_as_transformers_reads_it(request: pytest.FixtureRequest, kind: str, dtype: torch.dtype) -> None:
    path = request.getfixturevalue(kind)
    expected, found = load_model(path, dtype), read(path, dtype)
    assert [n for n, _ in found.named_parameters()] == [n for n, _ in expected.named_parameters()]
    for name, tensor in expected.state_dict().items():
        assert found.state_dict()[name].dtype == tensor.dtype
        assert torch.equal(found.state_dict()[name], tensor), name
    assert not found.training


def test_buffers_that_no_file_has_are_computed(tied: Path) -> None:
    expected, found = dict(load_model(tied).named_buffers()), dict(read(tied, torch.float32).named_buffers())
    assert "model.rotary_emb.inv_freq" in expected
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], buffer) for name, buffer in expected.items())


def test_tied_embeddings_stay_one_tensor(tied: Path) -> None:
    model = read(tied, torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("seed", [0, 3])
def test_adapters_begin_as_on_a_model_that_was_loaded_whole(tied: Path, seed: int) -> None:
    config = LoraConfig(rank=4)
    expected, found = load_model(tied, torch.float64), shell_of(tied, torch.float64)
    for model in (expected, found):
        add_adapters(model, config, seed)
    with open_tensor_files(tied) as files:
        assert files is not None
        sources = sources_of(found, files)
        assert sources is not None
        materialise(found, torch.device("cpu"))
        fill(found, files, sources)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), expected.parameters(), strict=True))
    assert [n for n, p in found.named_parameters() if p.requires_grad] == [n for n, p in expected.named_parameters() if p.requires_grad]


def test_an_experts_weight_is_read_from_its_many_tensors(experts: Path) -> None:
    with open_tensor_files(experts) as files:
        assert files is not None
        sources = sources_of(shell_of(experts, torch.float32), files)
    assert sources is not None
    blocks = sources["model.layers.1.mlp.experts.gate_up_proj"]
    assert Block("model.layers.1.mlp.experts.2.up_proj.weight", ((0, 8), (0, 16)), ((2, 3), (8, 16), (0, 16))) in blocks
    assert len(blocks) == 6


def test_what_is_read_is_what_the_files_hold(experts: Path) -> None:
    before = _read_so_far()
    read(experts, torch.float32)
    counted = _read_so_far() - before
    tensors = sum(t.nbytes for file in experts.glob("*.safetensors") for t in load_file(file).values())
    assert tensors <= counted < tensors + 40_000  # configuration, index and headers come on top


def _read_so_far() -> int:
    """Bytes that this process asked the kernel for."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize(
    "box", [[(0, 5), (0, 6), (0, 7)], [(2, 4), (0, 6), (0, 7)], [(1, 5), (2, 3), (0, 7)], [(1, 3), (1, 5), (2, 6)], [(4, 4), (0, 6), (0, 7)]]
)
def test_a_box_is_what_a_slice_of_the_tensor_is(tmp_path: Path, box: list[tuple[int, int]]) -> None:
    tensor = torch.randn(5, 6, 7).bfloat16()
    save_file({"before": torch.ones(3), "x": tensor, "scalar": torch.tensor(2.5)}, tmp_path / "t.safetensors")
    files = TensorFiles([tmp_path / "t.safetensors"])
    assert torch.equal(files.read("x", box), tensor[tuple(slice(*ends) for ends in box)])
    assert files.read("scalar", []) == 2.5
    files.close()


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_files_that_are_not_the_models_are_left_to_transformers(tied: Path, tmp_path: Path, change: str) -> None:
    tensors = load_file(tied / "model.safetensors")
    if change == "missing":
        del tensors["model.norm.weight"]
    else:
        tensors["more.weight" if change == "unexpected" else "model.norm.weight"] = torch.ones(3)
    (tmp_path / "config.json").write_text((tied / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with open_tensor_files(tmp_path) as files:
        assert files is not None
        assert sources_of(shell_of(tmp_path, torch.float32), files) is None


def test_a_file_that_is_cut_short_is_said_to_be(tied: Path, tmp_path: Path) -> None:
    whole = (tied / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_text(json.dumps(json.loads((tied / "config.json").read_text())))
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="bytes too early"):
        read(tmp_path, torch.float32)
