"""Weights there and back: bit for bit, in bounded memory, whole or not at all, and as the backend itself reads and writes them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from miles.run.convert import run
from tests.forks import CONTEXT
from tests.trainer_cases import make_backend
from tests.trainer_pool import Pool
from trainer.megatron.convert import Conversion, to_huggingface, to_megatron

SIZES: dict[str, Any] = {
    "vocab_size": 70, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "norm_topk_prob": True}
LATENT = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: Qwen3Config(**SIZES | {"tie_word_embeddings": True}),
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen2": lambda: Qwen2Config(**{name: size for name, size in SIZES.items() if name != "head_dim"}),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES | EXPERTS),
    "deepseek_v3": lambda: DeepseekV3Config(**SIZES | LATENT),
}
SMALL = 8_000
"""Bytes of a file of weights, so that a small model has several."""


def saved(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=dtype)
    for tensor in model.state_dict().values():
        torch.nn.init.normal_(tensor)  # none is all ones or zeros
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(found[n].dtype == expected[n].dtype and torch.equal(found[n], expected[n]) for n in expected)


def conversion(source: Path, target: Path, file_bytes: int = SMALL, **options: Any) -> Conversion:
    return Conversion(source, target, file_bytes, options.get("dtype"), options.get("report", lambda line: None))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_comes_back_as_it_went(family: str, tmp_path: Path) -> None:
    """In bfloat16, and its other files byte for byte."""
    model = saved(family, tmp_path / "model", torch.bfloat16)
    to_megatron(conversion(model, tmp_path / "there"))
    to_huggingface(conversion(tmp_path / "there", tmp_path / "back"), None)
    assert same(tensors(tmp_path / "back"), tensors(model))
    assert len(list((tmp_path / "there").glob("*.distcp"))) > 2
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "back" / name).read_bytes() == (model / name).read_bytes()
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict(), AutoModelForCausalLM.from_pretrained(model).state_dict())


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_memory_is_that_of_a_file_whatever_the_model(family: str, tmp_path: Path) -> None:
    """Counted by torch's allocator: a file's tensors, and a tensor as it is read beside its copy as it is written."""
    model = saved(family, tmp_path / "model")
    sizes = [tensor.nbytes for tensor in tensors(model).values()]
    limit = SMALL + 3 * max(sizes)
    assert limit < sum(sizes) / 2
    assert most_at_once(lambda: to_megatron(conversion(model, tmp_path / "there")), model) <= limit
    assert most_at_once(lambda: to_huggingface(conversion(tmp_path / "there", tmp_path / "back"), None), model) <= limit


def most_at_once(work: Callable[[], None], mapped: Path) -> int:
    """Bytes of tensors that `work` has in memory at a time. Safetensors files of `mapped` are mapped, not read: they do not count."""
    files = {file.stat().st_size for file in mapped.glob("*.safetensors")}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    now = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]" and abs(event.nbytes()) not in files:
            now += event.nbytes()
            most = max(most, now)
    assert most > 0
    return most


@pytest.mark.parametrize("to", ["megatron", "huggingface"])
def test_a_conversion_that_is_killed_leaves_nothing_that_looks_complete(to: str, tmp_path: Path) -> None:
    model, there = saved("qwen3", tmp_path / "model"), tmp_path / "there"
    if to == "huggingface":
        to_megatron(conversion(model, there))
    source, target = (model, there) if to == "megatron" else (there, tmp_path / "back")
    process = CONTEXT.Process(target=killed_half_way, args=(source, target, to))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    partial = target.with_name(f"{target.name}.partial")
    assert any(partial.iterdir())
    assert not target.exists()
    with pytest.raises(ValueError, match=r"no complete Megatron checkpoint" if to == "megatron" else r"has no config\.json"):
        (to_huggingface(conversion(partial, tmp_path / "no"), model) if to == "megatron" else to_megatron(conversion(partial, tmp_path / "no")))
    convert(source, target, to)
    assert not partial.exists()
    if to == "huggingface":
        assert same(tensors(target), tensors(model))


def convert(source: Path, target: Path, to: str, **options: Any) -> None:
    asked = conversion(source, target, **options)
    if to == "megatron":
        to_megatron(asked)
    else:
        to_huggingface(asked, None)


def killed_half_way(source: Path, target: Path, to: str) -> None:
    lines: list[str] = []

    def die(line: str) -> None:
        lines.append(line)
        if len(lines) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    convert(source, target, to, report=die)


def test_a_conversion_that_fails_leaves_no_target(tmp_path: Path) -> None:
    def fail(line: str) -> None:
        raise KeyboardInterrupt

    model = saved("qwen3", tmp_path / "model")
    with pytest.raises(KeyboardInterrupt):
        to_megatron(conversion(model, tmp_path / "there", report=fail))
    assert not (tmp_path / "there").exists()


def test_another_dtype_is_written_and_named(tmp_path: Path) -> None:
    model = saved("llama", tmp_path / "model")
    to_megatron(conversion(model, tmp_path / "there"))
    run(str(tmp_path / "there"), str(tmp_path / "back"), to="huggingface", model=None, dtype="bfloat16", file_gib=1)
    assert same(tensors(tmp_path / "back"), {name: tensor.bfloat16() for name, tensor in tensors(model).items()})
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto").dtype == torch.bfloat16


def refused(tmp_path: Path, source: Path, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the callers match
        run(str(source), str(tmp_path / "target"), **{"to": "megatron", "model": None, "dtype": None, "file_gib": 1.0} | options)
    return str(caught.value)


def test_what_cannot_be_converted_is_refused_by_name(tmp_path: Path) -> None:
    model = saved("qwen3", tmp_path / "model")
    assert "no complete Megatron checkpoint" in refused(tmp_path, model, to="huggingface")
    assert "has no safetensors file" in refused(tmp_path, tmp_path)
    for size in (0, float("inf"), float("nan")):
        assert f"--file-gib = {size:g} must be a number of more than 0" in refused(tmp_path, model, file_gib=size)
    assert "--model goes with --to huggingface" in refused(tmp_path, model, model=str(model))
    to_megatron(conversion(model, tmp_path / "there"))
    other = saved("llama", tmp_path / "other")
    assert "has no tensor output_layer.weight" in refused(tmp_path, tmp_path / "there", to="huggingface", model=str(other))
    stored = tensors(model)
    save_file(stored | {"model.norm.bias": torch.zeros(16)}, model / "model.safetensors", metadata={"format": "pt"})
    assert "does not know: model.norm.bias" in refused(tmp_path, model)
    save_file(stored | {"model.layers.2.self_attn.k_proj.weight": torch.zeros(16, 16).half()}, model / "model.safetensors", metadata={"format": "pt"})
    assert "have dtypes F32 and F16" in refused(tmp_path, model)
    assert not (tmp_path / "target").exists()
    assert not (tmp_path / "target.partial").exists()
    (tmp_path / "target").symlink_to("nowhere")
    assert "is there already" in refused(tmp_path, other)
    (tmp_path / "target").unlink()
    (tmp_path / "target").mkdir()
    assert "is there already" in refused(tmp_path, other)


def test_a_target_below_a_file_is_refused(tmp_path: Path) -> None:
    model = saved("qwen3", tmp_path / "model")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"lies below '.*/file', which is a file"):
        run(str(model), str(tmp_path / "file" / "target"), to="megatron", model=None, dtype=None, file_gib=1.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Path]:
    found = {}
    for family in ("qwen3", "qwen3_moe", "deepseek_v3"):
        found[family] = saved(family, tmp_path_factory.mktemp(family) / "model")
        for file in tiny_model.glob("tokenizer*"):
            (found[family] / file.name).write_bytes(file.read_bytes())
    return found


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen3", {"tensor_parallel": 2}), ("qwen3_moe", {"expert_parallel": 2}), ("deepseek_v3", {"pipeline_parallel": 2})]
)
def test_shards_are_those_of_the_backend(models: dict[str, Path], two_ranks: Pool, family: str, layout: dict[str, int], tmp_path: Path) -> None:
    """What is converted loads by Megatron-Core into every rank of a layout, and a checkpoint of such ranks becomes what they export."""
    model = models[family]
    to_megatron(conversion(model, tmp_path / "there"))
    assert all(two_ranks.run(loads_and_saves, model, layout, tmp_path))
    to_huggingface(conversion(tmp_path / "step_00000001", tmp_path / "tuned"), model)
    expected = tensors(tmp_path / "export")
    assert same(tensors(tmp_path / "tuned"), expected)
    assert same(expected, tensors(model))


def loads_and_saves(rank: int, world: int, model: Path, layout: dict[str, int], folder: Path) -> bool:
    """Whether Megatron-Core's own load of the converted directory gives the rank what it has read from safetensors."""
    from megatron.core import dist_checkpointing

    from trainer.megatron import cpu

    backend = make_backend(model, rank=rank, world=world, trainer={"backend": "megatron", "ranks": world} | layout, dtype=torch.float32)
    backend.save(folder / "step_00000001", {}, asynchronous=False)
    backend.export(folder / "export")
    chunk = backend._trained.chunks[0].module
    before = {name: parameter.detach().clone() for name, parameter in chunk.named_parameters()}
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.fill_(7)
    with cpu.tensors():
        wanted = {name: place for name, place in chunk.sharded_state_dict().items() if not name.endswith("_extra_state")}  # empty without FP8
        loaded = dist_checkpointing.load(wanted, str(folder / "there"))
    assert not chunk.load_state_dict(loaded, strict=False).unexpected_keys
    backend.close()
    # Rows of the vocabulary's padding are nobody's: what was there stays.
    own = [(before[name], parameter) for name, parameter in chunk.named_parameters()]
    return all(torch.equal(a[keep], b[keep]) for a, b in own for keep in [a.flatten(1).any(1) if a.ndim > 1 else slice(None)])
