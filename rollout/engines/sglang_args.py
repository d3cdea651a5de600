"""Arguments and environment of an SGLang server, from our configuration."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rollout
from miles.core.environment import worker_environment
from miles.core.model.config import ModelConfig
from rollout.config import RolloutConfig

LOADER = "rollout.engines.sglang_loader.load_file"
INVARIANT = "rollout.engines.sglang_invariant:install"

# SGLang keeps up to 8 positions of its context for itself; offering that much more lets a sequence fill ours to the last token.
CONTEXT_SLACK = 8

# Memory for keys and values on CPU, where SGLang would otherwise take a share of the whole machine.
CPU_CACHE_BYTES = 2**30


_ELSEWHERE = {
    "model_path": "model.path",
    "dtype": "model.dtype",
    "context_length": "model.context",
    "trust_remote_code": "model.trust_remote_code",
    "max_running_requests": "rollout.max_running",
    "enable_lora": "[lora]",
    "lora_paths": "[lora]",
    "max_lora_rank": "lora.rank",
    "lora_target_modules": "lora.targets",
}
"""Arguments whose values other parts of the product must know, by the option that has them."""
_OWN = ("host", "port", "api_key", "weight_version", "custom_weight_loader")


@dataclass(frozen=True)
class ModelFacts:
    """What the server's arguments and its requests depend on, read from the model directory's JSON files."""

    folder: Path
    context: int
    vocabulary: int
    end_tokens: frozenset[int]
    tied: bool
    cache_bytes_per_token: int
    architecture: str


def model_facts(model: ModelConfig) -> ModelFacts:
    """Raises ValueError when the directory has no readable configuration, or no context length and none is set."""
    folder = _local_folder(model.path)
    config = _read_json(folder / "config.json")
    config = {**config, **config.get("text_config", {})}
    context = model.context or config.get("max_position_embeddings")
    if not context:
        raise ValueError(f"{folder}/config.json has no max_position_embeddings; set model.context to the longest sequence in tokens")
    generation = folder / "generation_config.json"
    ends = [config.get("eos_token_id"), _read_json(generation).get("eos_token_id") if generation.is_file() else None]
    return ModelFacts(
        folder=folder,
        context=int(context),
        vocabulary=int(config["vocab_size"]),
        end_tokens=frozenset(token for end in ends if end is not None for token in ([end] if isinstance(end, int) else end)),
        tied=bool(config.get("tie_word_embeddings", False)),
        cache_bytes_per_token=_cache_bytes_per_token(config, model.dtype),
        architecture=config["architectures"][0],
    )


def server_arguments(
    model: ModelConfig, rollout_config: RolloutConfig, facts: ModelFacts, weight_version: int, more: dict[str, Any] | None = None
) -> dict[str, Any]:
    """SGLang's ServerArgs by name, with `more` of ours; `rollout.sglang_args` has the last word. Host, port and API key are not among them.

    Raises:
        ValueError: `sglang_args` has one that is set elsewhere, or a number of ranks that is none; `model.true_on_policy` on a GPU or with tensor
            parallelism.
    """
    _check_given(rollout_config.sglang_args)
    arguments: dict[str, Any] = {
        "model_path": str(facts.folder),
        "dtype": model.dtype,
        "context_length": facts.context + CONTEXT_SLACK,
        "trust_remote_code": model.trust_remote_code,
        "max_running_requests": rollout_config.max_running,
        "weight_version": str(weight_version),
        "custom_weight_loader": [LOADER],
        "skip_tokenizer_init": True,  # tokens in, tokens out: nothing to decode
        "log_level": "warning",
    }
    if rollout_config.gpus_per_engine == 0:
        arguments |= _cpu_arguments(rollout_config, facts)
    elif rollout_config.gpus_per_engine > 1:
        arguments["tp_size"] = int(rollout_config.gpus_per_engine)
    if model.true_on_policy:
        arguments["enable_deterministic_inference"] = True
    arguments |= (more or {}) | rollout_config.sglang_args
    if model.true_on_policy and (rollout_config.gpus_per_engine > 0 or int(arguments.get("tp_size", 1)) > 1):
        raise ValueError(
            f"model.true_on_policy with rollout.engine = 'sglang' needs one rank on CPU, but gpus_per_engine = {rollout_config.gpus_per_engine:g} and "
            f"tp_size = {arguments.get('tp_size', 1)}: set them to 0 and 1, or true_on_policy = false"
        )
    return arguments


def _check_given(sglang_args: dict[str, Any]) -> None:
    for name, value in sglang_args.items():
        plain = name.replace("-", "_")
        if plain in _ELSEWHERE:
            raise ValueError(f"sglang_args has {name} = {value!r}: set {_ELSEWHERE[plain]} instead")
        if plain in _OWN:
            raise ValueError(f"sglang_args has {name}, which each engine chooses by itself: leave it out")
        if plain == "tp_size" and (type(value) is not int or value < 1):
            raise ValueError(f"sglang_args has {name} = {value!r}, which must be a whole number of at least 1")


def server_environment(model: ModelConfig, rollout_config: RolloutConfig, facts: ModelFacts, arguments: dict[str, Any], scratch: Path) -> dict[str, str]:
    """The server's whole environment. Its sockets and temporary files go to `scratch`, which goes when the engine does."""
    root = str(Path(rollout.__file__).resolve().parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **worker_environment(rollout_config.threads)}
    environment |= {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TMPDIR": str(scratch), "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    if rollout_config.gpus_per_engine == 0:
        # Compiling takes up to a minute at the first seeded request and gains nothing on a CPU.
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": "", "TORCH_COMPILE_DISABLE": "1"}
        environment["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(_other_models(facts.architecture))
        ranks = int(arguments.get("tp_size", 1))
        if ranks > 1:  # SGLang cannot share out the cores of one NUMA node by itself
            environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", _cores_by_rank(ranks, rollout_config.threads))
    if model.true_on_policy:
        environment["MILES_SGLANG_EXTENSION"] = INVARIANT
    return environment


def command_line(arguments: dict[str, Any]) -> list[str]:
    """`{"tp_size": 2, "sleep_on_idle": True}` as `["--tp-size", "2", "--sleep-on-idle"]`; None and False leave an option out."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if isinstance(value, dict):
            words.append(json.dumps(value))
        elif isinstance(value, (list, tuple)):
            words.extend(str(item) for item in value)
        elif value is not True:
            words.append(str(value))
    return words


def _cpu_arguments(rollout_config: RolloutConfig, facts: ModelFacts) -> dict[str, Any]:
    sequence = facts.context + 2 * CONTEXT_SLACK
    tokens = max(sequence, min(rollout_config.max_running * sequence, CPU_CACHE_BYTES // facts.cache_bytes_per_token))
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "max_total_tokens": tokens,
        "mem_fraction_static": 0.8,  # an upper bound only: max_total_tokens is far below it
        "sleep_on_idle": True,  # else the scheduler spins a whole core
        "skip_server_warmup": True,
        # Nothing overlaps on a CPU, and without it no token is in flight when an update pauses the scheduler in place:
        # every token then carries the version that made it.
        "disable_overlap_schedule": True,
    }


def _other_models(architecture: str) -> list[str]:
    """SGLang's model modules that do not define `architecture`; importing them all is a fifth of a start. None when nothing defines it."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None, "the server checks that SGLang is installed"
    assert spec.submodule_search_locations
    modules = sorted(Path(spec.submodule_search_locations[0], "srt", "models").glob("*.py"))
    others = [path.stem for path in modules if f"class {architecture}(" not in path.read_text(encoding="utf-8")]
    return others if len(others) < len(modules) else []


def _cores_by_rank(ranks: int, threads: int) -> str:
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(",".join(str(cores[(rank * threads + i) % len(cores)]) for i in range(threads)) for rank in range(ranks))


def _cache_bytes_per_token(config: dict[str, Any], dtype: str) -> int:
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    return 2 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * head * (4 if dtype == "float32" else 2)


def _local_folder(path: str) -> Path:
    if Path(path).is_dir():
        return Path(path).resolve()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path = {path!r} is no directory, and no hub answers for it: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {str(path)!r}: {error}") from error
