"""Batches, backends and an oracle for the trainer's tests. The oracle uses plain transformers on one sequence at a time."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from algorithms.config import AlgorithmConfig
from algorithms.distillation.config import DistillConfig
from algorithms.preference.config import PairConfig
from miles.core.model.config import LoraConfig, ModelConfig
from miles.core.model.tiny import make_tiny_model
from miles.data.types import Group, Prompt, Sample, Status
from trainer.actor import backend_class
from trainer.config import CriticConfig, TrainerConfig
from trainer.fsdp.backend import FSDPBackend
from trainer.fsdp.optimizer import Optimizer

VOCABULARY = 50


def small_model(folder: Path) -> Path:
    """Two layers over a vocabulary of VOCABULARY tokens, under `folder`."""
    alphabet = "".join(chr(0x100 + i) for i in range(VOCABULARY - 9))
    return make_tiny_model(folder / "model", alphabet=alphabet, hidden=16, heads=2, kv_heads=1, context=128)


def single_rank() -> Iterator[None]:
    """Body of a fixture: this process is the one rank of the tests on one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    restore_norm()


def make_sample(group: int, index: int, prompt: int, response: int, *, reward: float | None = None, masked: Sequence[int] = (), seed: int = 0) -> Sample:
    """Random tokens; places of the response in `masked` are not trained and have NaN as the engine's log-prob."""
    random = np.random.default_rng([seed, group, index])
    mask = np.ones(response, np.bool_)
    mask[list(masked)] = False
    logprobs = random.uniform(-5.0, -3.0, response).astype(np.float32)
    logprobs[~mask] = np.nan
    return Sample(
        sample_id=f"{group}/{index}",
        group_id=str(group),
        tokens=random.integers(0, VOCABULARY, prompt + response),
        prompt_length=prompt,
        loss_mask=mask,
        logprobs=logprobs,
        weight_versions=np.where(mask, 0, -1),
        status=Status.COMPLETED,
        reward=reward,
    )


def make_group(claim: int, samples: Sequence[Sample]) -> Group:
    return Group(claim_id=claim, prompt=Prompt(prompt_id=claim, tokens=samples[0].tokens[:1], text="", columns={}), samples=tuple(samples))


def mixed_groups() -> list[Group]:
    """Four groups of three: uneven lengths, a one-token answer, masked tool tokens with NaN, an all-masked sample, equal rewards."""
    shapes = [
        [(3, 9, 1.0, ()), (3, 1, 0.0, ()), (3, 14, 0.5, (2, 3, 4))],
        [(5, 7, 0.0, ()), (5, 4, 1.0, (0, 1, 2, 3)), (5, 11, 1.0, ())],
        [(2, 6, 1.0, ()), (2, 5, 1.0, ()), (2, 8, 1.0, ())],
        [(8, 3, 0.25, (1,)), (8, 12, 0.75, ()), (8, 2, 0.0, ())],
    ]
    return [make_group(g, [make_sample(g, i, p, r, reward=reward, masked=m) for i, (p, r, reward, m) in enumerate(rows)]) for g, rows in enumerate(shapes)]


def sharing_groups() -> list[Group]:
    """`mixed_groups`, each with one prompt; two answers of the third are equal, and one goes on where another ends."""
    groups = []
    for group in mixed_groups():
        first = group.samples[0]
        opening = first.tokens[: first.prompt_length]
        groups.append(make_group(group.claim_id, [replace(s, tokens=np.concatenate([opening, s.response_tokens])) for s in group.samples]))
    a, b, c = groups[2].samples
    b, c = (replace(s, tokens=np.concatenate([a.tokens, s.response_tokens])[: len(s.tokens)]) for s in (b, c))
    return [groups[0], groups[1], make_group(2, [a, b, c]), groups[3]]


def share_prompts(backend: FSDPBackend) -> FSDPBackend:
    """Share whatever can be, also where the planner would say that it is not worth it."""
    assert backend._sharing is not None
    backend._sharing.thresholds = (1,)
    return backend


def make_backend(
    path: Path,
    *,
    rank: int = 0,
    world: int = 1,
    model: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    algorithm: dict[str, Any] | None = None,
    distill: dict[str, Any] | None = None,
    temperature: float = 1.0,
    total_steps: int = 10,
    dtype: torch.dtype = torch.float64,
    pairs: PairConfig | None = None,
    critic: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    prefix_overlap: bool = False,
    base: Any = None,
) -> Any:
    """A backend, FSDP2's unless `trainer` names another, that never clips, in float64 unless told otherwise."""
    if dtype == torch.float64:
        # transformers computes norms in float32, a floor of 1e-7 that would hide what these tests look for.
        _PATCHED.forward = _exact_norm
    else:
        _PATCHED.forward = _NORM
    config = TrainerConfig(**({"lr": 1e-3, "clip_norm": float("inf"), "ranks": world} | (trainer or {})))
    return backend_class(config)(
        ModelConfig(path=str(path), **(model or {})),
        config,
        AlgorithmConfig(**(algorithm or {})),
        temperature=temperature,
        max_new_tokens=16,
        seed=0,
        total_steps=total_steps,
        rank=rank,
        world=world,
        master_dtype=dtype,
        pairs=pairs,
        distill=DistillConfig(**distill) if distill else None,
        critic=None if critic is None else CriticConfig(**({"lr": 1e-3, "clip_norm": float("inf")} | critic)),
        lora=None if lora is None else LoraConfig(**lora),
        **({"prefix_overlap": True} if prefix_overlap else {}),
        **({} if base is None else {"base": base}),
    )


def gradients(backend: FSDPBackend) -> dict[str, NDArray[np.float64]]:
    """The policy's gradient of the first optimizer step."""
    return gradients_of(backend._optimizer)


def gradients_of(optimizer: Optimizer) -> dict[str, NDArray[np.float64]]:
    """The gradient of the first optimizer step, read off AdamW's first moment: m = (1 - beta1) g."""
    found = {}
    for name, tensor in optimizer.tensors().items():
        if name.endswith(".exp_avg"):
            full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            found[name.removeprefix("optimizer.").removesuffix(".exp_avg")] = full.double().numpy().copy() / (1 - 0.9)
    return found


def weights(backend: FSDPBackend) -> dict[str, NDArray[Any]]:
    return {name: tensor.clone().numpy() for name, tensor in backend.weight_tensors([s.name for s in backend.weight_specs()])}


def slices(backend: Any) -> list[tuple[str, tuple[tuple[int, int], ...], NDArray[Any]]]:
    """This rank's own of the export: name, ranges, elements."""
    return [(one.name, one.ranges, backend.weight_slice(one).clone().numpy()) for one in backend.weight_slices()]


def assembled(of_ranks: list[list[tuple[str, tuple[tuple[int, int], ...], NDArray[Any]]]]) -> dict[str, NDArray[Any]]:
    """Tensors from all ranks' slices, NaN where none has an element. Copies must be equal, bit for bit."""
    found: dict[str, NDArray[Any]] = {}
    every = [one for of_rank in of_ranks for one in of_rank]
    for name in {name for name, _, _ in every}:
        mine = [(ranges, array) for other, ranges, array in every if other == name]
        shape = [max(ranges[d][1] for ranges, _ in mine) for d in range(len(mine[0][0]))]
        full = found[name] = np.full(shape, np.nan, mine[0][1].dtype)
        for ranges, array in mine:
            place = full[tuple(slice(*r) for r in ranges)]
            assert np.isnan(place).all() or np.array_equal(place, array), name
            place[...] = array
    return found


def plain_model(path: Path, dtype: torch.dtype = torch.float64) -> Any:
    """The oracle's model: transformers' own attention (eager would compute its softmax in float32), one unpadded sequence at a time."""
    _PATCHED.forward = _exact_norm if dtype == torch.float64 else _NORM
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa", experts_implementation="eager").eval()


def plain_logprobs(model: Any, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs [R] of the response, from the whole logits of this sequence alone."""
    tokens = torch.from_numpy(sample.tokens)
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].to(model.dtype) / temperature
    return torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[sample.prompt_length - 1 :, 0]


def clipped_losses(model: Any, groups: Sequence[Group], clip_low: float = 0.2, clip_high: float = 0.28) -> Iterator[tuple[Sample, Tensor, Tensor, Tensor]]:
    """GRPO's clipped loss, written out sample by sample: the sample, its trained tokens' log-probs and ratios, and the sum of their losses."""
    for group in groups:
        rewards = np.array([s.reward for s in group.samples], np.float64)
        spread = rewards.std(ddof=1)
        for sample, reward in zip(group.samples, rewards, strict=True):
            advantage = 0.0 if spread == 0 else float((reward - rewards.mean()) / spread)
            mask = torch.from_numpy(sample.loss_mask)
            new = plain_logprobs(model, sample)[mask]
            ratio = (new - torch.from_numpy(sample.logprobs).double()[mask]).exp()
            yield sample, new, ratio, -torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage).sum()


def plain_gradients(
    path: Path, groups: Sequence[Group], *, clip_low: float = 0.2, clip_high: float = 0.28, per_expert: bool = False
) -> dict[str, NDArray[np.float64]]:
    """Gradient of GRPO's clipped token-mean loss, sample by sample; `per_expert`: under the names of a checkpoint."""
    model = plain_model(path)
    tokens = sum(int(s.loss_mask.sum()) for g in groups for s in g.samples)
    for *_, loss in clipped_losses(model, groups, clip_low, clip_high):
        (loss / tokens).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    return {name: grad.numpy() for name, grad in (revert_weight_conversion(model, found) if per_expert else found).items()}


def relative_difference(found: dict[str, NDArray[Any]], expected: dict[str, NDArray[Any]]) -> float:
    """The largest difference of any entry, over the largest entry of its tensor; where that is all zeros, the difference itself."""
    assert found.keys() == expected.keys()
    return max(float(np.abs(found[n] - expected[n]).max() / (np.abs(expected[n]).max() or 1.0)) for n in expected)


def environment_of(backend: Any, rank: int) -> tuple[int, str, str, int, bool]:
    return rank, os.environ["OMP_WAIT_POLICY"], os.environ["OMP_NUM_THREADS"], torch.get_num_threads(), keeps_freed_memory()


def keeps_freed_memory() -> bool:
    """Whether a large tensor lies in the process's heap, which the next one reuses, and not in a mapping of its own."""
    address = torch.empty(2**26, dtype=torch.uint8).data_ptr()
    heap = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[heap]")]
    return any(int(start, 16) <= address < int(end, 16) for start, end in heap)


def raise_on_rank_1(backend: Any, rank: int) -> float:
    if rank == 1:
        return 1 / 0
    return sum(float(np.sum(t.numpy())) for _, t in backend.weight_tensors([s.name for s in backend.weight_specs()]))


def kill_rank_1(backend: Any, rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    list(backend.weight_tensors([s.name for s in backend.weight_specs()]))


def restore_norm() -> None:
    """Undo what `make_backend` and `plain_model` do to transformers in float64: other tests in this process compare bits."""
    _PATCHED.forward = _NORM


def _exact_norm(self: Qwen3RMSNorm, hidden: torch.Tensor) -> torch.Tensor:
    return self.weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


_PATCHED: Any = Qwen3RMSNorm
_NORM = Qwen3RMSNorm.forward
