"""Batches that share tokens in every way, models in float64, and what packed rows make of them: the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, Qwen3MoeTopKRouter

from miles.core.model.fused_layer import fuse_layers
from miles.core.model.fused_loss import even_parts
from miles.core.model.packed import packed_logprobs
from miles.core.planning.hardware import CPU_CORE
from miles.core.planning.plan import Plan
from miles.core.planning.workload import workload_of
from tests.core.model.architectures import VOCABULARY, pack, random_model
from tests.trainer_cases import _exact_norm
from trainer.split_forward.activations import Activations
from trainer.split_forward.executor import Executor, Split
from trainer.split_forward.planner import Batch, plan

TEMPERATURE, CHUNK = 0.7, 13
Tokens = NDArray[np.int64]
Case = tuple[list[Tokens], list[int]]
"""Tokens and prompt length of each sample."""


def group(prompt: int, responses: Sequence[int], seed: int = 0) -> Case:
    """One prompt of so many tokens with answers of such lengths."""
    random = np.random.default_rng([seed, prompt, *responses])
    opening = random.integers(0, VOCABULARY, prompt)
    return [np.concatenate([opening, random.integers(0, VOCABULARY, n)]) for n in responses], [prompt] * len(responses)


def every_kind() -> Case:
    """Prompts of different length, one of a single token, an empty response, one sample alone, equal samples, a sample that goes on where
    another ends, and answers that part in the middle."""
    tokens, prompts = [], []
    for number, (prompt, responses) in enumerate([(9, [3, 5, 0, 1]), (1, [2, 2]), (12, [7]), (5, [4, 4, 4])]):
        more, lengths = group(prompt, responses, seed=number)
        tokens += more
        prompts += lengths
    first = tokens[0]
    return [*tokens, first.copy(), np.concatenate([first, [3, 4, 5]]), np.concatenate([first[:-1], [7, 7]])], [*prompts, 9, 9, 9]


def model(kind: str = "qwen3", *, checkpointed: bool = False, fused: bool = False, **changes: Any) -> PreTrainedModel:
    """Small, random, float64 throughout: transformers' own float32 (norms, router) is lifted by `exact`."""
    if kind == "qwen3_moe":
        sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
        made = random_model(kind, dtype=torch.float64, **(sizes | changes))
        made.config._experts_implementation = "eager"  # the default one has no float64
    else:
        made = random_model(kind, dtype=torch.float64, **changes)
    if fused:
        assert fuse_layers(made) == 2
    if checkpointed:
        Activations().attach(made.model.layers)
    return made


def exact(monkeypatch: Any) -> None:
    """Norms and routers in the model's own dtype."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    for norm in (Qwen3RMSNorm, Qwen3MoeRMSNorm):
        monkeypatch.setattr(norm, "forward", _exact_norm)
    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", _exact_router)


def plans(model: PreTrainedModel, case: Case, *, capacity: int = 1000, world: int = 1, together: int = 1, threshold: int = 1) -> list[Plan]:
    batch = Batch(tokens=case[0], prompt_lengths=case[1], places=range(len(case[0])), together=together)
    return plan(batch, workload_of(model), CPU_CORE, world=world, capacity=capacity, thresholds=(threshold,))


def weights(case: Case) -> list[Tensor]:
    """Of each sample's scored tokens, [2, R]: what log-probs and entropies are weighted with in the loss."""
    random = np.random.default_rng(1)
    return [torch.from_numpy(random.normal(size=(2, len(t) - p))) for t, p in zip(*case, strict=True)]


def by_packed_rows(model: PreTrainedModel, case: Case, entropy_gradient: bool = True) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probs of each sample, and the gradients of `weights`' loss."""
    tokens, prompts = case
    ends = np.cumsum([len(t) for t in tokens])
    targets = np.concatenate([np.arange(end - len(t) + p, end) for end, t, p in zip(ends, tokens, prompts, strict=True)])
    row = pack([torch.from_numpy(t) for t in tokens])
    logprobs_N, entropy_N = packed_logprobs(model, *row, torch.from_numpy(targets), TEMPERATURE, CHUNK, True, entropy_gradient)
    _loss(torch.cat(weights(case), 1), logprobs_N, entropy_N, entropy_gradient).backward()
    return list(logprobs_N.detach().split([len(t) - p for t, p in zip(tokens, prompts, strict=True)])), _gradients(model)


def by_split(
    model: PreTrainedModel,
    case: Case,
    plan: Plan,
    entropy_gradient: bool = True,
    watch: Callable[[Executor], None] = lambda executor: None,
    fused: bool = False,
) -> dict[int, Tensor]:
    """Log-probs of the plan's samples; gradients are added to the model's. With `fused` by the fused loss, where it may be."""
    tokens, prompts = case
    executor, own = Executor(model, Split(plan, tokens, prompts, torch.device("cpu")), CHUNK), weights(case)
    watch(executor)
    found: dict[int, Tensor] = {}
    for step in plan.steps:
        if step.kind != "replay":
            continue
        samples = plan.passes[step.number].samples
        lengths = [len(tokens[s]) - prompts[s] for s in samples]
        weights_2N = torch.cat([own[s] for s in samples], 1) if samples else torch.zeros(2, 1, dtype=torch.float64)
        seen: list[Tensor] = []

        def of_part(part: slice, logprobs_N: Tensor, entropy_N: Tensor | None, weights_2N: Tensor = weights_2N, seen: list[Tensor] = seen) -> Tensor:
            seen.append(logprobs_N.detach())
            return _loss(weights_2N[:, part], logprobs_N, entropy_N, entropy_gradient)

        if fused and executor.alone(step.number):
            parts = even_parts(weights_2N.shape[1], CHUNK)
            executor.loss(step.number, of_part, parts, temperature=TEMPERATURE, entropy=True, entropy_gradient=entropy_gradient).backward()
        else:
            of_part(slice(None), *executor.replay(step.number, TEMPERATURE, True, entropy_gradient)).backward()
        executor.settle()
        found |= dict(zip(samples, torch.cat(seen).split(lengths) if samples else [], strict=True))
    return found


def _loss(weights_2N: Tensor, logprobs_N: Tensor, entropy_N: Tensor | None, entropy_gradient: bool) -> Tensor:
    assert entropy_N is not None
    loss = logprobs_N @ weights_2N[0]
    return loss + entropy_N @ weights_2N[1] if entropy_gradient else loss


def _gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def gap(model: PreTrainedModel, expected: dict[str, Tensor]) -> float:
    """The largest difference of any gradient's entry, over the largest entry of its tensor; the model's gradients are dropped."""
    found = _gradients(model)
    assert found.keys() == expected.keys()
    return max(float((found[n] - expected[n]).abs().max() / expected[n].abs().max()) for n in expected)


def _exact_router(self: Qwen3MoeTopKRouter, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = linear(hidden.reshape(-1, self.hidden_dim), self.weight)
    values, indices = logits.softmax(-1).topk(self.top_k, -1)
    return logits, values / values.sum(-1, keepdim=True), indices
