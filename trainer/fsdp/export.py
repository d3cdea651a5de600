"""What leaves the trainer: full tensors under their checkpoint names, one at a time, and whole Hugging Face directories."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from miles.core.model.config import ModelConfig
from miles.core.model.load import load_config, tokenizer_of
from miles.core.model.reward import on_disk, reward_shell
from weight_sync.contracts import TensorSpec


class Exporter:
    """The names a checkpoint gives to a model's tensors, and the tensors themselves, full and in `dtype`. `rewards`: it is a reward model."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, rank: int, rewards: bool = False):
        self._model, self._dtype, self._rank, self._rewards = model, dtype, rank, rewards
        self._own = _own(model)
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
                full = _full(self._own[own])
                held, parts = own, self._converted(own, full.to(self._dtype)) if self._rank == 0 else {}
            yield name, parts[name] if self._rank == 0 else torch.empty(0, dtype=self._dtype)

    def write(self, config: ModelConfig, folder: Path) -> None:
        """A directory that transformers and SGLang load: weights, config and tokenizer. It appears whole. Collective."""
        state = {}
        for own, tensor in self._own.items():
            full = _full(tensor)
            if self._rank == 0:
                state[own] = full.to("cpu", self._dtype)
        if self._rank == 0:
            self._write(config, folder, state)

    def _write(self, config: ModelConfig, folder: Path, state: dict[str, Tensor]) -> None:
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        model_config = load_config(config.path, trust_remote_code=config.trust_remote_code)
        model_config.dtype = self._dtype
        # A fresh shell: FSDP2 changes the class of the model it wraps, and its name would be written as the architecture.
        if self._rewards:
            shell, state = reward_shell(model_config, trust_remote_code=config.trust_remote_code), on_disk(self._model, state)
        else:
            with torch.device("meta"):
                shell = AutoModelForCausalLM.from_config(model_config, trust_remote_code=config.trust_remote_code)
            shell.generation_config = self._model.generation_config
        shell.save_pretrained(partial, state_dict=state)
        tokenizer_of(config).save_pretrained(partial)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(partial, folder)

    def _converted(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """One tensor in memory -> the tensors a checkpoint has for it (a fused expert weight is many)."""
        return revert_weight_conversion(self._model, {name: tensor})


def _own(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters and persistent buffers under the names they have in memory, tied ones once."""
    seen: set[int] = set()
    own = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            own[name] = tensor
    return own


def _full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
