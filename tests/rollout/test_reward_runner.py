"""Real worker processes, real deadlines; what they leave behind is looked up in /proc."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from miles.data.types import Prompt, Sample, Status
from rollout.config import RewardConfig, RewardItem
from rollout.rewards.runner import RewardRunner
from rollout.rewards.values import RewardError
from tests.rollout import graders
from tests.rollout.tokenizers_for_rewards import tokenizer

GRADERS = "tests.rollout.graders"

TOKENIZER = tokenizer()
PROMPT = Prompt(prompt_id=0, tokens=np.array([0]), text="", columns={"answer": "7"})


def said(text: str, status: Status = Status.COMPLETED, end: bool = True) -> Sample:
    response = TOKENIZER.encode(text) + ([TOKENIZER.eos_token_id] if end else [])
    n = len(response)
    return Sample(
        sample_id=f"0/{text}",
        group_id="0",
        tokens=[0, *response],
        prompt_length=1,
        loss_mask=[True] * n,
        logprobs=[0.0] * n,
        weight_versions=[0] * n,
        status=status,
    )


@contextmanager
def runner(*items, **options):
    rewards = RewardRunner(RewardConfig(functions=[RewardItem(**item) for item in items], **options), TOKENIZER)
    try:
        yield rewards
    finally:
        rewards.close()


def score(rewards: RewardRunner, *texts: str) -> list[float | None]:
    return [s.reward for s in asyncio.run(rewards.score([said(t) for t in texts], PROMPT))]


def children() -> set[int]:
    listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True, check=True).stdout
    return {int(line.split()[0]) for line in listed.splitlines() if "rollout.rewards.worker" in line}


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int, within_s: float = 20.0) -> bool:
    end = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pid)


def test_the_reward_is_the_weighted_sum_and_parts_are_kept():
    with runner(
        {"name": "exact_match", "weight": 2.0},
        {"name": f"{GRADERS}:good", "weight": 0.5, "args": {"bonus": 1}},
        {"name": f"{GRADERS}:slow_async"},
    ) as rewards:
        first, second = asyncio.run(rewards.score([said("7"), said("123")], PROMPT))
    assert (first.reward, second.reward) == (2.0 * 1 + 0.5 * 2 + 2.0, 0.5 * 4 + 2.0)
    assert first.reward_parts == {"exact_match": 1.0, f"{GRADERS}:good": 2.0, f"{GRADERS}:slow_async": 2.0}


def test_the_text_has_no_special_tokens_and_the_tokens_are_untouched():
    with runner({"name": "exact_match"}) as rewards:
        sample = said("7")
        (scored,) = asyncio.run(rewards.score([sample], PROMPT))
    assert scored.reward == 1.0
    assert scored.tokens.tolist() == sample.tokens.tolist()


@pytest.mark.parametrize("status", [Status.FAILED, Status.ABORTED, Status.TIMED_OUT])
def test_a_trajectory_that_ended_badly_has_no_reward_instead_of_zero(status):
    with runner({"name": "exact_match"}) as rewards:
        (scored,) = asyncio.run(rewards.score([said("7", status)], PROMPT))
    assert scored.reward is None


@pytest.mark.parametrize("kind", ["none", "nan", "infinite", "string", "list", "type"])
def test_what_is_no_number_is_counted_by_kind_and_named(kind, caplog):
    with runner({"name": f"{GRADERS}:returns", "args": {"what": kind}}) as rewards:
        assert score(rewards, "a") == [None]
    assert rewards.counters[f"{GRADERS}:returns/{kind}"] == 1
    assert f"'{GRADERS}:returns' gave no reward for sample 0/a ({kind})" in caplog.text


def test_one_failing_function_leaves_the_sum_unknown_and_keeps_the_other_parts():
    with runner({"name": "exact_match"}, {"name": f"{GRADERS}:returns", "args": {"what": "nan"}}) as rewards:
        (scored,) = asyncio.run(rewards.score([said("7")], PROMPT))
    assert scored.reward is None
    assert scored.reward_parts == {"exact_match": 1.0}


@pytest.mark.parametrize(("name", "error"), [(f"{GRADERS}:raises", "the grader is broken"), (f"{GRADERS}:raises_async", "the async grader is broken")])
def test_a_function_that_always_raises_ends_the_run_with_its_traceback(name, error):
    with runner({"name": name}, max_failures=3) as rewards:
        assert score(rewards, "a", "b") == [None, None]
        with pytest.raises(RewardError, match=rf"'{name}' failed 3 times in a row (.|\n)*Traceback(.|\n)*ZeroDivisionError: {error}"):
            score(rewards, "c")
        with pytest.raises(RewardError):
            score(rewards, "d")
    assert rewards.counters[f"{name}/raised"] == 3


def test_failures_that_are_not_in_a_row_do_not_end_the_run():
    with runner({"name": f"{GRADERS}:fails_every_other"}, max_failures=2) as rewards:
        for _ in range(4):
            assert score(rewards, "x") == [None]
            assert score(rewards, "y") == [1.0]
    assert rewards.counters[f"{GRADERS}:fails_every_other/none"] == 4


def test_one_functions_success_does_not_hide_anothers_failures():
    with (
        runner({"name": "exact_match"}, {"name": f"{GRADERS}:raises"}, max_failures=2) as rewards,
        pytest.raises(RewardError, match=f"{GRADERS}:raises"),
    ):
        score(rewards, "a", "b")


def test_a_function_that_hangs_is_bounded_and_its_worker_replaced():
    with runner({"name": f"{GRADERS}:hangs_on_x"}, timeout_s=2.0) as rewards:
        score(rewards, "a")
        (before,) = children()
        assert score(rewards, "x", "b") == [None, 1.0]
        (after,) = children()
    assert rewards.counters[f"{GRADERS}:hangs_on_x/timeout"] == 1
    assert before != after
    assert not alive(before)


def test_a_function_that_hangs_does_not_hold_up_the_event_loop():
    async def both(rewards):
        ticks = 0
        task = asyncio.ensure_future(rewards.score([said("x")], PROMPT))
        while not task.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks

    with runner({"name": f"{GRADERS}:hangs_on_x"}, timeout_s=0.5) as rewards:
        assert asyncio.run(both(rewards)) > 5


def test_once_the_run_is_over_calls_that_wait_do_not_each_take_a_deadline():
    with runner({"name": f"{GRADERS}:hangs_on_x"}, timeout_s=0.3, max_failures=2) as rewards:
        with pytest.raises(RewardError, match="timeout"):
            score(rewards, *["x"] * 400)
        assert rewards.counters[f"{GRADERS}:hangs_on_x/timeout"] == 2


def test_what_a_hanging_function_started_is_killed_with_it(tmp_path):
    pid_file = tmp_path / "pids"
    with runner({"name": f"{GRADERS}:hangs_with_a_child", "args": {"pid_file": str(pid_file)}}, timeout_s=2.0) as rewards:
        assert score(rewards, "a") == [None]
    worker, child = map(int, pid_file.read_text().split())
    assert gone(worker)
    assert gone(child)


def test_a_worker_that_dies_is_counted_with_its_exit_code_and_replaced(caplog):
    with runner({"name": f"{GRADERS}:dies"}, {"name": f"{GRADERS}:good"}) as rewards:
        assert score(rewards, "a") == [None]
        assert score(rewards, "b") == [None]
    assert rewards.counters[f"{GRADERS}:dies/crashed"] == 2
    assert "exit code 7" in caplog.text


def test_a_function_may_print():
    with runner({"name": f"{GRADERS}:prints"}) as rewards:
        assert score(rewards, "a") == [1.0]


def test_calls_are_shared_out_over_the_workers():
    with runner({"name": f"{GRADERS}:pid"}, workers=2) as rewards:
        pids = set(score(rewards, *"abcdefghijklmnop"))
        assert pids == children()
        assert len(pids) == 2


def test_a_coroutine_past_its_deadline_is_counted_and_the_others_go_on():
    with runner({"name": f"{GRADERS}:slow_async", "args": {"seconds": 60}}, timeout_s=0.2) as rewards:
        assert score(rewards, "a", "b") == [None, None]
    assert rewards.counters[f"{GRADERS}:slow_async/timeout"] == 2


def test_a_coroutine_that_ignores_its_cancellation_is_not_waited_for():
    async def reward_and_finished(rewards):
        (sample,) = await rewards.score([said("a")], PROMPT)
        return sample.reward, list(graders.finished)

    graders.finished.clear()
    with runner({"name": f"{GRADERS}:stubborn"}, timeout_s=0.1) as rewards:
        assert asyncio.run(reward_and_finished(rewards)) == (None, [])


def test_maths_works_in_workers_from_a_thread():
    results = []
    with runner({"name": "math"}, workers=2) as rewards:
        thread = threading.Thread(target=lambda: results.extend(score(rewards, r"\boxed{7}", "The answer is 8.", "7.0", "49/7")))
        thread.start()
        thread.join(60)
    assert results == [1.0, 0.0, 1.0, 1.0]


def test_a_group_that_is_cancelled_leaves_the_runner_usable():
    async def cancelled_then_scored(rewards):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await rewards.score([said("x"), said("x")], PROMPT)
        return await rewards.score([said("a")], PROMPT)

    with runner({"name": f"{GRADERS}:hangs_on_x"}, timeout_s=2.0) as rewards:
        score(rewards, "a")
        assert [s.reward for s in asyncio.run(cancelled_then_scored(rewards))] == [1.0]


def test_close_ends_every_worker_also_in_the_middle_of_a_call():
    async def closed_while_hanging(rewards):
        task = asyncio.ensure_future(rewards.score([said("x")], PROMPT))
        await asyncio.sleep(0.2)
        rewards.close()
        with pytest.raises(RewardError, match="closed"):
            await task

    before = children()
    with runner({"name": f"{GRADERS}:hangs_on_x"}, workers=2, timeout_s=60) as rewards:
        score(rewards, "a")
        ours = children() - before
        assert len(ours) == 2
        asyncio.run(closed_while_hanging(rewards))
    assert not any(alive(pid) for pid in ours)


def test_a_worker_ends_when_its_parent_is_killed_in_the_middle_of_a_call(tmp_path):
    pid_file = tmp_path / "pids"
    program = (
        "import asyncio, sys; sys.path[:0] = sys.argv[2:]\n"
        "from tests.rollout.test_reward_runner import PROMPT, RewardConfig, RewardItem, RewardRunner, TOKENIZER, said\n"
        "item = RewardItem(name='tests.rollout.graders:hangs_with_a_child', args={'pid_file': sys.argv[1]})\n"
        "asyncio.run(RewardRunner(RewardConfig(functions=[item], timeout_s=300), TOKENIZER).score([said('a')], PROMPT))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(pid_file), *sys.path])
    try:
        end = time.monotonic() + 90
        while (not pid_file.exists() or not pid_file.read_text()) and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
    worker, child = map(int, pid_file.read_text().split())
    try:
        assert gone(worker)
    finally:
        os.kill(child, 9)  # a child of the user's own function outlives a killed parent; this test ends it
