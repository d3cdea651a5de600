"""HiLoRe on real models: bytes foreseen are bytes counted, risk foreseen ranks error measured, and without risk nothing changes by a bit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.config import AlgorithmConfig
from algorithms.contracts import Counts, LossOutput
from miles.config import ConfigError, load
from miles.core.memory.actions import Action
from miles.core.memory.footprint import Footprint
from miles.core.memory.knapsack import MicroBatch, Option, allocate
from miles.core.memory.profile import Profile
from miles.core.model.batch_invariant import make_batch_invariant
from miles.core.model.config import LoraConfig
from miles.core.model.fused_layer import fuse_layers
from miles.core.model.lora import add_adapters
from miles.core.planning.meters import Meter
from miles.data.packing import pack
from miles.data.types import Group, Sample
from miles.run.recipe import DistillRecipe, PreferenceRecipe, RewardModelRecipe
from tests.core.model.architectures import random_model
from tests.trainer_cases import gradients, make_backend, make_sample, mixed_groups, single_rank, small_model, weights
from trainer.config import TrainerConfig
from trainer.fsdp.model import decoder_layers
from trainer.fsdp.scoring import Scorer
from trainer.objective import Objective, sft_loss
from trainer.rows.batch import count
from trainer.rows.meters import Meters
from trainer.rows.row import Row, RowLoss, row_of
from trainer.rows.share import MicroBatch as Shared
from trainer.split_forward.activations import Activations, Choice
from trainer.split_forward.hilore import HiLoRe, Planned, Slack, check, estimated, influence, probes
from trainer.split_forward.observe import features, observe, summed

CPU = torch.device("cpu")
K, L, R = Action.KEEP, Action.COMPRESS, Action.RECOMPUTE
_one = pytest.fixture(scope="module", autouse=True)(single_rank)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILES_CACHE", str(tmp_path))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("hilore"))


class Alone:
    """A model with its activations and a scorer."""

    def __init__(self, model: Any):
        self.model = model
        self.activations = Activations(model.config.intermediate_size)
        self.activations.attach(decoder_layers(model))
        self.scorer = Scorer(model, 64, CPU)

    def run(self, row: Row, loss: RowLoss) -> LossOutput:
        return self.scorer.loss(row, loss, 1.0, entropy=True, by_token=True)

    def footprint(self) -> Footprint:
        return Footprint([observe(self.activations, row, self.run) for row in probes(CPU)], self.activations.layers)


def made(kind: str) -> Alone:
    model: Any = random_model("llama" if kind == "llama" else "qwen3", num_hidden_layers=3, dtype=torch.float64 if kind == "float64" else torch.float32)
    if kind == "lora":
        add_adapters(model, LoraConfig(rank=2, alpha=4), 0)
    if kind != "modules":
        fuse_layers(model)
    return Alone(model)


def row(*lengths: int) -> Row:
    samples = [make_sample(0, n, 1 + n % 3, length) for n, length in enumerate(lengths)]
    return row_of(Shared(packed=pack(samples), indices=()), None, CPU)


def beginning_alike(*lengths: int) -> Row:
    """Answers to one prompt, which is computed once."""
    prompt = make_sample(0, 0, 9, 1).tokens[:9]
    samples = [make_sample(0, n, 9, length) for n, length in enumerate(lengths)]
    samples = [replace(s, tokens=np.concatenate([prompt, s.response_tokens])) for s in samples]
    made = row_of(Shared(packed=pack(samples), indices=()), None, CPU)
    assert made.first_T is not None
    return made


@pytest.mark.parametrize("kind", ["fused", "modules", pytest.param("llama", marks=pytest.mark.full), "lora", pytest.param("float64", marks=pytest.mark.full)])
def test_the_bytes_foreseen_are_those_counted(kind: str) -> None:
    """Choices for three layers, in rows of one block, of several, and of one sequence."""
    alone = made(kind)
    footprint = alone.footprint()
    rows = [row(20), row(6, 5, 4), row(30, 28, 3, 2), beginning_alike(7, 4), beginning_alike(5, 5, 5)]
    choices = [(K, K, K), (R, R, R), (L, L, L), (K, L, R), (R, K, L), (L, R, K), (R, R, K)]
    for actions, one in zip(choices, itertools.cycle(rows), strict=False):
        foot = footprint.row(features(one))
        alone.activations.choice = Choice(actions)
        with Meter(alone.model, alone.activations.ledger) as meter:
            alone.run(one, summed).loss.backward()
        alone.model.zero_grad()
        assert meter.peak_saved_bytes == foot.peak(actions), (actions, features(one))
        assert meter.saved_bytes == 0


def test_what_the_knapsack_counts_is_never_less_than_what_is_held() -> None:
    """It has what several layers share as held throughout."""
    alone = made("fused")
    foot = alone.footprint().row(features(row(6, 5, 4)))
    for actions in itertools.product((K, L, R), repeat=3):
        options = []
        for own, action in zip(foot.layer, actions, strict=True):
            held, moment = {K: (own.saved, own.saved), L: (own.compressed, own.compressed + own.narrow), R: (own.inputs, own.both)}[action]
            options.append([Option(action=action, seconds=0.0, held=held, moment=moment)])
        batch = MicroBatch(layers=options, base=foot.shared, above=foot.above)
        with pytest.raises(ValueError, match="bytes"):
            allocate([batch], foot.peak(actions) - 1, 0.0)
        allocate([batch], foot.peak(actions) + foot.shared, 0.0)


def policy(row: Row, logprobs_N: Tensor, entropy_N: Tensor | None, *, objective: Objective, samples: list[Sample]) -> LossOutput:
    return objective.loss(row, logprobs_N, entropy_N, counts=count(samples, 16), meters=Meters(CPU))


def test_exposure_is_the_sum_of_the_coefficients_written_out() -> None:
    """mask / tokens (-1[active] ratio A + beta min(ratio, 2) (current - reference)): clipped on both sides and on its edge, A = 0, masked NaN."""
    samples = [make_sample(0, 0, 2, 6, masked=[2])]
    one = row_of(Shared(packed=pack(samples), indices=(0,)), [torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, 0.0])], CPU)
    old = torch.tensor([-1.0, -2.0, float("nan"), -1.0, -2.0, -3.0])
    now = old + torch.tensor([0.5, 0.1, 0.0, -0.5, 0.1, 0.3])
    one.rollout_logprobs_N, one.reference_logprobs_N = old, old - 0.2
    objective = Objective(AlgorithmConfig(kl_coef=0.3, clip_low=0.2, clip_high=0.28), 16)
    loss = partial(policy, objective=objective, samples=samples)
    ratio, advantage = (now - old).exp(), one.advantages_N
    active = ((advantage >= 0) & (ratio <= 1.28)) | ((advantage < 0) & (ratio >= 0.8))
    omega = (-(active * ratio * advantage) + 0.3 * ratio.clamp(max=2) * (now - old + 0.2)) / 5
    expected = float((omega * (1 - now.exp()))[one.mask_N].abs().sum())

    choice = Planned([L], [0.0], Slack(0.0), 0.0)
    leaf = torch.where(one.mask_N, now, torch.zeros(())).requires_grad_()
    leaf.register_hook(partial(choice.expose, influence_N=influence(leaf)))
    torch.autograd.grad(loss(one, leaf, None).loss, leaf)
    assert float(choice.exposure) == pytest.approx(expected, rel=1e-6)
    at_the_old = ((-advantage + 0.3 * 0.2) * (1 - old.exp()))[one.mask_N].abs().sum() / 5
    assert estimated(one, loss, True) == pytest.approx(float(at_the_old), rel=1e-6)


def test_of_supervised_fine_tuning_every_token_counts_alike(model: Path) -> None:
    backend = make_backend(model, trainer={"activations": "hilore", "activation_memory": 1.0})
    samples = [make_sample(0, i, 2, 5 + i) for i in range(3)]
    rows = backend._rows(samples)
    assert [estimated(one, partial(sft_loss, counts=count(samples, 16)), False) for one in rows] == pytest.approx([1.0])


def test_more_exposure_than_planned_is_paid_from_the_slack_and_else_computed_again() -> None:
    slack = Slack(0.5)
    first, second = (Planned([L, K, L], [1.0, float("inf"), 2.0], slack, 3.0) for _ in range(2))
    first.expose(torch.tensor([-1.1]))
    assert [first.stays(n) for n in (2, 0)] == [True, True], "3.3 of 3 planned and 0.5 left"
    assert slack.left == pytest.approx(0.2)
    second.expose(torch.tensor([1.0, -0.5]))
    assert [second.stays(n) for n in (2, 0)] == [False, True], "1.5 and 3 are more than 3.2; 1.5 is not"
    assert slack.left == pytest.approx(1.7)


def counting_by_steps(random: np.random.Generator, index: int, length: int) -> Sample:
    """Something to learn: numbers that rise by one, two or three."""
    sample = make_sample(0, index, 3, length)
    return replace(sample, tokens=(random.integers(0, 50) + random.integers(1, 4) * np.arange(3 + length)) % 50)


def test_predicted_risk_ranks_the_measured_error_of_the_gradient() -> None:
    """On a model that has learnt, and on micro-batches that the calibration did not see. 8 micro-batches of GRPO by 3 layers."""
    random, objective = np.random.default_rng(1), Objective(AlgorithmConfig(), 16)
    alone = made("fused")
    optimizer = torch.optim.AdamW(alone.model.parameters(), 3e-3)

    def mean(row: Row, logprobs_N: Tensor, entropy_N: Tensor | None) -> LossOutput:
        return LossOutput(loss=-logprobs_N.mean())

    def step_on(samples: list[Sample]) -> float:
        out = alone.run(row_of(Shared(packed=pack(samples), indices=()), None, CPU), mean)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(out.loss.detach())

    losses = [step_on([counting_by_steps(random, i, 12) for i in range(8)]) for _ in range(60)]
    assert losses[-1] < 0.6 * losses[0]

    def micro_batch() -> Row:
        samples = [counting_by_steps(random, i, int(random.integers(4, 16))) for i in range(int(random.integers(3, 7)))]
        scale = float(random.choice((0.3, 1.0, 1.0, 2.0)))
        advantages = [torch.full((s.response_length,), float(random.normal()) * scale) for s in samples]
        one = row_of(Shared(packed=pack(samples), indices=tuple(range(len(samples)))), advantages, CPU)
        one.rollout_logprobs_N = alone.scorer.score(one, 1.0)
        return one

    def loss(row: Row, logprobs_N: Tensor, entropy_N: Tensor | None) -> LossOutput:
        return objective.loss(row, logprobs_N, entropy_N, counts=Counts(tokens=400, sequences=40, max_tokens=16), meters=Meters(CPU))

    manager = HiLoRe(alone.model, alone.activations, 1.5, 0.1, world=1, threads=1, device=CPU)

    def run(row: Row, loss: RowLoss) -> LossOutput:
        return alone.run(row, manager.watched(loss))

    def gradient(row: Row, actions: list[Action]) -> Tensor:
        manager._alone(row, actions, run, loss)
        return torch.cat([p.grad.flatten() for p in alone.model.parameters()])

    calibration = manager._calibrate([micro_batch() for _ in range(16)], loss, run)
    predicted, measured = [], []
    for one in [micro_batch() for _ in range(8)]:
        exact = gradient(one, [R] * 3)
        for layer in range(3):
            predicted.append(calibration.risk(layer, estimated(one, loss, True)))
            measured.append(float((gradient(one, [L if n == layer else R for n in range(3)]) - exact).norm()))
    ranks = [np.argsort(np.argsort(values)) for values in (predicted, measured)]
    assert np.corrcoef(*ranks)[0, 1] > 0.7, "Spearman's rank correlation"


OPTIONS: dict[str, Any] = {"activations": "hilore", "max_tokens_per_microbatch": 24, "activation_memory": 1.3}


def hilore(path: Path, dtype: torch.dtype = torch.float32, **trainer: Any) -> Any:
    """A backend that does not measure this machine: compressing costs a fifth of computing again."""
    backend = make_backend(path, trainer=OPTIONS | trainer, dtype=dtype)
    backend._hilore.profile = Profile(recompute=(1e-5, 1e-5), compress=(2e-6, 2e-6))
    return backend


def stepped(backend: Any, groups: list[Group], steps: int = 3) -> tuple[dict[str, Any], list[float]]:
    losses = [backend.step_rl(groups).metrics["loss/total"] for _ in range(steps)]
    losses += [backend.step_sft([s for g in groups for s in g.samples]).metrics["loss/total"]]
    return weights(backend), losses


def test_without_risk_every_bit_is_that_of_keeping_everything(model: Path) -> None:
    expected, losses = stepped(make_backend(model, trainer={"max_tokens_per_microbatch": 24}, dtype=torch.float32), mixed_groups())
    backend = hilore(model, activation_risk=0.0)
    found, found_losses = stepped(backend, mixed_groups())
    assert found_losses == losses
    assert all((found[name] == expected[name]).all() for name in expected)
    actions = {action for one in backend._hilore.allocation.actions for action in one}
    assert actions == {K, R}


@pytest.mark.parametrize("memory", [1.0, 1.2, 3.0])
def test_a_step_never_holds_more_than_its_budget_and_what_was_foreseen(model: Path, memory: float) -> None:
    backend = hilore(model, activation_memory=memory, activation_risk=0.5)
    backend.step_rl(mixed_groups())
    with Meter(backend.model, backend._activations.ledger) as meter:
        metrics = backend.step_rl(mixed_groups()).metrics
    assert meter.peak_saved_bytes == backend._hilore.peak <= backend._hilore.budget
    assert metrics["activations/fell_back"] == 0.0
    assert metrics["activations/kept"] < 1 or memory > 1.6


def test_compression_stays_near_the_exact_gradient(model: Path) -> None:
    exact = make_backend(model, trainer={"max_tokens_per_microbatch": 24})
    backend = hilore(model, torch.float64, activation_risk=0.05, activation_memory=1.1)
    exact.step_rl(mixed_groups())
    backend.step_rl(mixed_groups())
    before, after = gradients(exact), gradients(backend)
    assert all((before[name] == after[name]).all() for name in before), "nothing is compressed before a gradient's norm is known"
    metrics = backend.step_rl(mixed_groups()).metrics
    exact.step_rl(mixed_groups())
    assert metrics["activations/compressed"] > 0
    assert 0 < metrics["activations/risk"] <= 0.05
    # AdamW's first moment after two equal steps but for the second gradient's error, which has a tenth of it.
    difference = sum(np.square(after - before).sum() for before, after in zip(gradients(exact).values(), gradients(backend).values(), strict=True))
    assert 0 < np.sqrt(difference) < 0.05 * metrics["optimizer/grad_norm"]


def test_a_run_that_goes_on_from_a_checkpoint_chooses_as_it_would_have(model: Path, tmp_path: Path) -> None:
    first = hilore(model, activation_risk=0.5, activation_memory=1.1)
    for _ in range(2):
        first.step_rl(mixed_groups())
    first.save(tmp_path / "checkpoint", {}, asynchronous=False)
    second = make_backend(model, trainer=OPTIONS | {"activation_risk": 0.5, "activation_memory": 1.1}, dtype=torch.float32)
    second.load(tmp_path / "checkpoint")
    expected, found = first.step_rl(mixed_groups()).metrics, second.step_rl(mixed_groups()).metrics
    assert found == expected
    assert found["activations/compressed"] > 0


@pytest.mark.parametrize(
    ("options", "told"),
    [({"backend": "megatron"}, "megatron"), ({"prompt_sharing": True}, "prompt_sharing")],
)
def test_what_it_does_not_go_with_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        TrainerConfig(activations="hilore", **options)


@pytest.mark.parametrize(
    ("recipe", "needed"), [(DistillRecipe, ["distill.teacher=t", "distill.divergence=reverse"]), (PreferenceRecipe, []), (RewardModelRecipe, [])]
)
def test_recipes_without_a_loss_on_log_probs_are_refused(recipe: Any, needed: list[str]) -> None:
    with pytest.raises(ConfigError, match="weighs tokens by a loss on log-probs"):
        load(recipe, None, ["model.path=m", 'data.paths=["d.jsonl"]', "trainer.activations=hilore", *needed])


def test_models_whose_bytes_cannot_be_foreseen_are_refused() -> None:
    with pytest.raises(ValueError, match="experts"):
        check(random_model("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32), 100)
    with pytest.raises(ValueError, match="looks back 16 of 100"):
        check(random_model("mistral", sliding_window=16), 100)
    assert check(random_model("mistral", sliding_window=16), 16) == 100
    exact = random_model()
    make_batch_invariant(exact)
    with pytest.raises(ValueError, match="true_on_policy"):
        check(exact, 100)
