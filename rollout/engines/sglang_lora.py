"""Adapters served by SGLang, and updated in place as its weights are: one adapter that every request names.

The server starts with an adapter of zeros, which changes nothing. An update loads all of a new one into the place of the old, between two of
the scheduler's steps, so pauses, versions, the retained copy and going back to it are those of `sglang_weights.py`; only the adapters' bytes
move. SGLang would also take adapters by name, one after the other, but requests that run across an update would keep the old one.
"""

from __future__ import annotations

import functools
import gc
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from miles.core.model.config import LoraConfig, ModelConfig
from rollout.engines.sglang_loader import parse
from rollout.engines.sglang_weights import SGLangWeights
from weight_sync.contracts import Bucket, SharedMemory, TensorSpec
from weight_sync.layout import nbytes

if TYPE_CHECKING:
    from rollout.engines.sglang_args import ModelFacts
    from rollout.engines.sglang_server import SGLangServer

ADAPTER = "policy"
LOADER = "rollout.engines.sglang_lora.load_files"


def adapter_specs(model: ModelConfig, lora: LoraConfig) -> dict[str, TensorSpec]:
    """The adapters' tensors under the names of peft's files; no weight is read."""
    from transformers import AutoModelForCausalLM

    from miles.core.model.load import load_config
    from miles.core.model.lora import adapter_tensors, add_adapters

    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(load_config(model.path, trust_remote_code=model.trust_remote_code), trust_remote_code=model.trust_remote_code)
        add_adapters(shell, lora, seed=0)
    return {name: TensorSpec(name, tuple(tensor.shape), model.dtype) for name, tensor in adapter_tensors(shell).items()}


def adapter_arguments(lora: LoraConfig, specs: dict[str, TensorSpec], on_cpu: bool) -> dict[str, Any]:
    """SGLang's ServerArgs for one adapter of these sizes; on a CPU there is one backend that needs no GPU kernels."""
    own = {
        "custom_weight_loader": [LOADER],
        "enable_lora": True,
        "max_loras_per_batch": 1,
        "max_loaded_loras": 1,
        "max_lora_rank": lora.rank,
        "lora_target_modules": targets(specs),
    }
    return own | ({"lora_backend": "torch_native"} if on_cpu else {})


def targets(specs: dict[str, TensorSpec]) -> list[str]:
    """The last parts of the names of the layers that have adapters, sorted."""
    return sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in specs})


def write_zeros(folder: Path, lora: LoraConfig, specs: dict[str, TensorSpec]) -> str:
    """An adapter's directory that SGLang loads, all zeros; as an entry of its `lora_paths`."""
    from safetensors.torch import save_file

    folder.mkdir()
    save_file({spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs.values()}, folder / "adapter_model.safetensors")
    # SGLang scales by alpha / r and knows no rsLoRA.
    described = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.scaling * lora.rank, "target_modules": targets(specs), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(described), encoding="utf-8")
    return f"{ADAPTER}={folder}"


class SGLangAdapters(SGLangWeights):
    """As `SGLangWeights`, of the adapters. SGLang lays several of its tensors end to end, so all of them are loaded together, when all are there.

    The base is not part of any update: it is what the model directory has.
    """

    def __init__(self, server: SGLangServer, facts: ModelFacts, dtype: str, ranks: int, version: int, specs: dict[str, TensorSpec]) -> None:
        super().__init__(server, facts, dtype, ranks, version)
        self._specs = specs
        self._loader = LOADER

    def reload(self) -> None:
        """Load the retained adapters into the server, or the zeros of the beginning."""
        self._begin_session()
        self._load_all(self._retained or [self._zeros()])
        self._end_session()

    def restore(self) -> None:
        self.reload_base()
        self.reload()

    def _load(self, bucket: Bucket, file: SharedMemory) -> None:
        """Not before all are there."""

    def _complete(self) -> None:
        self._load_all(self._incoming)

    def _check_served(self, tensors: dict[str, torch.Tensor]) -> None:
        """SGLang's checksums are of its base alone."""

    def _zeros(self) -> tuple[Bucket, SharedMemory]:
        assert self._specs is not None
        bucket = Bucket(0, tuple(self._specs.values()))
        path = self._folder() / "zeros"
        path.write_bytes(bytes(nbytes(bucket)))
        return bucket, SharedMemory(str(path), path.stat().st_size)


def load_files(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Inside the server: the adapter of all files that the names describe takes the place of the one that is served."""
    from sglang.srt.lora.lora import LoRAAdapter

    from weight_sync.transports.shared_memory import read_bucket

    manager = _manager_of(model)
    (uid,) = (ref.lora_id for ref in manager.lora_refs.values() if ref.lora_name == ADAPTER)
    adapter = LoRAAdapter(uid, manager.configs[uid], manager.base_hf_config, manager.load_config, manager.lora_backend, base_model=model)
    tensors = {name: tensor.clone() for description, _ in named_tensors for name, tensor in read_bucket(*parse(json.loads(description))).items()}
    adapter.initialize_weights_from_tensors(tensors)
    manager.loras[uid] = adapter
    place = manager.memory_pool.uid_to_buffer_id.get(uid)
    if place is not None:  # else it is copied there when the next request comes
        manager.memory_pool.load_lora_weight_to_buffer(uid, place, adapter, manager.lora_modules, manager.embed_tokens_module, manager.lm_head_module)


@functools.cache
def _manager_of(model: Any) -> Any:
    """SGLang gives a loader the model alone, and nothing of the model leads to what holds its adapters. So all objects are looked through, once;
    those of the start are frozen, where the collector does not list them."""
    from sglang.srt.lora.lora_manager import LoRAManager

    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    (manager,) = (found for found in gc.get_objects() if isinstance(found, LoRAManager) and found.base_model is model)
    if frozen:
        gc.freeze()
    return manager
