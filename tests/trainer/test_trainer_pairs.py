"""Steps on pairs against formulas written out on plain transformers, one sequence at a time in float64, with real ranks on gloo."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from algorithms.preference.config import PairConfig, PreferenceConfig, RewardModelConfig
from miles.core.model.load import load_tokenizer
from miles.core.model.reward import load_reward_model, reward_of
from miles.data.types import Prompt, Sample
from rollout.rewards.reward_model import reward_model
from tests.trainer_cases import gradients, make_backend, make_sample, plain_logprobs, plain_model, relative_difference, restore_norm, small_model
from tests.trainer_pool import Pool

EXACT = 1e-10
TOKENS = {"trainer": {"max_tokens_per_microbatch": 40}}
OBJECTIVES: dict[str, PairConfig] = {
    "dpo": PreferenceConfig(beta=0.3, label_smoothing=0.1),
    "ipo": PreferenceConfig(objective="ipo", beta=0.2),
    "kto": PreferenceConfig(objective="kto", beta=0.2, bad_weight=1.5),
    "orpo": PreferenceConfig(objective="orpo", odds_weight=0.7),
    "simpo": PreferenceConfig(objective="simpo", gamma=0.4),
    "reward": RewardModelConfig(margin=0.2, centre=0.01),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module", autouse=True)
def norms() -> Iterator[None]:
    yield
    restore_norm()


def pairs_of(prompts_and_lengths: Sequence[tuple[int, int, int]]) -> list[Sample]:
    """Chosen and rejected samples in turn; prompts of a pair are the same tokens. The first pair's answers have tokens that are not trained."""
    samples = []
    for number, (prompt, chosen, rejected) in enumerate(prompts_and_lengths):
        masked = () if number else (1, 2)
        good, bad = (make_sample(number, side, prompt, length, masked=masked) for side, length in enumerate((chosen, rejected)))
        samples += [good, Sample(**(vars(bad) | {"tokens": np.concatenate([good.tokens[:prompt], bad.response_tokens])}))]
    return samples


PAIRS = pairs_of([(3, 9, 4), (6, 1, 12), (2, 5, 5), (4, 14, 2), (5, 3, 8)])


def first_step(rank: int, world: int, path: Path, samples: list[Sample], objective: PairConfig, options: dict[str, Any]) -> tuple[Any, dict[str, float]]:
    """A step away from the start, so that the policy is not its reference, then the gradient of the one that is looked at."""
    backend = make_backend(path, rank=rank, world=world, pairs=objective, **options)
    shift(backend.model)
    metrics = backend.step_pairs(samples).metrics
    return gradients(backend), metrics


def shift(model: Any) -> None:
    """Move every weight by an amount that depends on its name alone: on every rank and in the oracle the same."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)
            if hasattr(parameter, "placements"):
                noise = torch.distributed.tensor.distribute_tensor(noise, parameter.device_mesh, parameter.placements)
            parameter.add_(noise)


def oracle(path: Path, samples: list[Sample], name: str) -> tuple[dict[str, Any], float]:
    """Gradient and loss, from the formulas of the papers."""
    policy, reference, config = plain_model(path), plain_model(path).requires_grad_(False), OBJECTIVES[name]
    if isinstance(config, RewardModelConfig):
        return reward_oracle(path, samples, config)
    shift(policy)
    beta = config.scale
    with torch.no_grad():
        moved = []
        for prompt, answer in zip(samples, samples[2:] + samples[:2], strict=True):
            tokens = np.concatenate([prompt.tokens[: prompt.prompt_length], answer.response_tokens])[: max(len(s.tokens) for s in samples)]
            stranger = Sample(
                **(
                    vars(answer)
                    | {"tokens": tokens, "prompt_length": prompt.prompt_length}
                    | {n: getattr(answer, n)[: len(tokens) - prompt.prompt_length] for n in ("loss_mask", "logprobs", "weight_versions")}
                )
            )
            moved.append((trained_logprobs(policy, stranger) - trained_logprobs(reference, stranger)).sum())
        kl = torch.stack(moved).mean().clamp(min=0)
    losses = []
    for chosen, rejected in zip(samples[::2], samples[1::2], strict=True):
        w, l = trained_logprobs(policy, chosen), trained_logprobs(policy, rejected)
        rw, rl = trained_logprobs(reference, chosen).sum(), trained_logprobs(reference, rejected).sum()
        margin = (w.sum() - rw) - (l.sum() - rl)
        if name == "dpo":
            losses.append(-0.9 * torch.log(torch.sigmoid(beta * margin)) - 0.1 * torch.log(torch.sigmoid(-beta * margin)))
        elif name == "ipo":
            losses.append((margin - 1 / (2 * beta)) ** 2)
        elif name == "kto":
            good = 1 - torch.sigmoid(beta * (w.sum() - rw - kl))
            bad = 1.5 * (1 - torch.sigmoid(beta * (kl - (l.sum() - rl))))
            losses.append((good + bad) / 2)
        elif name == "orpo":
            odds = [torch.log(m.mean().exp() / (1 - m.mean().exp())) for m in (w, l)]
            losses.append(-w.mean() - 0.7 * torch.log(torch.sigmoid(odds[0] - odds[1])))
        else:
            losses.append(-torch.log(torch.sigmoid(beta * (w.mean() - l.mean()) - 0.4)))
    loss = torch.stack(losses).mean()
    loss.backward()
    return {n: p.grad.numpy() for n, p in policy.named_parameters()}, loss.item()


def trained_logprobs(model: Any, sample: Sample) -> torch.Tensor:
    return plain_logprobs(model, sample)[torch.from_numpy(sample.loss_mask)]


def reward_oracle(path: Path, samples: list[Sample], config: RewardModelConfig) -> tuple[dict[str, Any], float]:
    """Plain body, plain dot product with the head that a backend starts from."""
    start = make_backend(path, pairs=config).model
    body, head = plain_model(path), start.get_output_embeddings().weight.detach()
    body.lm_head.weight = torch.nn.Parameter(torch.zeros(1, 16, dtype=torch.float64))  # untied, so that `shift` sees the names of a reward model
    shift(body)
    shifted = (body.lm_head.weight + head).detach().requires_grad_()
    rewards = [(body.model(input_ids=torch.from_numpy(s.tokens)[None]).last_hidden_state[0, -1] * shifted[0]).sum() for s in samples]
    losses = [-torch.log(torch.sigmoid(w - l - 0.2)) + 0.01 * (w + l) ** 2 for w, l in zip(rewards[::2], rewards[1::2], strict=True)]
    loss = torch.stack(losses).mean()
    loss.backward()
    return {n: (shifted.grad if n == "lm_head.weight" else p.grad).numpy() for n, p in body.named_parameters()}, loss.item()


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_gradients_are_those_of_the_formula_on_one_and_two_ranks_for_any_split(model: Path, two_ranks: Pool, name: str) -> None:
    expected, loss = oracle(model, PAIRS, name)
    options: list[dict[str, Any]] = [{}, TOKENS, {"trainer": {"max_tokens_per_microbatch": 1}}]
    runs = [first_step(0, 1, model, PAIRS, OBJECTIVES[name], o) for o in options]
    runs += [two_ranks.run(first_step, model, PAIRS, OBJECTIVES[name], o)[0] for o in options[1:]]
    for found, metrics in runs:
        assert relative_difference(found, expected) < EXACT
        assert metrics["loss/total"] == pytest.approx(loss, rel=1e-9)
    for (_, one), (_, other) in pairwise(runs):
        assert other == pytest.approx(one, rel=1e-9)


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_an_evaluation_measures_what_a_step_would_start_from_and_trains_nothing(model: Path, two_ranks: Pool, name: str) -> None:
    for evaluated, stepped in (evaluate_and_step(0, 1, model, OBJECTIVES[name]), two_ranks.run(evaluate_and_step, model, OBJECTIVES[name])[0]):
        assert evaluated == pytest.approx(
            {
                "eval/preference_accuracy": stepped["preference/accuracy"],
                "eval/preference_margin": stepped["preference/margin"],
                "eval/preference_loss": stepped["loss/total"],
            },
            rel=1e-12,
        )


def evaluate_and_step(rank: int, world: int, path: Path, objective: PairConfig) -> tuple[dict[str, float], dict[str, float]]:
    backend = make_backend(path, rank=rank, world=world, pairs=objective, **TOKENS)
    shift(backend.model)
    backend.evaluate_pairs(PAIRS[:4])
    evaluated = backend.evaluate_pairs(PAIRS)
    return evaluated, backend.step_pairs(PAIRS).metrics


@pytest.mark.parametrize("name", ["kto", "reward"])
def test_a_rank_without_a_pair_takes_part(model: Path, two_ranks: Pool, name: str) -> None:
    """One pair on two ranks."""
    samples = PAIRS[:2]
    expected, _ = oracle(model, samples, name)
    found, _ = two_ranks.run(first_step, model, samples, OBJECTIVES[name], {})[0]
    assert relative_difference(found, expected) < EXACT


def test_accuracy_and_margin_rise_as_it_learns(model: Path) -> None:
    for objective in OBJECTIVES.values():
        backend = make_backend(model, pairs=objective, dtype=torch.float32, trainer={"lr": 1e-2})
        metrics = [backend.step_pairs(PAIRS).metrics for _ in range(12)]
        assert metrics[-1]["preference/accuracy"] == 1.0
        assert metrics[-1]["preference/margin"] > metrics[0]["preference/margin"]


@pytest.mark.parametrize("name", ["dpo", "reward"])
def test_a_restored_trainer_goes_on_bit_for_bit(model: Path, tmp_path: Path, name: str) -> None:
    def fresh() -> Any:
        return make_backend(model, pairs=OBJECTIVES[name], dtype=torch.float32, trainer={"lr": 1e-2})

    whole, half, resumed = fresh(), fresh(), fresh()
    expected = [whole.step_pairs(PAIRS).metrics for _ in range(4)]
    for _ in range(2):
        half.step_pairs(PAIRS)
    half.save(tmp_path / "step", {}, asynchronous=False)
    resumed.load(tmp_path / "step")
    assert [resumed.step_pairs(PAIRS).metrics for _ in range(2)] == expected[2:]
    for name, tensor in whole.model.named_parameters():
        assert torch.equal(tensor, dict(resumed.model.named_parameters())[name])


def test_an_exported_reward_model_gives_the_rewards_that_were_trained(model: Path, two_ranks: Pool, tmp_path: Path) -> None:
    """To transformers itself, and to `load_reward_model`."""
    metrics = two_ranks.run(train_and_export, model, tmp_path / "export")[0]
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "export").eval()
    assert plain.config.architectures == ["Qwen3ForSequenceClassification"]
    ours = load_reward_model(tmp_path / "export")
    rewards = [reward_of(ours, torch.from_numpy(s.tokens)) for s in PAIRS]
    # transformers passes over pad tokens at the end, which random tokens may have.
    ended = [i for i, s in enumerate(PAIRS) if s.tokens[-1] != plain.config.pad_token_id]
    with torch.no_grad():
        theirs = [float(plain(input_ids=torch.from_numpy(PAIRS[i].tokens)[None]).logits) for i in ended]
    assert [rewards[i] for i in ended] == pytest.approx(theirs, abs=1e-5)
    text = load_tokenizer(model).decode(PAIRS[0].response_tokens.tolist(), skip_special_tokens=True)
    assert (
        reward_model(PAIRS[0], prompt=Prompt(prompt_id=0, tokens=PAIRS[0].tokens, text="", columns={}), text=text, path=str(tmp_path / "export")) == rewards[0]
    )
    assert np.mean(rewards[::2]) == pytest.approx(metrics["preference/chosen_reward"], abs=1e-5)
    assert np.mean(rewards[1::2]) == pytest.approx(metrics["preference/rejected_reward"], abs=1e-5)


def train_and_export(rank: int, world: int, path: Path, folder: Path) -> dict[str, float]:
    backend = make_backend(path, rank=rank, world=world, pairs=OBJECTIVES["reward"], dtype=torch.float32, trainer={"lr": 1e-2})
    for _ in range(2):
        backend.step_pairs(PAIRS)
    backend.export(folder)
    return backend.step_pairs(PAIRS).metrics  # of the weights that were exported: a step reports what it started from


def test_a_reward_model_with_another_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    backend = make_backend(model, pairs=OBJECTIVES["reward"], dtype=torch.float32)
    backend.export(tmp_path / "export")
    prompt = Prompt(prompt_id=0, tokens=PAIRS[0].tokens, text="", columns={})
    with pytest.raises(ValueError, match="another tokenizer than the policy"):
        reward_model(PAIRS[0], prompt=prompt, text="something else", path=str(tmp_path / "export"))


def test_a_trainer_without_an_objective_on_pairs_refuses_them(model: Path) -> None:
    with pytest.raises(ValueError, match="without an objective on pairs"):
        make_backend(model).step_pairs(PAIRS)
