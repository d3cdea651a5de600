"""Checks that need no process: what is wrong with a run is said before anything starts, with the value and what to change."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from miles.config import ConfigError, Resolved, nearest
from miles.core.model.config import LoraConfig, ModelConfig
from miles.run import folder, footprint, machine
from miles.run.demands import Demand, engine_demands, rl_demands, sum_text, total, trainer_demands
from miles.run.machine import MIB
from miles.run.recipe import ClusterConfig, EvaluateRecipe, PreferenceRecipe, RewardModelRecipe, RLRecipe, SFTRecipe, lora_of
from miles.tracking.config import TrackingConfig
from miles.tracking.wandb_sink import has_key
from rollout.config import RolloutConfig, TeacherEngineConfig
from rollout.endpoint import check_endpoint
from rollout.engines.sglang_args import model_facts, server_arguments
from rollout.rewards.registry import resolve
from trainer.config import TrainerConfig
from trainer.fsdp.plan import describe
from weight_sync.config import WeightSyncConfig
from weight_sync.contracts import WeightSyncError
from weight_sync.transports.delta_store import WeightStore

S = TypeVar("S", SFTRecipe, PreferenceRecipe, RewardModelRecipe)
_SLICE = re.compile(r"@\[[^\]]*\]$")


def check_rl(resolved: Resolved[RLRecipe], *, resume: bool = False) -> None:
    """Raises ConfigError for the first thing that would stop `miles rl` or `miles distill`."""
    recipe = resolved.config
    if recipe.tenants:
        folder.check(recipe.run, resume=resume)
        for name, own in recipe.of_tenants().items():
            try:
                # One that is new, or whose folder the run did not come to before it ended, begins.
                check_rl(Resolved(own, resolved.origins), resume=resume and bool(folder.content_of(own.run)))
                _check_experts(own, tenants=True)
            except ConfigError as error:
                raise ConfigError(f"tenant {name}: {error}") from error
        return
    folder.check(recipe.run, resume=resume)
    _check_model(recipe.model)
    _check_data("data.paths", recipe.data.paths)
    if recipe.evaluate.every:
        _check_data("evaluate.data.paths", recipe.evaluate.data.paths)
    distill, teachers = recipe.distillation, recipe.teacher_engines
    if distill is not None:
        _check_model_path("distill.teacher", distill.teacher)
        if distill.address is not None:
            check_endpoint("distill.address", distill.address, "distill.api_key_env", distill.api_key_env)
    if recipe.critic is not None and recipe.critic.path is not None:
        _check_model_path("critic.path", recipe.critic.path)
    rewards = _rewards(recipe)
    for name in recipe.algorithm.part_weights:
        if name not in rewards:
            raise ConfigError(f"algorithm.part_weights has {name!r}, which is no reward function of this recipe{nearest(name, rewards)}")
    _check_engine("rollout", recipe.rollout, recipe.model)
    if distill is not None and teachers is not None:
        _check_engine("teacher_engine", teachers, recipe.model.model_copy(update={"path": distill.teacher, "context": None, "true_on_policy": False}))
    _check_transport(recipe.weight_sync)
    _check_backend(recipe)
    adapters = _check_lora(recipe)
    _check_experts(recipe)
    _check_tracking(recipe.tracking)
    count = footprint.parameters(Path(recipe.model.path))
    terms = footprint.trainer_terms(recipe.model, recipe.trainer, count, reference=recipe.algorithm.kl_coef > 0, adapters=adapters)
    if distill is not None and distill.place == "trainer":
        terms |= footprint.teacher_terms(footprint.parameters(Path(distill.teacher)), recipe.trainer)
    if distill is not None and teachers is not None:
        terms |= footprint.teacher_engine_terms(recipe.model, teachers, footprint.parameters(Path(distill.teacher)))
    if recipe.critic is not None:
        critic = count if recipe.critic.path is None else footprint.parameters(Path(recipe.critic.path))
        terms |= footprint.critic_terms(critic, recipe.trainer, whole=recipe.critic.path is not None)
    engines = recipe.rollout.model_copy(update={"engines": recipe.rollout.engines + recipe.evaluate.engines})
    alone = adapters is not None and recipe.served_lora is not None
    sent = adapters if adapters is not None and alone else count
    terms |= footprint.engine_terms(recipe.model, engines, count, sent)
    terms |= footprint.transport_terms(recipe.model, recipe.weight_sync.transport, sent)
    terms |= footprint.batch_terms(recipe.rollout, recipe.trainer, recipe.run.max_staleness)
    apart = recipe.evaluate.engines
    shared = footprint.shared_memory_terms(recipe.model, recipe.rollout, recipe.weight_sync.transport, sent, apart=apart, adapters=alone)
    _check_cluster(recipe.cluster, rl_demands(recipe), terms, shared)
    _check_layers(recipe)


def check_supervised(resolved: Resolved[S], *, resume: bool = False) -> None:
    """Raises ConfigError for the first thing that would stop `miles sft`, `miles prefer` or `miles reward`."""
    recipe = resolved.config
    folder.check(recipe.run, resume=resume)
    _check_model(recipe.model)
    _check_data("data.paths", recipe.data.paths)
    _check_backend(recipe)
    adapters = _check_lora(recipe)
    if not isinstance(recipe, SFTRecipe) and recipe.evaluate.every:
        _check_data("evaluate.data.paths", recipe.evaluate.data.paths)
    _check_tracking(recipe.tracking)
    reference = isinstance(recipe, PreferenceRecipe) and recipe.preference.needs_reference
    count = footprint.parameters(Path(recipe.model.path))
    terms = footprint.trainer_terms(recipe.model, recipe.trainer, count, reference=reference, adapters=adapters)
    _check_cluster(recipe.cluster, trainer_demands(recipe.trainer), terms, {})
    _check_layers(recipe)


def check_evaluate(resolved: Resolved[EvaluateRecipe]) -> None:
    """Raises ConfigError for the first thing that would stop `miles evaluate`."""
    recipe = resolved.config
    folder.check(recipe.run, resume=False)
    _check_model(recipe.model)
    _check_data("evaluate.data.paths", recipe.evaluate.data.paths)
    resolve(recipe.reward)
    _check_engine("rollout", recipe.rollout, recipe.model)
    _check_tracking(recipe.tracking)
    terms = footprint.engine_terms(recipe.model, recipe.rollout, footprint.parameters(Path(recipe.model.path)), sent=0)
    _check_cluster(recipe.cluster, engine_demands(recipe.rollout), terms, {})
    _check_decodable(recipe.rollout, recipe.model)


def _rewards(recipe: RLRecipe) -> list[str]:
    """Names of the reward functions, each imported. Only a distillation may do without any."""
    if recipe.distillation is not None and not recipe.reward.functions:
        return []
    return [function.label for function in resolve(recipe.reward)]


def _check_model(model: ModelConfig) -> None:
    _check_model_path("model.path", model.path)
    if model.tokenizer is not None:
        _check_folder_or_name("model.tokenizer", model.tokenizer)


def _model_type(model: ModelConfig) -> str | None:
    """Of a model in a folder."""
    file = Path(model.path) / "config.json"
    return str(json.loads(file.read_text(encoding="utf-8")).get("model_type")) if file.is_file() else None


def _check_model_path(key: str, value: str) -> None:
    _check_folder_or_name(key, value)
    if Path(value).is_dir() and not (Path(value) / "config.json").is_file():
        raise ConfigError(f"{key} = {value!r} has no config.json: it must be a Hugging Face model directory")


def _check_folder_or_name(key: str, value: str) -> None:
    """A folder, or what may be the name of a model on the hub."""
    if value and Path(value).is_dir():
        return
    looks_local = value.startswith((".", "/", "~")) or value.count("/") != 1 or Path(value).parent.is_dir()
    if looks_local or os.environ.get("HF_HUB_OFFLINE") == "1":
        cure = "write the folder out, '~' is not expanded" if value.startswith("~") else "name a Hugging Face model directory"
        raise ConfigError(f"{key} = {value!r} is no folder: {cure}")


def _check_data(key: str, paths: list[str]) -> None:
    if not paths:
        raise ConfigError(f'{key} is empty: name at least one JSONL or parquet file, for example {key}=["train.jsonl"]')
    for path in paths:
        file = Path(_SLICE.sub("", path))
        if not file.is_file():
            near = nearest(file.name, sorted(p.name for p in file.parent.iterdir())) if file.parent.is_dir() else f"; there is no folder {str(file.parent)!r}"
            raise ConfigError(f"{key}: {path!r} is no file{near if near != '; valid: ' else ''} (paths are relative to {os.getcwd()})")


def _check_engine(section: str, config: RolloutConfig | TeacherEngineConfig, model: ModelConfig) -> None:
    if config.engine != "sglang":
        return
    if importlib.util.find_spec("sglang") is None:
        raise ConfigError(f"{section}.engine = 'sglang', but SGLang is not installed: run `bash scripts/install --test`, or use {section}.engine=torch")
    if Path(model.path).is_dir():
        served = RolloutConfig(gpus_per_engine=config.gpus_per_engine, threads=config.threads, sglang_args=config.sglang_args)
        try:
            server_arguments(model, served, model_facts(model), 0)
        except ValueError as error:
            raise ConfigError(f"{section}.engine = 'sglang': {error}") from error


def _check_transport(weight_sync: WeightSyncConfig) -> None:
    if weight_sync.transport == "p2p" and importlib.util.find_spec("nixl_cu12") is None:
        raise ConfigError("weight_sync.transport = 'p2p', but NIXL is not installed: pip install nixl-cu12 (Linux), or use 'broadcast'")
    if weight_sync.store is None:
        return
    if weight_sync.transport != "delta":
        raise ConfigError(f"weight_sync.store = {weight_sync.store!r} with transport = {weight_sync.transport!r}, which has no store: use transport = 'delta'")
    try:
        WeightStore(weight_sync.store).numbers()
    except (WeightSyncError, OSError) as error:
        raise ConfigError(str(error)) from error


def _check_backend(recipe: RLRecipe | SFTRecipe | PreferenceRecipe | RewardModelRecipe) -> None:
    """What `trainer.balance_coef` and the backend need: `megatron`'s package, a model whose layers it has, and sizes that divide."""
    if recipe.trainer.balance_coef and (kind := _model_type(recipe.model)) not in (None, "qwen3_moe"):
        raise ConfigError(f"trainer.balance_coef = {recipe.trainer.balance_coef:g} is for qwen3_moe models, and model.path is a {kind}: set it to 0")
    if recipe.trainer.backend != "megatron":
        return
    if importlib.util.find_spec("megatron") is None:
        raise ConfigError("trainer.backend = 'megatron', but Megatron-Core is not installed: run `bash scripts/install --test`, or use trainer.backend=fsdp")
    taught = getattr(recipe, "distillation", None)
    for wanted, what in (
        (taught is not None and taught.divergence != "sampled", "a distill.divergence other than 'sampled'"),
        (recipe.model.true_on_policy, "model.true_on_policy"),
    ):
        if wanted:
            raise ConfigError(f"trainer.backend = 'megatron' does not go with {what}: use trainer.backend = 'fsdp'")
    for option, path in ({"model.path": recipe.model.path} | _others(recipe)).items():
        if not any(Path(path).glob("*.safetensors")):
            raise ConfigError(f"{option} = {path!r} has no safetensors file, which trainer.backend = 'megatron' reads")
        megatron_plan(recipe.model.model_copy(update={"path": path}), recipe.trainer, lora_of(recipe) if option == "model.path" else None)


def _check_layers(recipe: RLRecipe | SFTRecipe | PreferenceRecipe | RewardModelRecipe) -> None:
    """What trainer ranks and engines would find as they build models whose files are here. The last of all checks: it imports torch."""
    from trainer.fsdp import fits

    try:
        if recipe.trainer.backend == "fsdp" and Path(recipe.model.path).is_dir():
            fits.check(recipe.model, recipe.trainer, lora_of(recipe), reward_head=isinstance(recipe, RewardModelRecipe))
        for path in _others(recipe).values():
            if recipe.trainer.backend == "fsdp" and Path(path).is_dir():
                fits.check_layers(path, recipe.trainer, trust_remote_code=recipe.model.trust_remote_code)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if isinstance(recipe, RLRecipe):
        _check_decodable(recipe.rollout, recipe.model)


def _check_decodable(rollout: RolloutConfig, model: ModelConfig) -> None:
    """By the torch engine, for a model whose files are here."""
    if rollout.engine != "torch" or not Path(model.path).is_dir():
        return
    import torch

    from miles.core.model.decode import check_decodable
    from trainer.fsdp.loading import shell_of

    try:
        check_decodable(shell_of(model.path, getattr(torch, model.dtype), trust_remote_code=model.trust_remote_code))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _others(recipe: RLRecipe | SFTRecipe | PreferenceRecipe | RewardModelRecipe) -> dict[str, str]:
    """Paths, by option, of the models that the trainer's ranks have beside the policy's, where these are others."""
    found = {}
    taught, critic = getattr(recipe, "distillation", None), getattr(recipe, "critic", None)
    if taught is not None and taught.place == "trainer":
        found["distill.teacher"] = taught.teacher
    if critic is not None and critic.path:
        found["critic.path"] = critic.path
    return found


def _check_lora(recipe: RLRecipe | SFTRecipe | PreferenceRecipe | RewardModelRecipe) -> int | None:
    """Parameters of the recipe's adapters; None where it has no `[lora]`."""
    lora = lora_of(recipe)
    if lora is None:
        return None
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("[lora] needs peft, which is not installed: run `bash scripts/install`, or leave [lora] out")
    return footprint.adapter_parameters(Path(recipe.model.path), lora)


def _check_experts(recipe: RLRecipe, *, tenants: bool = False) -> None:
    """Who serves no adapters of experts. peft computes them by a cache of the process, which engines that share one would share too."""
    lora = recipe.served_lora
    if lora is None or not {"gate_up_proj", "down_proj"} & set(lora.targets) or _model_type(recipe.model) != "qwen3_moe":
        return
    if tenants or recipe.rollout.engine == "sglang":
        what = "[tenants]" if tenants else "rollout.engine = 'sglang'"
        cure = "leave gate_up_proj and down_proj out" + ("" if tenants else ", or use lora.served = 'merged' or the torch engine")
        raise ConfigError(f"lora.targets = {lora.targets} names experts of a mixture, which {what} does not go with: {cure}")


def megatron_plan(model: ModelConfig, trainer: TrainerConfig, lora: LoraConfig | None = None) -> list[str]:
    """`trainer.megatron.plan.describe` of a recipe. Raises ConfigError where model and layout do not fit."""
    from miles.core.model.load import load_config  # takes seconds, for this backend alone
    from trainer.megatron.architecture import architecture_of
    from trainer.megatron.names import adapters_of
    from trainer.megatron.plan import describe

    try:
        architecture = architecture_of(load_config(model.path, trust_remote_code=model.trust_remote_code))
        adapters = None if lora is None else adapters_of(architecture, lora)
        return list(describe(trainer, architecture, bfloat16=model.dtype == "bfloat16", adapters=adapters))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def fsdp_plan(model: ModelConfig, trainer: TrainerConfig, lora: LoraConfig | None) -> list[str]:
    """`trainer.fsdp.plan.describe` of a recipe; nothing for a model whose files are not here, or are no safetensors."""
    folder = Path(model.path)
    shapes = footprint.shapes(folder)
    if not shapes:
        return []
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    adapters = None if lora is None else footprint.adapter_parameters(folder, lora)
    return list(describe(trainer, shapes, described.get("text_config", described), bfloat16=model.dtype == "bfloat16", adapters=adapters))


def _check_tracking(tracking: TrackingConfig) -> None:
    if tracking.wandb == "online" and not has_key():
        raise ConfigError("tracking.wandb = 'online', but there is no key: set WANDB_API_KEY or run `wandb login`; or use tracking.wandb=offline")


def _check_cluster(cluster: ClusterConfig, demands: Sequence[Demand], terms: dict[str, int], shared: dict[str, int]) -> None:
    """A cluster that is joined has its own resources, which are checked once it answers; one started here has this machine's."""
    _check_ray_address(cluster)
    if machine.ray_address(cluster.address) is not None:
        return
    cpus, have = total(demands, "CPU"), cluster.cpus or max(2, os.cpu_count() or 1)
    if cpus > have:
        raise ConfigError(
            f"the run needs {sum_text(demands)} = {cpus:g} CPUs, but a cluster started here shares out {have} (the machine has {machine.cores()} cores). "
            f"Ask for less, or let them share cores with cluster.cpus={cpus:g}"
        )
    gpus = total(demands, "GPU")
    if gpus and gpus > machine.gpus():
        raise ConfigError(
            f"the run needs {sum_text(demands, 'GPU')} = {gpus:g} GPUs, but this machine shows {machine.gpus()} to torch (CUDA_VISIBLE_DEVICES can hide "
            "some). Ask for less (trainer.gpus_per_rank, rollout.gpus_per_engine, teacher_engine.gpus_per_engine; 0 runs on CPU), or join a cluster that "
            "has them by cluster.address"
        )
    shared = {"cluster.object_store_mb": cluster.object_store_mb} | shared
    _check_shared_memory(shared)
    _check_memory(terms | {"Ray": footprint.RAY_MIB} | shared)


def _check_ray_address(cluster: ClusterConfig) -> None:
    address = machine.ray_address(cluster.address)
    if address in (None, "auto") or machine.answers(address):
        return
    if cluster.address is None:
        raise ConfigError(f"RAY_ADDRESS = {address!r}, but nothing answers there: `unset RAY_ADDRESS`, start that cluster, or use cluster.address=local")
    raise ConfigError(f"cluster.address = {address!r}, but nothing answers there: start it with `ray start --head`, or use cluster.address=local")


def _check_shared_memory(terms: dict[str, int]) -> None:
    need, free = sum(terms.values()), machine.free_shared_memory()
    if free is not None and need * MIB > free:
        raise ConfigError(
            f"/dev/shm has {free // MIB} MiB free, but the run needs {need} MiB: {_terms_text(terms)}. Give it more (a container: --shm-size=1g), lower "
            "cluster.object_store_mb (at least 80), or move weights by weight_sync.transport=broadcast, which with torch engines needs no room there"
        )


def _check_memory(terms: dict[str, int]) -> None:
    need, free = sum(terms.values()), machine.free_memory() // MIB
    if need > free:
        raise ConfigError(
            f"the run needs about {need} MiB of memory, but {free} MiB are free: {_terms_text(terms)}. Use fewer ranks or engines, "
            "a smaller model or batch, or a lower run.max_staleness"
        )


def _terms_text(terms: dict[str, int]) -> str:
    return " + ".join(f"{reason} = {mib}" for reason, mib in terms.items())
