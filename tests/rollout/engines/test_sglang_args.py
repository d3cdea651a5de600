"""The server's arguments and environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles.core.model.config import ModelConfig
from rollout.config import RolloutConfig
from rollout.engines.sglang_args import command_line, model_facts, server_arguments, server_environment


def facts_of(tiny_model: Path, **model: object):
    return model_facts(ModelConfig(path=str(tiny_model), **model))


def arguments_of(tiny_model: Path, **rollout: object) -> dict:
    return server_arguments(ModelConfig(path=str(tiny_model)), RolloutConfig(engine="sglang", **rollout), facts_of(tiny_model), 3)


def test_the_facts_are_those_of_the_model_directory(tiny_model: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    facts = facts_of(tiny_model)
    assert (facts.context, facts.vocabulary, facts.tied, facts.end_tokens) == (256, config["vocab_size"], True, {3})
    assert facts.cache_bytes_per_token == 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, head size, float32


def test_the_context_can_be_shortened(tiny_model: Path) -> None:
    assert facts_of(tiny_model, context=32).context == 32


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        model_facts(ModelConfig(path=str(tmp_path)))


def test_on_a_cpu_the_cache_is_bounded_and_the_scheduler_sleeps(tiny_model: Path) -> None:
    arguments = arguments_of(tiny_model, max_running=4)
    assert (arguments["device"], arguments["attention_backend"], arguments["sleep_on_idle"]) == ("cpu", "torch_native", True)
    assert arguments["max_total_tokens"] == 4 * (256 + 16)


def test_on_a_gpu_sglang_chooses_device_and_backend(tiny_model: Path) -> None:
    arguments = arguments_of(tiny_model, gpus_per_engine=2)
    assert arguments["tp_size"] == 2
    assert not {"device", "attention_backend", "max_total_tokens"} & arguments.keys()


@pytest.mark.parametrize("rollout", [{"gpus_per_engine": 1}, {"sglang_args": {"tp_size": 2}}], ids=["gpu", "tensor parallel"])
def test_true_on_policy_is_refused_where_it_would_not_be_exact(tiny_model: Path, rollout: dict) -> None:
    model = ModelConfig(path=str(tiny_model), true_on_policy=True)
    with pytest.raises(ValueError, match="true_on_policy"):
        server_arguments(model, RolloutConfig(engine="sglang", **rollout), facts_of(tiny_model), 0)


def test_the_recipe_has_the_last_word(tiny_model: Path) -> None:
    assert arguments_of(tiny_model, sglang_args={"max_total_tokens": 99})["max_total_tokens"] == 99


def test_two_ranks_on_a_cpu_get_cores_of_their_own(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {4, 5, 6, 7})
    rollout = RolloutConfig(engine="sglang", threads=2)
    environment = server_environment(ModelConfig(path=str(tiny_model)), rollout, facts_of(tiny_model), {"tp_size": 2}, tmp_path)
    assert (environment["SGLANG_CPU_OMP_THREADS_BIND"], environment["OMP_NUM_THREADS"]) == ("4,5|6,7", "2")


def test_the_command_line_leaves_out_what_is_off() -> None:
    words = command_line({"tp_size": 2, "sleep_on_idle": True, "skip": False, "none": None, "loaders": ["a.b", "c.d"], "table": {"x": 1}})
    assert words == ["--tp-size", "2", "--sleep-on-idle", "--loaders", "a.b", "c.d", "--table", '{"x": 1}']
