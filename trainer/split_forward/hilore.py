"""HiLoRe: before an update's forwards it is decided what each layer of each micro-batch keeps, compresses or computes again.

    exposure    sum of |dL/d log-prob| (1 - p), by the objective itself: first at the old log-probs, to plan with, then as it is, before the backward begins
    bytes       exact, from `miles.core.memory.footprint`, fitted once to a few small rows
    seconds     from `miles.core.memory.profile`, measured once on this machine
    risk        from `miles.core.memory.calibration`, on the first micro-batches of the run
    choice      by `miles.core.memory.knapsack`

Once a micro-batch's exposure is known, layers whose compression would then risk more than the plan has left are computed again. With a risk budget
of 0 nothing is compressed, and every gradient has the bits that it has without any of this.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from algorithms.contracts import LossOutput
from miles.core.memory import profile as profiles
from miles.core.memory.actions import Action
from miles.core.memory.calibration import Calibration, Trial, calibrate
from miles.core.memory.footprint import Footprint, RowFootprint
from miles.core.memory.knapsack import Allocation, MicroBatch, Option, allocate
from miles.core.memory.profile import Profile
from miles.core.model.packed import window_of
from miles.core.model.sharded import last_microbatch
from miles.data.packing import pack
from miles.data.types import Sample, Status
from trainer.rows.row import Row, RowLoss, row_of
from trainer.rows.share import MicroBatch as Shared
from trainer.split_forward.activations import Activations, Choice
from trainer.split_forward.observe import features, observe, summed

TRIALS = 16
"""Micro-batches of the calibration, at most."""
_PROFILED = 3
"""Runs that each of a profile's two is the fastest of."""
_PROBES = ((5,), (9,), (4, 4), (3, 3, 3), (7, 3), (8, 7), (9, 4, 2), (12, 2, 2, 5), (6, 5, 2), (16, 2, 9))
"""Lengths of the sequences of rows that the footprint is fitted to: one block or several, gathered or as they lie. Each is there twice, once with
sequences that begin alike."""

Run = Callable[[Row, RowLoss], LossOutput]
"""Scores a row and takes a loss of it, ready for its backward."""


class Planned(Choice):
    """One row's. Attributes: exposure: what has been seen of it so far."""

    def __init__(self, actions: Sequence[Action], per_exposure: Sequence[float], slack: Slack, planned: float):
        super().__init__(actions)
        self.exposure: Tensor | float = 0.0
        self._per_exposure, self._slack, self._planned = per_exposure, slack, planned
        self._staying: set[int] | None = None

    def expose(self, grad_N: Tensor, influence_N: Tensor | None = None) -> None:
        """The loss's derivative in log-probs, or in entropies without their influence, as it is taken."""
        self.exposure = self.exposure + weighed(grad_N, influence_N)

    def stays(self, layer: int) -> bool:
        if self._staying is None:
            self._staying = self._settled()
        return layer in self._staying

    def _settled(self) -> set[int]:
        """Compressed layers, less those of the largest risk until what is left is within what was planned and the slack of other micro-batches."""
        exposure = float(self.exposure)
        staying = sorted((n for n, a in enumerate(self.actions) if a is Action.COMPRESS), key=lambda n: self._per_exposure[n])
        risks = [self._per_exposure[n] * exposure for n in staying]
        while staying and sum(risks) > (self._planned + self._slack.left) * (1 + 1e-9):
            staying.pop()
            risks.pop()
        self._slack.left += self._planned - sum(risks)
        return set(staying)


@dataclass
class Slack:
    """Risk that an update's micro-batches may still take beyond what was planned."""

    left: float


class HiLoRe:
    """One model on one rank.

    Args:
        activations: attached to the model's layers; its `width` says what may be compressed.
        memory: the most that is held at one moment of a micro-batch's backward, as a multiple of what the update's largest micro-batch would hold if all
            layers were computed again.
        risk: error of an update's gradient that compression may cause, relative to the gradient's norm.
    Attributes:
        allocation: of the last update; peak: the bytes predicted of it. budget: bytes.
        norm: what `risk` is relative to, a running mean of the updates' gradient norms; None before the first.
    """

    def __init__(self, model: PreTrainedModel, activations: Activations, memory: float, risk: float, *, world: int, threads: int, device: torch.device):
        self._model, self._activations, self._memory, self._risk = model, activations, memory, risk
        self._world, self._device = world, device
        self._key = profiles.key_of({k: v for k, v in model.config.to_dict().items() if k != "_name_or_path"}, model.dtype, device, threads)
        self.footprint: Footprint | None = None
        self.profile: Profile | None = None
        self.calibration: Calibration | None = None
        self.norm: float | None = None
        self.allocation: Allocation | None = None
        self.budget = self.peak = 0
        self._last: list[Planned] = []
        self._foreseen = 0.0
        self._influence = 1.0  # of tokens without old log-probs, on average: as in the update before

    def choices(self, rows: Sequence[Row], loss: RowLoss, run: Run, *, sampled: bool) -> list[Planned]:
        """Of one update's rows. Collective.

        Args:
            sampled: rows have their tokens' old log-probs, as in RL.
            loss: pure, of a row's log-probs. run: what the update will do with it, `watched`.
        Raises:
            ValueError: what layers keep is not linear in the tokens.
        """
        if self.footprint is None:
            self._prepare(rows, run)
        assert self.footprint is not None
        if self._risk > 0 and self.calibration is None:
            self.calibration = self._calibrate(rows, loss, run)
        foots = [self.footprint.row(features(row)) for row in rows]
        exposures = [estimated(row, loss, sampled) * (1.0 if sampled else self._influence) for row in rows]
        everything_again = [Action.RECOMPUTE] * self._activations.layers
        self.budget = int(self._memory * max(foot.peak(everything_again) for foot in foots))
        allowed = 0.0 if self.norm is None else self._risk * self.norm / self._world
        batches = [self.batch(foot, row, exposure, allowed) for foot, row, exposure in zip(foots, rows, exposures, strict=True)]
        self.allocation = allocation = allocate(batches, self.budget, allowed)
        self.peak = max(foot.peak(actions) for foot, actions in zip(foots, allocation.actions, strict=True))
        slack = Slack(allowed - sum(allocation.risk))
        per_exposure = self._per_exposure()
        self._last = [Planned(actions, per_exposure, slack, risk) for actions, risk in zip(allocation.actions, allocation.risk, strict=True)]
        self._foreseen = sum(exposures)
        return self._last

    def watched(self, loss: RowLoss) -> RowLoss:
        """`loss`, whose derivatives the choice in force then sees."""

        def seen(row: Row, logprobs_N: Tensor, entropy_N: Tensor | None) -> LossOutput:
            choice = self._activations.choice
            if isinstance(choice, Planned):
                if logprobs_N.requires_grad:
                    logprobs_N.register_hook(partial(choice.expose, influence_N=influence(logprobs_N)))
                if entropy_N is not None and entropy_N.requires_grad:
                    entropy_N.register_hook(choice.expose)
            return loss(row, logprobs_N, entropy_N)

        return seen

    def choose(self, choice: Choice | None) -> None:
        """For the forwards that follow."""
        self._activations.choice = choice

    def stepped(self, grad_norm: float) -> None:
        """An update was done, whose gradient had this norm over all ranks."""
        if self._foreseen > 0:
            self._influence = min(1.0, self._influence * sum(float(choice.exposure) for choice in self._last) / self._foreseen)
        if grad_norm > 0 and np.isfinite(grad_norm):
            self.norm = grad_norm if self.norm is None else 0.9 * self.norm + 0.1 * grad_norm

    def metrics(self) -> dict[str, float]:
        """Of the last update, on this rank."""
        allocation = self.allocation
        assert allocation is not None
        every = [action for actions in allocation.actions for action in actions]
        shares = {f"activations/{name}": every.count(action) / len(every) for name, action in _NAMES.items()}
        revoked, self._activations.revoked = self._activations.revoked, 0
        overflows, self._activations.overflows = self._activations.overflows, 0
        return shares | {
            "activations/saved_mib": self.peak / 2**20,
            "activations/budget_mib": self.budget / 2**20,
            "activations/risk": sum(allocation.risk) * self._world / self.norm if self.norm else 0.0,
            "activations/fell_back": (revoked + overflows) / len(every),
        }

    def state(self) -> dict[str, Any]:
        """What a checkpoint must have of it, so that a run that goes on chooses as it would have."""
        return {
            "norm": self.norm,
            "influence": self._influence,
            "calibration": None if self.calibration is None else self.calibration.state(),
            "profile": None if self.profile is None else [list(self.profile.recompute), list(self.profile.compress)],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.norm, self._influence = state["norm"], state["influence"]
        self.calibration = None if state["calibration"] is None else Calibration.of_state(state["calibration"])
        self.profile = None if state["profile"] is None else Profile(*(tuple(part) for part in state["profile"]))

    def _per_exposure(self) -> list[float]:
        if self.calibration is None:
            return [float("inf")] * self._activations.layers
        return [self.calibration.per_exposure(layer) for layer in range(self._activations.layers)]

    def batch(self, foot: RowFootprint, row: Row, exposure: float, allowed: float) -> MicroBatch:
        """One micro-batch as the knapsack has it; `allowed`: the update's risk."""
        assert self.profile is not None
        tokens, per_exposure, layers = features(row)[0], self._per_exposure(), []
        for number, own in enumerate(foot.layer):
            again, compressing = self.profile.recompute[number] * tokens, self.profile.compress[number] * tokens
            options = [
                Option(action=Action.RECOMPUTE, seconds=0.0, held=own.inputs, moment=own.both),
                Option(action=Action.KEEP, seconds=again, held=own.saved, moment=own.saved),
            ]
            # A layer whose gradient showed no error is compressed no sooner than others where nothing may be risked.
            if own.narrow and allowed > 0 and np.isfinite(per_exposure[number]):
                risk = per_exposure[number] * exposure
                options.append(Option(action=Action.COMPRESS, seconds=again - compressing, held=own.compressed, moment=own.compressed + own.narrow, risk=risk))
            layers.append(options)
        return MicroBatch(layers=layers, base=foot.shared, above=foot.above)

    def _prepare(self, rows: Sequence[Row], run: Run) -> None:
        observed = [observe(self._activations, row, run) for row in probes(self._device)]
        try:
            self.footprint = Footprint(observed, self._activations.layers)
        except ValueError as error:
            raise ValueError(
                f"trainer.activations = 'hilore' must know how many bytes {type(self._model).__name__} keeps, and cannot ({error}): use 'recompute'"
            ) from error
        if self.profile is None:
            self.profile = profiles.load(self._key)
        if not self._everywhere(self.profile is not None):
            self.profile = self._measured(rows, run)
            profiles.store(self._key, self.profile)
        self._model.zero_grad(set_to_none=True)

    def _everywhere(self, here: bool) -> bool:
        """Whether it is so on every rank. Collective."""
        told = torch.tensor(float(here), device=self._device)
        if self._world > 1:
            dist.all_reduce(told, dist.ReduceOp.MIN)
        return bool(told)

    def _measured(self, rows: Sequence[Row], run: Run) -> Profile:
        """On the longest row. Collective."""
        row = max(rows, key=lambda row: features(row)[0])
        tokens = features(row)[0]
        found = []
        for action in (Action.RECOMPUTE, Action.COMPRESS):
            runs = []
            for _ in range(_PROFILED + 1):
                seconds: defaultdict[tuple[int, Action], float] = defaultdict(float)
                self._activations.seconds = seconds
                self._alone(row, [action] * self._activations.layers, run, summed)
                runs.append([seconds[number, action] / tokens for number in range(self._activations.layers)])
            self._activations.seconds = None
            found.append(tuple(np.min(runs[1:], axis=0).tolist()))
        return Profile(recompute=found[0], compress=found[1])

    def _calibrate(self, rows: Sequence[Row], loss: RowLoss, run: Run) -> Calibration:
        """Each layer compressed alone in each of the first rows, all others being computed again. Collective."""
        layers = self._activations.layers
        trials: list[list[Trial]] = [[] for _ in range(layers)]
        for row in rows[:TRIALS]:
            exposure = self._alone(row, [Action.RECOMPUTE] * layers, run, loss)
            exact = {name: _local(p.grad).clone() for name, p in self._model.named_parameters() if p.grad is not None}
            for number in range(layers):
                actions = [Action.COMPRESS if n == number else Action.RECOMPUTE for n in range(layers)]
                errors: defaultdict[int, list[float]] = defaultdict(list)
                self._activations.errors = errors
                self._alone(row, actions, run, loss)
                self._activations.errors = None
                lost = errors[number][0] if errors[number] else 0.0
                square = sum(
                    float((_local(p.grad) - exact[name]).square().sum(dtype=torch.float64)) for name, p in self._model.named_parameters() if name in exact
                )
                told = torch.tensor([exposure * lost, exposure if errors[number] else 0.0, square], dtype=torch.float64, device=self._device)
                if self._world > 1:
                    dist.all_reduce(told)
                weighted, total, square = told.tolist()
                if total > 0:
                    trials[number].append(Trial(exposure=total, loss=weighted / total, error=square**0.5))
            self._model.zero_grad(set_to_none=True)
        return calibrate(trials)

    def _alone(self, row: Row, actions: Sequence[Action], run: Run, loss: RowLoss) -> float:
        """One row's gradient; its exposure."""
        self._model.zero_grad(set_to_none=True)
        choice = Planned(actions, [0.0] * len(actions), Slack(0.0), 0.0)
        self.choose(choice)
        last_microbatch(self._model, True)
        run(row, loss).loss.backward()
        self.choose(None)
        return float(choice.exposure)


def influence(logprobs_N: Tensor) -> Tensor:
    """How much a token's log-prob moves with its logits: the norm of that gradient is 1 to sqrt(2) times `1 - p`. A token that is certain has none."""
    return -torch.expm1(logprobs_N.detach())


def weighed(grad_N: Tensor, influence_N: Tensor | None) -> Tensor:
    weight_N = grad_N.detach().abs()
    return (weight_N if influence_N is None else weight_N * influence_N).sum(dtype=torch.float64)


_NAMES = {"kept": Action.KEEP, "compressed": Action.COMPRESS, "recomputed": Action.RECOMPUTE}


def estimated(row: Row, loss: RowLoss, sampled: bool) -> float:
    """A row's exposure at its old log-probs, or, where the tokens were not `sampled` and have none, without their influence. A loss that reads
    entropies is given zeros."""
    old_N = row.rollout_logprobs_N if row.start_logprobs_N is None else row.start_logprobs_N
    logprobs_N = torch.where(row.mask_N, old_N, 0.0).detach().requires_grad_()
    entropy_N = torch.zeros_like(logprobs_N).requires_grad_()
    with torch.enable_grad():
        value = loss(row, logprobs_N, entropy_N).loss
    if not value.requires_grad:
        return 0.0
    of_logprobs_N, of_entropy_N = torch.autograd.grad(value, (logprobs_N, entropy_N), allow_unused=True)
    found = 0.0 if of_logprobs_N is None else float(weighed(of_logprobs_N, influence(logprobs_N) if sampled else None))
    return found if of_entropy_N is None else found + float(weighed(of_entropy_N, None))


def check_operators(*, exact: bool) -> None:
    """Raises ValueError where they are batch-invariant ones."""
    if exact:
        raise ValueError("trainer.activations = 'hilore' must foresee every byte, and model.true_on_policy pads rows to its tiles: use 'recompute'")


def check(model: PreTrainedModel, longest: int) -> int:
    """The width of the MLP's tensors.

    Raises:
        ValueError: what this model keeps cannot be foreseen: batch-invariant operators, experts, or a sliding window shorter than the
            `longest` sequence (tokens).
    """
    name, config = type(model).__name__, model.config.get_text_config()
    check_operators(exact=hasattr(model, "batch_invariant_linear"))
    if any(parameter.ndim == 3 for parameter in model.parameters()):
        raise ValueError(f"trainer.activations = 'hilore' is for dense models; the batches of {name}'s experts depend on the routing: use 'recompute'")
    windows = [window for module in model.modules() if hasattr(module, "layer_idx") and (window := window_of(module)) is not None]
    if windows and min(windows) < longest:
        raise ValueError(
            f"trainer.activations = 'hilore' needs attention over whole sequences; {name} looks back {min(windows)} of {longest} tokens: "
            f"use 'recompute', or set model.context = {min(windows)}"
        )
    width = getattr(config, "intermediate_size", None)
    if not isinstance(width, int):
        raise ValueError(f"trainer.activations = 'hilore' compresses a tensor of the MLP; {name} does not say how wide it is: use 'recompute'")
    return width


def probes(device: torch.device) -> list[Row]:
    """Small rows, of tokens 0 to 3, which any vocabulary has."""
    rows = []
    for lengths, alike in itertools.product(_PROBES, (False, True)):
        samples = [_sample(length, 1 + n % 2 if length > 2 else 1, 0 if alike else n) for n, length in enumerate(lengths)]
        rows.append(row_of(Shared(packed=pack(samples), indices=()), None, device))
    return rows


def _sample(length: int, prompt: int, first: int) -> Sample:
    tokens = np.zeros(length, np.int64)
    tokens[0] = first
    return Sample(
        sample_id="",
        group_id="",
        tokens=tokens,
        prompt_length=prompt,
        loss_mask=np.ones(length - prompt, np.bool_),
        logprobs=np.zeros(length - prompt, np.float32),
        weight_versions=np.zeros(length - prompt, np.int32),
        status=Status.COMPLETED,
    )


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
