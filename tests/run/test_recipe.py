"""Recipes whose values do not go together are refused by the values, before anything starts."""

from __future__ import annotations

import multiprocessing

import pytest

from miles.config import LONGEST_S, ConfigError, describe, load
from miles.run.assemble import assemble
from miles.run.recipe import RLRecipe


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(RLRecipe, None, ["model.path=m", *overrides])
    return str(caught.value)


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp_baseline", "gdpo"])
def test_a_group_of_one_is_refused_by_every_group_relative_estimator(name: str) -> None:
    message = refused("rollout.samples_per_prompt=1", f"algorithm.advantages={name}")
    assert f"rollout.samples_per_prompt = 1 with algorithm.advantages = '{name}'" in message


@pytest.mark.parametrize("option", ["reward.timeout_s", "rollout.timeout_s", "weight_sync.timeout_s", "trainer.timeout_s"])
def test_a_deadline_is_refused_that_no_poll_takes(option: str) -> None:
    """A run with 1e9 for "never" ended with an OverflowError at its first reward."""
    assert f"{option} = 1000000000.0 (command line): Input should be less than or equal to 1000000" in refused(f"{option}=1e9")
    here, there = multiprocessing.Pipe()
    there.send(0)
    assert here.poll(LONGEST_S)


def test_a_group_of_one_is_taken_where_the_batch_is_the_baseline() -> None:
    load(RLRecipe, None, ["model.path=m", "rollout.samples_per_prompt=1", "algorithm.advantages=reinforce_pp"])


def test_a_group_of_one_is_taken_by_a_critic() -> None:
    load(RLRecipe, None, ["model.path=m", "rollout.samples_per_prompt=1", "algorithm.advantages=gae", "critic={}"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.advantages=gae"], "algorithm.advantages = 'gae' needs a critic's values: add a [critic] section"),
        (["algorithm.advantages=gigpo"], "say in reward.steps what ends a step of it and name a reward function that takes `steps`, or use 'grpo'"),
        (["trainer.balance_coef=0.1", "trainer.backend=megatron"], "trainer.balance_coef = 0.1 is for trainer.backend = 'fsdp'"),
        (["rollout.extra_prompts=2", "run.max_staleness=1"], "rollout.extra_prompts = 2 does not go with run.max_staleness = 1"),
        (["rollout.extra_prompts=2", "rollout.max_attempts=1"], "rollout.extra_prompts = 2 aborts groups to try them again, and rollout.max_attempts = 1"),
        (["evaluate.engines=1"], "evaluate.engines = 1 without evaluate.every: they have nothing to do; set it to 0"),
        (["reward.steps=("], "reward.steps = '('"),
        (["critic.lr=1e-4"], "[critic] with algorithm.advantages = 'grpo', which reads no values: use 'gae'"),
        (["critic.lr=1e-4", "algorithm.advantages=gae", "critic.head_start=9", "run.steps=9"], "critic.head_start = 9 of run.steps = 9 steps"),
        (["critic.head_strat=1", "algorithm.advantages=gae"], "did you mean 'critic.head_start'?"),
        (["critic.value_clip=0", "algorithm.advantages=gae"], "critic.value_clip = 0"),
        (["algorithm.gae_lambda=0.5"], "algorithm.gae_lambda = 0.5 is for algorithm.advantages = 'gae', and 'grpo' does not read it"),
    ],
)
def test_a_critic_that_cannot_be_meant_is_refused(overrides: list[str], message: str) -> None:
    assert message in refused(*overrides)


def test_a_critic_beside_a_function_of_ones_own_is_taken() -> None:
    load(RLRecipe, None, ["model.path=m", "algorithm.advantages=mine:estimator", "critic={}", "algorithm.gamma=0.9"])


def test_the_critics_options_are_described() -> None:
    described = {name: default for name, _, default, _ in describe(RLRecipe)}
    assert described["critic.lr"] == 1e-5
    assert described["critic.value_clip"] == 0.2


def test_dynamic_sampling_of_groups_of_one_is_refused() -> None:
    assert "algorithm.dynamic_sampling" in refused("rollout.samples_per_prompt=1", "algorithm.advantages=reinforce_pp", "algorithm.dynamic_sampling=true")


@pytest.mark.parametrize("k", ["[]", "[0]", "[1, -2]"])
def test_pass_at_k_needs_a_k(k: str) -> None:
    assert "evaluate.k = [" in refused(f"evaluate.k={k}")


def test_prompts_that_do_not_divide_show_the_arithmetic() -> None:
    assert "7 / 2 = 3.50 prompts per optimizer step" in refused("rollout.prompts_per_step=7", "trainer.optimizer_steps_per_batch=2")


@pytest.mark.parametrize(("option", "value", "nearest"), [("advantages", "grppo", "grpo"), ("loss", "ppo_clp", "ppo_clip")])
def test_a_misspelt_objective_is_refused_before_ray_starts(option: str, value: str, nearest: str) -> None:
    recipe = load(RLRecipe, None, ["model.path=m", f"algorithm.{option}={value}"])
    with pytest.raises(ConfigError, match=f"algorithm.{option} = '{value}' is not known; did you mean '{nearest}'"), assemble(recipe, resume=False):
        raise AssertionError("a run was assembled")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.engine=sglang", "rollout.engine = 'sglang', whose server has weights of its own"),
        ("trainer.backend=megatron", "trainer.backend = 'megatron': use 'fsdp'"),
        ("model.dtype=bfloat16", "model.dtype = 'bfloat16': the trainer's own weights are float32"),
        ("lora.rank=4", "[lora], whose adapters are all that moves"),
        ("run.max_staleness=1", "run.max_staleness = 1: engines would answer while their weights change"),
        ("evaluate.engines=1", "evaluate.engines = 1, which answer while the trainer goes on"),
    ],
)
def test_weights_that_lie_in_one_place_are_refused_where_they_would_move_under_a_reader(override: str, message: str) -> None:
    options = ["model.dtype=float32", "evaluate.every=1", 'evaluate.data.paths=["x"]']
    assert f"weight_sync.transport = 'views' does not go with {message}" in refused("weight_sync.transport=views", *options, override)
