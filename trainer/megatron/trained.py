"""Models on this rank: read from a Hugging Face directory, and frozen, or with Megatron-Core's data parallelism and optimizer around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import Tensor
from transformers import PretrainedConfig

from miles.core.model.config import LoraConfig
from miles.core.model.reward import reward_head
from trainer.config import OptimizerConfig
from trainer.megatron.architecture import Architecture
from trainer.megatron.directory import Source
from trainer.megatron.lora import Base, add_adapters
from trainer.megatron.mesh import Mesh
from trainer.megatron.model import Chunk, Config, LatentConfig, build_chunks, transformer_config
from trainer.megatron.names import parts, shapes
from trainer.megatron.optimizer import Optimizer
from trainer.megatron.policy import Model, Rewards, Values
from trainer.rows.meters import Meters
from trainer.rows.row import Row, RowLoss
from trainer.rows.schedule import Update


@dataclass(frozen=True, kw_only=True)
class Builder:
    """Makes models of one directory.

    Attributes:
        master, compute: dtypes of what the optimizer steps and of what computes.
        recompute: of activations, in what is trained. log_chunk: tokens whose logits exist at once.
        reward_seed: of a reward model, its head is drawn from that; the architecture then has `values`.
    """

    path: str
    hf_config: PretrainedConfig
    architecture: Architecture
    mesh: Mesh
    device: torch.device
    master: torch.dtype
    compute: torch.dtype
    recompute: bool
    log_chunk: int
    reward_seed: int | None = None

    def frozen(self) -> Model:
        config = self._config(recompute=False)
        return self._model([chunk.requires_grad_(False) for chunk in self._load(config)[0]])

    def trained(self, optimizer: OptimizerConfig, total_steps: int, lora: LoraConfig | None = None, seed: int = 0) -> Trained:
        """With `lora` its adapters are all that learns; `seed` draws them."""
        config = self._config(recompute=self.recompute)
        chunks, masters = self._load(config)
        adapters: list[dict[str, Tensor]] | None = None
        if lora is not None:
            adapters = add_adapters(chunks, self.architecture, lora, self.mesh, seed, self.master)
            masters = [{_in_module(name): tensor.detach().clone() for name, tensor in own.items()} for own in adapters] if masters else []
            for tensor in (tensor for own in adapters for tensor in own.values()):
                tensor.data = tensor.data.to(self.compute)
        options = DistributedDataParallelConfig(grad_reduce_in_fp32=self.compute == torch.bfloat16, use_distributed_optimizer=True)
        wrapped = [DistributedDataParallel(config, options, chunk, disable_bucketing=number > 0) for number, chunk in enumerate(chunks)]
        # Losses are shares of a global mean: what Megatron-Core counted must not divide them again.
        config.finalize_model_grads_func = lambda chunks, _, **options: finalize_model_grads(chunks, None, **options)
        return Trained(wrapped, self._model(wrapped), Optimizer(wrapped, optimizer, total_steps, self.mesh, masters), adapters)

    def base(self, trained: Trained) -> Model:
        """What `trained` is without its adapters."""
        return Base(trained.chunks, self.mesh, self.architecture.vocabulary, self.log_chunk)

    def _config(self, *, recompute: bool) -> Config | LatentConfig:
        return transformer_config(self.architecture, self.mesh, dtype=self.master, compute_dtype=self.compute, recompute=recompute)

    def _model(self, chunks: Sequence[torch.nn.Module]) -> Model:
        kind = Model if not self.architecture.values else Values if self.reward_seed is None else Rewards
        return kind(chunks, self.mesh, self.architecture.vocabulary, self.log_chunk)

    def _load(self, config: Config | LatentConfig) -> tuple[list[Chunk], list[dict[str, Tensor]]]:
        """Chunks in the dtype of compute; where that is narrower than the masters', also these."""
        source = Source(self.path, shapes(self.architecture))
        chunks = build_chunks(config, self.architecture, self.hf_config, self.mesh, self.device)
        masters = []
        for chunk, wanted in zip(chunks, parts(self.architecture, self.mesh.layout, self.mesh.rank), strict=True):
            values = {name: source.read(part, self.master) for name, part in wanted.items()}
            if self.reward_seed is not None and chunk.post_process:
                values["output_layer.weight"] = reward_head(self.architecture.hidden, self.reward_seed).to(self.master)
            with torch.no_grad():
                for name, parameter in chunk.named_parameters():
                    parameter.copy_(values[name])
            if self.compute != self.master:
                chunk.to(self.compute)
                masters.append(values)
            for name, tensor in chunk.tensors().items():
                if wanted[name].buffer:
                    tensor.data = values[name].to(tensor.device, torch.float32)
        return chunks, masters


@dataclass(frozen=True)
class Trained:
    """A model that learns. `chunks`: this rank's pieces; `adapters`: by the names that `names` has, where these alone learn."""

    chunks: list[DistributedDataParallel]
    model: Model
    optimizer: Optimizer
    adapters: list[dict[str, Tensor]] | None = None

    def update(
        self,
        rows: Sequence[Row],
        total: int,
        temperature: float,
        loss: RowLoss,
        meters: Meters,
        *,
        entropy: bool = False,
        entropy_gradient: bool = False,
        name: str = "loss/total",
    ) -> Update:
        """One optimizer step: losses of the rows are shares of a mean over `total` tokens or pairs, so their gradients simply add up. Collective."""
        if total == 0:
            return self.optimizer.skip()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.model.train(rows, temperature, loss, meters, total, entropy=entropy, entropy_gradient=entropy_gradient, name=name)
        return self.optimizer.step()


def _in_module(name: str) -> str:
    """An adapter's name as `named_parameters` has it."""
    return name.replace(".adapter.", ".adapter._pairs.")
