"""The judge against a real HTTP server that misbehaves in turns."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import numpy as np
import pytest

from miles.config import ConfigError, load
from miles.data.types import Prompt, Sample, Status
from miles.run.recipe import RLRecipe
from rollout.config import RewardConfig, RewardItem
from rollout.rewards.judge import JudgeError, check, judge
from rollout.rewards.registry import resolve
from rollout.rewards.runner import RewardRunner
from tests.rollout.judge_server import said, serving

PROMPT = Prompt(prompt_id=0, tokens=np.array([0]), text="What is 3 + 4?", columns={"answer": "7"})
SAMPLE = Sample(
    sample_id="0/0",
    group_id="0",
    tokens=[0, 1],
    prompt_length=1,
    loss_mask=[True],
    logprobs=[0.0],
    weight_versions=[0],
    status=Status.COMPLETED,
)


def verdict(*script, text: str = "seven", times: int = 1, prompt: Prompt = PROMPT, **args):
    """`times` calls one after the other, each a number or its JudgeError; and the server."""

    async def ask():
        answers = []
        async with serving(*script) as server:
            for _ in range(times):
                try:
                    answers.append(await judge(SAMPLE, prompt=prompt, text=text, base_url=server.url, model="m", **{"backoff_s": 0.01, **args}))
                except JudgeError as error:
                    answers.append(error)
        return answers, server

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("Right but vague. Score: 7", 0.7),
        ("**Score:** 10/10", 1.0),
        ("SCORE = 0", 0.0),
        ("A first score: 2 is too low.\nscore: 5", 0.5),
        ("Score: 2.5", 0.25),
    ],
)
def test_the_last_score_is_moved_to_0_to_1(words, expected):
    (answer,), _ = verdict(words)
    assert answer == pytest.approx(expected)


def test_a_pattern_and_a_scale_of_ones_own():
    assert verdict("<g>4</g>", pattern=r"<g>(\d)</g>", scale=(1, 5))[0] == [0.75]


def test_without_a_scale_the_number_is_the_reward():
    assert verdict("score: -3", scale=None)[0] == [-3.0]


def test_the_judge_reads_prompt_response_and_answer():
    _, server = verdict("Score: 1", template="Q {prompt} R {response} A {answer} J {other}", text="seven")
    assert server.requests == [
        {"model": "m", "messages": [{"role": "user", "content": "Q What is 3 + 4? R seven A 7 J {other}"}], "max_tokens": 512, "temperature": 0.0}
    ]


def test_a_response_that_holds_a_field_does_not_see_the_answer():
    _, server = verdict("Score: 1", template="{response}|{answer}", text="{answer} {prompt}")
    assert server.requests[0]["messages"][0]["content"] == "{answer} {prompt}|7"


def test_a_row_without_an_answer_and_one_that_is_no_string():
    rows = [Prompt(prompt_id=0, tokens=np.array([0]), text="p", columns=columns) for columns in ({}, {"answer": [1, "é"]})]
    contents = [verdict("Score: 1", prompt=row, template="{response}|{answer}")[1].requests[0]["messages"][0]["content"] for row in rows]
    assert contents == ["seven|", 'seven|[1, "é"]']


@pytest.mark.parametrize(
    "fault",
    [
        500,
        503,
        429,
        "HANG",
        "DROP",
        b"<html>busy</html>",
        b"\xff\xfe",
        b"[]",
        {"error": "no"},
        {"choices": []},
        said(None),
        said(["x"]),
        "I would rather not",
        "Score: 11",
    ],
    ids=str,
)
def test_a_fault_that_may_pass_is_tried_again(fault):
    answers, server = verdict(fault, "Score: 9", timeout_s=0.5)
    assert answers == [0.9]
    assert len(server.requests) == 2


def test_many_faults_in_turn():
    answers, server = verdict(500, "HANG", "garbage", {"wrong": "json"}, "Score: 3", timeout_s=0.5, attempts=5)
    assert answers == [0.3]
    assert len(server.requests) == 5


def test_when_attempts_are_used_up_the_last_fault_is_named():
    (error,), server = verdict(500, 500, "no number", attempts=3)
    assert "nothing in the judge's words matches pattern" in str(error)
    assert "'no number' (the last of 3 attempts)" in str(error)
    assert len(server.requests) == 3


@pytest.mark.parametrize("fault", [400, 401, 404, "REDIRECT"])
def test_a_refusal_is_not_repeated_and_no_redirect_is_followed(fault):
    (error,), server = verdict(fault)
    assert f"refuses with status {307 if fault == 'REDIRECT' else fault}" in str(error)
    assert len(server.requests) == 1


def test_waits_between_attempts_double():
    _, server = verdict(500, attempts=4, backoff_s=0.05)
    gaps = np.diff(server.times)
    assert len(gaps) == 3
    # A sleep may take longer, never shorter.
    assert (gaps >= 0.7 * 0.05 * np.array([1, 2, 4])).all()


def test_a_verdict_that_is_kept_on_disk_is_not_asked_for_again(tmp_path):
    answers, server = verdict("Score: 4", "Score: 8", cache=str(tmp_path), times=3)
    assert answers == [0.4, 0.4, 0.4]
    assert len(server.requests) == 1
    assert [path.read_text() for path in tmp_path.rglob("*") if path.is_file()] == ["Score: 4"]


def test_words_that_the_pattern_is_lost_in_cost_a_deadline_and_the_loop_goes_on():
    async def ask():
        async with serving("a" * 100) as server:
            arguments = {"base_url": server.url, "model": "m", "pattern": r"((a|aa)+)\.", "attempts": 1, "timeout_s": 0.3}
            asking, rounds = asyncio.ensure_future(judge(SAMPLE, prompt=PROMPT, text="seven", **arguments)), 0
            while not asking.done():
                await asyncio.sleep(0.01)
                rounds += 1
            return asking.exception(), rounds

    error, rounds = asyncio.run(ask())
    assert "was not through the judge's words within 0.3 s" in str(error)
    assert rounds > 2


def test_a_verdict_that_cannot_be_kept_counts_all_the_same(tmp_path, caplog):
    (tmp_path / "cache").mkdir()
    for number in range(256):  # where each of the cache's folders would be
        (tmp_path / "cache" / f"{number:02x}").touch()
    answers, server = verdict("Score: 4", "Score: 8", cache=str(tmp_path / "cache"), times=2)
    assert answers == [0.4, 0.8]
    assert len(server.requests) == 2
    assert caplog.text.count("verdicts are not kept in") == 1


def test_a_cache_in_the_place_of_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cache = '.*file/cache' cannot be written: '.*/file' is no folder"):
        check(base_url="http://127.0.0.1:1/v1", cache=str(tmp_path / "file" / "cache"))


def test_kept_words_that_a_new_pattern_cannot_read_are_asked_for_again(tmp_path):
    async def ask():
        async with serving("Score: 4", "Grade: 8") as server:
            args = {"prompt": PROMPT, "text": "seven", "base_url": server.url, "model": "m", "cache": str(tmp_path)}
            return [await judge(SAMPLE, **args), *[await judge(SAMPLE, **args, pattern=r"Grade: (\d)") for _ in range(2)]], len(server.requests)

    assert asyncio.run(ask()) == ([0.4, 0.8, 0.8], 2)


@pytest.mark.parametrize("change", [{"text": "eight"}, {"model": "n"}, {"template": "{response}"}, {"temperature": 1.0}])
def test_another_content_is_another_entry(change, tmp_path):
    async def ask():
        async with serving("Score: 4", "Score: 8") as server:
            args = {"prompt": PROMPT, "text": "seven", "base_url": server.url, "model": "m", "cache": str(tmp_path)}
            return [await judge(SAMPLE, **args), await judge(SAMPLE, **{**args, **change})]

    assert asyncio.run(ask()) == [0.4, 0.8]


def test_what_cannot_be_read_is_not_kept(tmp_path):
    answers, server = verdict("no number", "Score: 6", attempts=1, times=2, cache=str(tmp_path))
    assert isinstance(answers[0], JudgeError)
    assert answers[1] == 0.6
    assert len(server.requests) == 2


def test_equal_responses_at_once_are_judged_once(tmp_path):
    async def ask():
        async with serving("Score: 4", "Score: 8") as server:
            calls = [judge(SAMPLE, prompt=PROMPT, text="seven", base_url=server.url, model="m", cache=str(tmp_path)) for _ in range(8)]
            return await asyncio.gather(*calls), len(server.requests)

    assert asyncio.run(ask()) == ([0.4] * 8, 1)


def run_rewards(*script, timeout_s: float = 5.0, **args):
    """Through the runner, as a run does it."""

    class Words:
        def decode(self, ids, **options):
            return "seven"

    async def score():
        async with serving(*script) as server:
            item = RewardItem(name="judge", args={"base_url": server.url, "model": "m", "backoff_s": 0.01, **args})
            rewards = RewardRunner(RewardConfig(functions=[item], timeout_s=timeout_s), Words())
            try:
                (sample,) = await rewards.score([SAMPLE], PROMPT)
            finally:
                rewards.close()
            return sample.reward, dict(rewards.counters), server

    return asyncio.run(score())


def test_the_whole_call_has_the_rewards_deadline():
    reward, counters, server = run_rewards("HANG", timeout_s=0.5)
    assert (reward, counters) == (None, {"judge/timeout": 1, "scored": 1})
    assert len(server.requests) == 1


def test_a_judge_that_fails_gives_no_reward_instead_of_zero():
    reward, counters, _ = run_rewards("garbage", attempts=2)
    assert (reward, counters) == (None, {"judge/raised": 1, "scored": 1})


def test_the_key_goes_to_the_judge_and_nowhere_else(monkeypatch, caplog, tmp_path):
    key = "sk-very-secret-0123456789"
    monkeypatch.setenv("A_JUDGES_KEY", key)
    caplog.set_level(logging.DEBUG)
    # The server repeats the header in its refusal.
    reward, _, server = run_rewards(401, api_key_env="A_JUDGES_KEY", cache=str(tmp_path))
    assert reward is None
    assert server.headers == [f"Bearer {key}"]
    assert "refuses with status 401" in caplog.text
    assert key not in caplog.text
    run_rewards("Score: 1", api_key_env="A_JUDGES_KEY", cache=str(tmp_path))
    kept = [os.fspath(path) + path.read_text() for path in tmp_path.rglob("*.txt")]
    assert len(kept) == 1
    assert key not in kept[0]


GOOD = {"base_url": "http://127.0.0.1:1/v1", "model": "m"}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"base_url": "127.0.0.1:8000"}, "is no http address"),
        ({"base_url": "https://me:pw@judge.example/v1"}, "has a login in it"),
        ({"template": "rate {reponse}"}, r"template has no \{response\}"),
        ({"pattern": "("}, r"pattern = '\(' is no regular expression"),
        ({"pattern": r"\d+"}, "has no group"),
        ({"scale": [5, 1]}, r"scale = \[5, 1\] must be the lowest and the highest"),
        ({"attempts": 0}, "attempts = 0 must be at least 1"),
        ({"attempts": "3"}, "one of its args has the wrong type"),
        ({"api_key": "sk-1"}, "unexpected keyword argument 'api_key'"),
        ({"api_key_env": "NO_SUCH_VARIABLE_HERE"}, "the environment variable that api_key_env names is not set"),
        ({"api_key_env": "HOME", "base_url": "http://judge.example/v1"}, "would carry the key unencrypted: use https"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_anything_starts(args, words):
    with pytest.raises(ConfigError, match=words):
        resolve(RewardConfig(functions=[RewardItem(name="judge", args={**GOOD, **args})]))


def test_a_key_may_go_unencrypted_to_this_machine():
    (function,) = resolve(RewardConfig(functions=[RewardItem(name="judge", args={**GOOD, "api_key_env": "HOME"})]))
    assert function.place == "loop"


def test_the_recipe_that_is_shipped_is_one_that_can_run():
    recipe = load(RLRecipe, Path(__file__).parents[2] / "scripts/recipes/judge_rl.toml").config
    (function,) = resolve(recipe.reward)
    assert (function.label, function.place) == ("judge", "loop")
    assert function.args["timeout_s"] * 4 < recipe.reward.timeout_s < recipe.rollout.timeout_s
