"""What leaves the trainer: full tensors under their checkpoint names, one at a time, and whole Hugging Face directories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from miles.core.checkpoint.whole import whole
from miles.core.model.config import LoraConfig, ModelConfig
from miles.core.model.load import load_config, tokenizer_of
from miles.core.model.lora import adapted_experts, adapter_tensors, adapters_of, base_name, merged, write_adapter
from miles.core.model.reward import on_disk, reward_shell
from miles.core.model.sharded import gathered
from trainer.fsdp.home import SharedParameters
from trainer.fsdp.slices import RankSlices, checkpoint_blocks, planned
from weight_sync.contracts import TensorSpec
from weight_sync.slices import Block, Slice, full


class _InSlices:
    """An export by the slices that ranks hold of it."""

    _own: dict[str, Tensor]
    _dtype: torch.dtype

    @cached_property
    def _blocks(self) -> dict[str, list[Block]]:
        """Which tensors of the checkpoint each of ours has, and where: itself, unless a model says otherwise."""
        return {name: [Block(name, full(tensor.shape), full(tensor.shape))] for name, tensor in self._own.items()}

    @cached_property
    def mine(self) -> RankSlices:
        """This rank's part of it, no adapters merged. Raises ValueError as `checkpoint_blocks`."""
        return RankSlices(self._own, self._blocks, self._dtype)

    def planned(self, world: int, rank: int) -> list[Slice]:
        """As `slices.planned`, of a model that is not yet sharded. Raises ValueError as `checkpoint_blocks`."""
        return planned(self._own, self._blocks, world, rank)

    def shared(self, model: PreTrainedModel) -> SharedParameters:
        """Raises ValueError as `checkpoint_blocks`."""
        return SharedParameters(model, self._own, self._blocks)

    def places(self) -> dict[str, tuple[str, Block]]:
        """Where each tensor of the export lies in memory: in which tensor, and where in it."""
        return {block.name: (own, block) for own, blocks in self._blocks.items() for block in blocks}


class Exporter(_InSlices):
    """The names a checkpoint gives to a model's tensors, and the tensors themselves, full and in `dtype`, adapters merged into them.

    Args:
        rewards: it is a reward model. lora: of the adapters, where it has such.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, rank: int, rewards: bool = False, lora: LoraConfig | None = None):
        self._model, self._dtype, self._rank, self._rewards = model, dtype, rank, rewards
        self._own = _own(model)
        self._adapters = adapters_of(adapter_tensors(model), adapted_experts(model))
        self._scaling = 1.0 if lora is None else lora.scaling
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._source: dict[str, str] = {}
        for own, tensor in self._own.items():
            for name, part in self._converted(own, torch.empty(tensor.shape, device="meta")).items():
                self._shapes[name], self._source[name] = tuple(part.shape), own

    def specs(self) -> list[TensorSpec]:
        """Everything that `tensors` can give. Tied tensors come once, as in a checkpoint."""
        return [TensorSpec(name, shape, str(self._dtype).removeprefix("torch.")) for name, shape in self._shapes.items()]

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Full tensors in the order of `names`; on ranks other than 0 they are empty. Collective: every rank takes every step.

        On one rank in the masters' own dtype a tensor is the parameter itself: copy it before the next training step.
        """
        held, parts = "", dict[str, Tensor]()
        for name in names:
            own = self._source[name]
            if own != held:
                # One parameter may be several tensors of a checkpoint (fused experts): gather it once.
                full = self._whole(own)
                held, parts = own, self._converted(own, full.to(self._dtype)) if self._rank == 0 else {}
            yield name, parts[name] if self._rank == 0 else torch.empty(0, dtype=self._dtype)

    @cached_property
    def _blocks(self) -> dict[str, list[Block]]:
        return {own: checkpoint_blocks(self._model, own, tuple(tensor.shape)) for own, tensor in self._own.items()}

    def write(self, config: ModelConfig, folder: Path) -> None:
        """A directory that transformers and SGLang load: weights, config and tokenizer. It appears whole. Collective."""
        state = {}
        for own in self._own:
            full = self._whole(own)
            if self._rank == 0:
                state[own] = full.to("cpu", self._dtype)
        if self._rank == 0:
            self._write(config, folder, state)

    def _write(self, config: ModelConfig, folder: Path, state: dict[str, Tensor]) -> None:
        model_config = load_config(config.path, trust_remote_code=config.trust_remote_code)
        model_config.dtype = self._dtype
        # A fresh shell: FSDP2 changes the class of the model it wraps, and its name would be written as the architecture.
        if self._rewards:
            shell, state = reward_shell(model_config, trust_remote_code=config.trust_remote_code), on_disk(self._model, state)
        else:
            with torch.device("meta"):
                shell = AutoModelForCausalLM.from_config(model_config, trust_remote_code=config.trust_remote_code)
            shell.generation_config = self._model.generation_config
        with whole(folder) as partial:
            shell.save_pretrained(partial, state_dict=state)
            tokenizer_of(config).save_pretrained(partial)

    def _whole(self, own: str) -> Tensor:
        """One tensor, gathered, its adapter merged into it. Collective; off rank 0 it may lack the adapter, since nobody reads it there."""
        full = gathered(self._own[own])
        parts = {part: gathered(tensor) for part, tensor in self._adapters.get(own, {}).items()}
        return merged(full, parts, self._scaling) if parts and self._rank == 0 else full

    def _converted(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """One tensor in memory -> the tensors a checkpoint has for it (a fused expert weight is many)."""
        return revert_weight_conversion(self._model, {name: tensor})


class AdapterExporter(_InSlices):
    """The adapters of a model under the names of peft's files, full and in `dtype`: all that an update of the engines carries."""

    def __init__(self, model: PreTrainedModel, lora: LoraConfig, dtype: torch.dtype, rank: int):
        self._model, self._lora, self._dtype, self._rank = model, lora, dtype, rank
        self._own = dict[str, Tensor](adapter_tensors(model))

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(name, tuple(tensor.shape), str(self._dtype).removeprefix("torch.")) for name, tensor in self._own.items()]

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """As `Exporter.tensors`. Collective."""
        for name in names:
            full = gathered(self._own[name])
            yield name, full.to(self._dtype) if self._rank == 0 else torch.empty(0, dtype=self._dtype)

    def write(self, config: ModelConfig, folder: Path) -> None:
        """A directory that peft and SGLang load beside `config.path`. It appears whole. Collective."""
        state = {name: tensor.to("cpu") for name, tensor in self.tensors(list(self._own))}
        if self._rank == 0:
            weights = adapters_of(self._own, adapted_experts(self._model))
            targets = sorted({weight.split(".")[-2] for weight in weights if weight.endswith(".weight")})
            experts = sorted({".".join(weight.split(".")[-2:]) for weight in weights if not weight.endswith(".weight")})
            with whole(folder) as partial:
                write_adapter(partial, state, self._lora, targets, config.path, experts)


def _own(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters and persistent buffers under the names they have in memory without adapters, tied ones once; adapters are left out."""
    seen: set[int] = set()
    own = {}
    for in_memory, tensor in model.state_dict(keep_vars=True).items():
        name = base_name(in_memory)
        if name is not None and id(tensor) not in seen:
            seen.add(id(tensor))
            own[name] = tensor
    return own
