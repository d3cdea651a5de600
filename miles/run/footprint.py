"""An estimate of the memory a run needs, from the model's files alone: no weight is read."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from miles.config import ConfigError
from miles.core.model.config import LoraConfig, ModelConfig
from miles.run.machine import MIB
from rollout.config import RolloutConfig, TeacherEngineConfig
from trainer.config import TrainerConfig

# Resident memory of a process before it holds a weight, measured on x86-64 Linux, MiB.
RAY_MIB, RANK_MIB, TORCH_ENGINE_MIB, SGLANG_ENGINE_MIB = 600, 450, 450, 1100
_TRAINING_BYTES = 16  # float32 master, gradient and two Adam moments of a parameter, sharded over the ranks
_COPY_BYTES = 8  # float32 weights and gradients, or bfloat16 weights, float32 gradients and a little over half of a master
_TOKEN_BYTES = 17  # of a Sample: id, mask, log-prob and weight version
_BYTES = {"float32": 4, "bfloat16": 2}


def parameters(path: Path) -> int:
    """Parameters in a model directory, from its safetensors headers; 0 when it has no safetensors file (its size is then unknown).

    Raises ConfigError when such a file is not one: cut short, or the pointer that Git LFS leaves where a file was not fetched."""
    return sum(math.prod(shape) for shape in shapes(path).values())


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Of the tensors in a model directory, by name. Raises as `parameters`."""
    return {name: tuple(entry["shape"]) for file in path.glob("*.safetensors") for name, entry in _header(file).items() if name != "__metadata__"}


def adapter_parameters(path: Path, lora: LoraConfig) -> int:
    """Parameters of adapters on the model in `path`: rank x (inputs + outputs) of each matrix that gets one, and its outputs for DoRA."""
    sizes = [entry["shape"] for file in path.glob("*.safetensors") for name, entry in _header(file).items() if _gets_adapter(name, entry, lora)]
    experts = [(name, entry["shape"]) for file in path.glob("*.safetensors") for name, entry in _header(file).items() if ".experts." in name]
    fused = 0
    for name, (rows, columns) in experts:  # gate and up are one weight, with one A
        kind = name.removesuffix(".weight").rpartition(".")[2]
        target = "down_proj" if kind == "down_proj" else "gate_up_proj"
        fused += lora.rank * (rows + columns * (kind != "up_proj")) if target in lora.targets else 0
    return fused + sum(lora.rank * (rows + columns) + rows * lora.dora for rows, columns in sizes)


def _gets_adapter(name: str, entry: dict[str, Any], lora: LoraConfig) -> bool:
    layer = name.removesuffix(".weight").rpartition(".")[2]
    if ".experts." in name or layer == "gate":  # a router is no linear layer
        return False
    matrix = name != "__metadata__" and name.endswith(".weight") and len(entry["shape"]) == 2 and "embed" not in name and not name.startswith("lm_head")
    return matrix and (not lora.targets or layer in lora.targets)


def trainer_terms(model: ModelConfig, trainer: TrainerConfig, count: int, *, reference: bool, adapters: int | None = None) -> dict[str, int]:
    """MiB by reason. `count`: parameters of the model. `adapters`: of what is trained in their place; the reference is then no copy."""
    ranks = trainer.ranks
    terms = {f"{ranks} trainer rank{'s' * (ranks > 1)} x {RANK_MIB}": ranks * RANK_MIB}
    if trainer.backend == "megatron":
        copies = ranks // (trainer.tensor_parallel * trainer.pipeline_parallel)
        if adapters is not None:
            terms[f"{count:,} frozen parameters x {copies} data-parallel copies"] = _mib(count * copies * _BYTES[model.dtype])
            count, reference = adapters, False  # these learn in the model's place, and the reference is the model without them
        terms[f"{count:,} parameters x ({copies} data-parallel copies x {_COPY_BYTES} B of weights and gradients + 8 B of AdamW)"] = _mib(
            count * (copies * _COPY_BYTES + 8)
        )
        return terms | ({f"{copies} x reference model": copies * _mib(count * _BYTES[model.dtype])} if reference else {})
    copies = trainer.replicas
    times = f" x {copies} replicas" if copies > 1 else ""
    if adapters is None:
        terms[f"{count:,} parameters{times} x {_TRAINING_BYTES} B (float32 weights, gradients, AdamW)"] = copies * _mib(count * _TRAINING_BYTES)
    else:
        terms[f"{count:,} frozen parameters{times} x 4 B"] = copies * _mib(count * 4)
        trained = f"{adapters:,} parameters of adapters{times} x {_TRAINING_BYTES} B (float32 weights, gradients, AdamW)"
        terms[trained] = copies * _mib(adapters * _TRAINING_BYTES)
    if reference and adapters is None:
        terms["reference model"] = copies * _mib(count * _BYTES[model.dtype])
    return terms


def teacher_terms(count: int, trainer: TrainerConfig) -> dict[str, int]:
    """MiB by reason; the ranks of a replica share a teacher of `count` parameters, in float32."""
    return {"teacher": trainer.replicas * _mib(count * 4)}


def teacher_engine_terms(model: ModelConfig, config: TeacherEngineConfig, count: int) -> dict[str, int]:
    """MiB by reason, of a teacher of `count` parameters in engines of its own. It never changes, so each has its weights once."""
    base = SGLANG_ENGINE_MIB if config.engine == "sglang" else TORCH_ENGINE_MIB
    engines = config.engines
    return {
        f"{engines} {config.engine} teacher engine{'s' * (engines > 1)} x {base}": engines * base,
        f"{engines} x the teacher's {count:,} parameters x {_BYTES[model.dtype]} B": engines * _mib(count * _BYTES[model.dtype]),
    }


def critic_terms(count: int, trainer: TrainerConfig, *, whole: bool) -> dict[str, int]:
    """MiB by reason; a critic of `count` parameters is trained as the policy is, beside it. `whole`: it may be a reward model, which each rank
    reads whole."""
    terms = {f"critic: {count:,} parameters x {_TRAINING_BYTES} B": trainer.replicas * _mib(count * _TRAINING_BYTES)}
    return terms | ({f"{trainer.ranks} x the whole critic while it loads": trainer.ranks * _mib(count * 4)} if whole else {})


def engine_terms(model: ModelConfig, rollout: RolloutConfig, count: int, sent: int) -> dict[str, int]:
    """MiB by reason; all of an update, `sent` parameters of the model or of adapters, is beside what is served for a moment."""
    base = SGLANG_ENGINE_MIB if rollout.engine == "sglang" else TORCH_ENGINE_MIB
    engines, size = rollout.engines, _BYTES[model.dtype]
    terms = {
        f"{engines} {rollout.engine} engine{'s' * (engines > 1)} x {base}": engines * base,
        f"{engines} x {count:,} parameters x {size} B": engines * _mib(count * size),
    }
    return terms | ({f"{engines} x {sent:,} parameters of an update x {size} B": engines * _mib(sent * size)} if sent else {})


def batch_terms(rollout: RolloutConfig, trainer: TrainerConfig, max_staleness: int) -> dict[str, int]:
    """MiB by reason: the driver holds the batch that is trained and those that engines work ahead, and every rank the first of them.
    Prompts are left out, whose length only the data tells."""
    prompts, samples, tokens = rollout.prompts_per_step + rollout.extra_prompts, rollout.samples_per_prompt, rollout.max_new_tokens
    copies = max_staleness + 1 + trainer.ranks
    size = prompts * samples * tokens * _TOKEN_BYTES * copies
    ahead = f"{max_staleness + 1} batch{'es' * (max_staleness > 0)} + {trainer.ranks} on ranks"
    return {f"({ahead}) x {prompts:,} prompts x {samples} samples x {tokens} tokens x {_TOKEN_BYTES} B": _mib(size)}


def shared_memory_terms(model: ModelConfig, rollout: RolloutConfig, transport: str, sent: int, *, apart: int = 0, adapters: bool = False) -> dict[str, int]:
    """MiB under /dev/shm of one machine by reason. By `tensor`, torch engines serve from the last update's pages. SGLang engines
    keep what the last update brought, to go back to, beside what comes: by `tensor` those that roll out share it, otherwise each has its own.

    Args:
        sent: parameters of the model, or of adapters, that an update carries. apart: engines that only evaluate. They catch up one at a time, and
            keep another version than those that roll out. adapters: updates are of such, and each SGLang engine began with a file of zeros.
    """
    export = _mib(sent * _BYTES[model.dtype])
    terms = {"weights of an update": export} if transport == "tensor" else {}
    if rollout.engine == "torch" and transport == "tensor" and not adapters:
        terms["weights that torch engines serve"] = (1 + apart) * export
    if rollout.engine == "sglang":
        copies = (1 if transport == "tensor" else 2 * rollout.engines) + apart + adapters * (rollout.engines + apart)
        terms[f"{copies} x {'adapters' if adapters else 'weights'} that SGLang engines keep"] = copies * export
    return terms


def transport_terms(model: ModelConfig, transport: str, count: int) -> dict[str, int]:
    """MiB by reason."""
    reasons = {"delta": "the export that the next one is compared with", "p2p": "the slices that trainer ranks hold ready for engines to read"}
    return {reasons[transport]: _mib(count * _BYTES[model.dtype])} if transport in reasons else {}


def _mib(size: int) -> int:
    return math.ceil(size / MIB)


def _header(file: Path) -> dict[str, dict[str, Any]]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        try:
            header: dict[str, dict[str, Any]] = json.loads(stream.read(length)) if 8 + length <= size else {}
            needed = 8 + length + max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        except ValueError:  # no JSON, or an empty header
            needed = math.inf
    if needed > size:
        raise ConfigError(
            f"{str(file)!r} ({size:,} bytes) is not a whole safetensors file: fetch or copy it again (Git LFS leaves a short pointer in its place)"
        )
    return header
