"""Answers cut into steps, and rewards of each step: where they lie and what they add up to."""

import asyncio

import numpy as np
import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from miles.config import ConfigError
from miles.data.turns import TurnRecord, turns_of
from miles.data.types import Prompt, Sample, Status
from rollout.config import RewardConfig, RewardItem
from rollout.rewards.registry import resolve
from rollout.rewards.runner import RewardRunner
from rollout.rewards.steps import StepCutter
from rollout.rewards.values import RewardError
from tests.rollout.tokenizers_for_rewards import tokenizer

GRADERS = "tests.rollout.graders"
TOKENIZER = tokenizer()
PROMPT = Prompt(prompt_id=0, tokens=np.array([0]), text="", columns={"answer": "7"})


def said(text: str | bytes, *, end: bool = True) -> Sample:
    """A sample of one token a byte, and the end token."""
    written = text.encode() if isinstance(text, str) else text
    alphabet = {bytes([byte]): TOKENIZER.convert_tokens_to_ids(character) for character, byte in decoder().items()}
    response = [alphabet[bytes([byte])] for byte in written] + ([TOKENIZER.eos_token_id] if end else [])
    n = len(response)
    options = {"loss_mask": [True] * n, "logprobs": [0.0] * n, "weight_versions": [0] * n}
    return Sample(sample_id="0/0", group_id="0", tokens=[0, *response], prompt_length=1, status=Status.COMPLETED, **options)


def decoder() -> dict[str, int]:
    """The byte that each character of the tokenizer's alphabet stands for, as transformers has it."""
    return {character: byte for byte, character in bytes_to_unicode().items()}


def cut(pattern: str, text: str | bytes, *, end: bool = True) -> list[str]:
    return [step.text for step in StepCutter(pattern, TOKENIZER)(said(text, end=end))]


def scored(*items: RewardItem, texts: list[str], steps: str = "\n") -> list[Sample]:
    rewards = RewardRunner(RewardConfig(functions=list(items), steps=steps), TOKENIZER)
    try:
        return asyncio.run(rewards.score([said(text) for text in texts], PROMPT))
    finally:
        rewards.close()


@pytest.mark.parametrize(
    ("pattern", "text", "steps"),
    [
        ("\n", "a\nbc\n", ["a\n", "bc\n"]),
        ("\n", "a\nbc", ["a\n", "bc"]),
        ("\n\n+", "a\n\n\nb\nc", ["a\n\n\n", "b\nc"]),
        (".", "xyz", ["x", "y", "z"]),
        ("[.!]", "Né! 漢.", ["Né!", " 漢."]),
        ("x*", "ab", ["ab"]),
        ("\n", "", [""]),
        ("b", b"\xff\xfeb\xffc", ["\ufffd\ufffdb", "\ufffdc"]),
    ],
)
def test_an_answer_is_cut_after_each_match(pattern: str, text: str | bytes, steps: list[str]) -> None:
    assert cut(pattern, text) == steps


def test_the_end_token_belongs_to_the_last_step_and_an_empty_answer_has_none() -> None:
    cutter = StepCutter("\n", TOKENIZER)
    assert [(s.start, s.stop) for s in cutter(said("ab\nc\n"))] == [(0, 3), (3, 6)]
    assert cutter(said("", end=False)) == []


def test_steps_begin_in_equal_states_where_answers_began_alike() -> None:
    cutter = StepCutter("\n", TOKENIZER)
    one, other, third = (cutter(said(text)) for text in ("a\nb\nc\n", "a\nd\nc\n", "a\nb\nz"))
    assert one[0].state == other[0].state == third[0].state
    assert one[1].state == other[1].state
    assert one[2].state == third[2].state != other[2].state


def test_rewards_of_steps_are_turns_and_add_up_to_the_samples() -> None:
    by_steps = RewardItem(name=f"{GRADERS}:lengths_of_steps", weight=0.5)
    (sample,) = scored(by_steps, RewardItem(name=f"{GRADERS}:good", weight=2.0), texts=["a\nbcd\n"])
    assert [(t.start, t.stop, t.reward) for t in turns_of(sample) or []] == [(0, 2, 1.0), (2, 7, 2.0)]
    assert sample.reward_parts[f"{GRADERS}:lengths_of_steps"] == 6.0
    assert sample.reward == 0.5 * 6 + 2.0 * 6


@pytest.mark.parametrize("what", ["number", "short", "nan"])
def test_anything_but_a_number_for_each_step_is_a_failure_and_the_steps_stay(what: str) -> None:
    rewards = RewardRunner(RewardConfig(functions=[RewardItem(name=f"{GRADERS}:wrong_steps", args={"what": what})], steps="\n"), TOKENIZER)
    try:
        (sample,) = asyncio.run(rewards.score([said("a\nb\n")], PROMPT))
    finally:
        rewards.close()
    assert sample.reward is None
    assert rewards.counters[f"{GRADERS}:wrong_steps/{'nan' if what == 'nan' else 'steps'}"] == 1
    assert [type(turn) for turn in turns_of(sample) or []] == [TurnRecord, TurnRecord]


UNLUCKY = "(a|aa)+\\.", "a" * 100
"""A pattern and an answer that take longer than the age of the universe."""


def test_an_answer_that_the_pattern_is_lost_in_costs_a_deadline_and_the_loop_goes_on() -> None:
    pattern, text = UNLUCKY
    rewards = RewardRunner(RewardConfig(functions=[RewardItem(name=f"{GRADERS}:lengths_of_steps")], steps=pattern, timeout_s=0.2), TOKENIZER)

    async def case() -> tuple[list[Sample], int]:
        scoring, rounds = asyncio.ensure_future(rewards.score([said(text), said("aa.a.")], PROMPT)), 0
        while not scoring.done():
            await asyncio.sleep(0.01)
            rounds += 1
        return scoring.result(), rounds

    try:
        (lost, cut), rounds = asyncio.run(case())
    finally:
        rewards.close()
    assert rounds > 2, "nothing else had its turn"
    assert lost.reward is None
    assert rewards.counters["reward.steps/timeout"] == 1
    (whole,) = turns_of(lost) or []
    assert (whole.start, whole.stop, whole.reward) == (0, 101, 0.0), "estimators by turns need some of every sample"
    assert cut.reward == 3 + 2


def test_engine_calls_do_not_wait_behind_patterns() -> None:
    """As many lost searches as there could be threads; calls of the engine's beside them have threads of their own."""
    pattern, text = UNLUCKY
    rewards = RewardRunner(RewardConfig(functions=[RewardItem(name=f"{GRADERS}:lengths_of_steps")], steps=pattern, timeout_s=0.3), TOKENIZER)

    async def case() -> bool:
        scoring = asyncio.ensure_future(rewards.score([said(text)] * 40, PROMPT))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(int)
        waited = scoring.done()
        rewards.close()
        scoring.cancel()
        return waited

    assert not asyncio.run(case())


def test_a_pattern_that_is_always_lost_ends_the_run() -> None:
    pattern, text = UNLUCKY
    rewards = RewardRunner(RewardConfig(functions=[RewardItem(name=f"{GRADERS}:lengths_of_steps")], steps=pattern, timeout_s=0.05, max_failures=2), TOKENIZER)
    try:
        with pytest.raises(RewardError, match=r"^reward\.steps failed 2 times in a row .* was not through its 101 tokens within 0\.05 s"):
            asyncio.run(rewards.score([said(text)] * 2, PROMPT))
    finally:
        rewards.close()


def test_a_function_of_steps_needs_a_pattern_and_a_pattern_needs_one() -> None:
    with pytest.raises(ConfigError, match=r"takes the steps of an answer: say in reward\.steps"):
        resolve(RewardConfig(functions=[RewardItem(name=f"{GRADERS}:lengths_of_steps")]))
    with pytest.raises(ConfigError, match="no reward function takes `steps`"):
        resolve(RewardConfig(functions=[RewardItem(name="exact_match")], steps="\n"))
    with pytest.raises(ValueError, match="is no regular expression"):
        RewardConfig(steps="(")
