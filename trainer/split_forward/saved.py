"""What autograd keeps of a plan's passes: bytes by token, scored token and segment, measured on the model. They are exact, because what a
dense decoder keeps is linear in these.

For planners that weigh memory, and for reports: `planner.predict` takes it. Measuring costs a few dozen forwards of a few dozen tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from miles.core.planning.hardware import CPU_CORE
from miles.core.planning.linear import whole_weights
from miles.core.planning.meters import Meter
from miles.core.planning.plan import Plan, Step
from miles.core.planning.workload import workload_of
from trainer.split_forward.executor import Executor, Split
from trainer.split_forward.layout import FILLER, Places, scores_its_first
from trainer.split_forward.planner import Batch
from trainer.split_forward.planner import plan as make_plan

Kind = str
"""Of a pass: `prefill`, `loss` (a replay whose scored tokens are all its own) or `replay`."""

_PROBES = 16
"""Batches of a few short sequences over three tokens, which share in every way."""


@dataclass(frozen=True)
class SavedBytes:
    """`weights[kind]`: bytes for each of `features`."""

    weights: dict[Kind, tuple[int, ...]]

    def peak(self, plan: Plan, prompt_lengths: Sequence[int]) -> int:
        """The most that is held at one moment of running `plan`: at the end of some forward."""
        places, held, peak = Places(plan), dict[int, int](), 0
        for step in plan.steps:
            if step.kind == "backward":
                del held[step.number]
                continue
            kind, row = features(places, step, prompt_lengths)
            size = sum(w * x for w, x in zip(self.weights[kind], row, strict=True))
            peak = max(peak, sum(held.values()) + size)
            if step.kind == "prefill":
                held[step.number] = size
        return peak


def features(places: Places, step: Step, prompt_lengths: Sequence[int]) -> tuple[Kind, list[int]]:
    """The kind of a step's pass, and what its bytes are linear in."""
    plan = places.plan
    segments, samples = [plan.segments[s] for s in plan.passes[step.number].segments], plan.passes[step.number].samples
    tokens, scored = (sum(s.length for s in segments), sum(s.scored for s in segments)) if segments else (FILLER, 1)
    first = sum(scores_its_first(s) for s in segments)
    if step.kind == "prefill":
        ends = max(len(segments), 1)
        # Scored hidden states are a part of those that go to the head, and keep them all, unless more are laid behind them.
        return "prefill", [tokens, scored - first, first, ends, 0 if first else ends]
    if places.alone(step.number):
        return "loss", [tokens, scored if samples and segments else int(not samples), 1]
    return "replay", [tokens, scored - first, first, sum(plan.segments[plan.ends[s]].stop - prompt_lengths[s] for s in samples)]


def saved_bytes_of(model: PreTrainedModel, chunk: int) -> SavedBytes:
    """Of a model on one rank, in eval mode; its gradients stay as they are. `chunk`: as the trainer's. Entropies are computed, as in RL.

    Raises:
        ValueError: what this model keeps is not linear in its tokens: experts, whose batches depend on the routing.
    """
    found: dict[Kind, list[tuple[list[int], int]]] = {"prefill": [], "loss": [], "replay": []}
    for seed in range(_PROBES):
        for kind, row, size in _measured(model, chunk, np.random.default_rng(seed), late=seed % 2 == 0):
            found[kind].append((row, size))
    return SavedBytes({kind: whole_weights(rows) for kind, rows in found.items()})


def _measured(model: PreTrainedModel, chunk: int, random: np.random.Generator, late: bool) -> list[tuple[Kind, list[int], int]]:
    """The prefills of a batch, and the first replay. Where prompts end `late`, hardly any scored token is shared."""
    lengths = random.integers(2, 12, 5).tolist()
    tokens, prompts = (
        [random.integers(0, 3, n) for n in lengths],
        [int(random.integers(max(1, n - 2), n)) if late else int(random.choice((1, n - 1))) for n in lengths],
    )
    batch = Batch(tokens=tokens, prompt_lengths=prompts, places=range(len(tokens)))
    (plan,) = make_plan(batch, workload_of(model), CPU_CORE, world=1, capacity=2**20, thresholds=(int(random.integers(1, 4)),))
    executor, places = Executor(model, Split(plan, tokens, prompts, model.device), chunk), Places(plan)
    options: dict[str, Any] = {"temperature": 1.0, "entropy": True, "entropy_gradient": False}
    found: list[tuple[Kind, list[int], int]] = []
    with Meter(model) as meter:
        while done := executor.prefill(**options, at_most=1):
            found.append((*features(places, Step(kind="prefill", number=done[0]), prompts), meter.saved_bytes - sum(size for *_, size in found)))
        number = next(step.number for step in plan.steps if step.kind == "replay")
        kept: list[Tensor | None]
        if executor.alone(number):
            whole = slice(0, sum(n - p for n, p in zip(lengths, prompts, strict=True)))
            kept = [executor.loss(number, lambda part, logprobs_N, entropy_N: logprobs_N.sum(), [whole], **options)]
        else:
            kept = list(executor.replay(number, **options))
        found.append((*features(places, Step(kind="replay", number=number), prompts), meter.saved_bytes - sum(size for *_, size in found)))
        kept.clear()
    return found
