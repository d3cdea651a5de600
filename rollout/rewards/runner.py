"""Scores samples with the recipe's reward functions, counts what fails, and ends the run when a function keeps failing."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from miles.data.types import Prompt, Sample
from rollout.config import RewardConfig
from rollout.rewards.patterns import searched
from rollout.rewards.pool import WorkerPool
from rollout.rewards.registry import RewardFunction, resolve
from rollout.rewards.steps import Step, StepCutter, with_steps
from rollout.rewards.values import Answer, Failure, RewardError, answered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_STEPS = "reward.steps"


@dataclass
class _Streak:
    """Failures in a row of one function, and the last of them."""

    length: int = 0
    last: Failure | None = None


class RewardRunner:
    """Every sample's reward is the weighted sum of all functions, or None when one of them gave none or there is no function at all.

    Attributes:
        counters: `scored` samples, and failures as `<function>/<kind>`, for example `math/timeout` (kinds: see `values.Failure`); `reward.steps/timeout`
            are answers that its pattern did not get through.
    Raises:
        ConfigError: a function cannot be resolved (see `registry.resolve`).
    """

    def __init__(self, config: RewardConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.counters: Counter[str] = Counter()
        self._config = config
        self._tokenizer = tokenizer
        self._functions = resolve(config) if config.functions else []
        self._streaks = {label: _Streak() for label in [_STEPS, *(f.label for f in self._functions)]}
        self._error: RewardError | None = None
        self._closed = False
        self._left_behind: set[asyncio.Task[Any]] = set()
        self._cut = StepCutter(config.steps, tokenizer) if config.steps else None
        in_process = [f for f in self._functions if f.place == "process"]
        self._index = {f.label: i for i, f in enumerate(in_process)}
        self._pool = WorkerPool(in_process, config.workers) if in_process else None

    async def score(self, samples: Sequence[Sample], prompt: Prompt) -> list[Sample]:
        """`samples` of one prompt with their rewards, in order. Samples that ended badly are not scored and keep reward None.

        Raises:
            RewardError: a function has failed `reward.max_failures` times in a row, now or before, or the runner is closed.
        """
        self._raise_if_over()
        scored = await asyncio.gather(*(self._score(sample, prompt) for sample in samples))
        self._raise_if_over()
        return scored

    def close(self) -> None:
        """End every worker process and cancel coroutines that are still running. Idempotent."""
        self._closed = True
        if self._pool is not None:
            self._pool.close()
        for task in self._left_behind:
            task.cancel()

    async def _score(self, sample: Sample, prompt: Prompt) -> Sample:
        steps = await self._steps(sample)
        if isinstance(steps, Failure):
            assert self._cut is not None
            whole = self._cut.uncut(sample)
            return with_steps(sample, whole, [0.0] * len(whole)).with_reward(None)
        if self._cut is not None:
            sample = with_steps(sample, steps, [0.0] * len(steps))
        if not sample.status.trainable or not self._functions:
            return sample.with_reward(None)
        text = str(self._tokenizer.decode(sample.response_tokens.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False))
        written = [step.text for step in steps]
        answers = await asyncio.gather(*(self._counted(f, sample, prompt, text, written if f.by_steps else None) for f in self._functions))
        known = {f.label: answer for f, answer in zip(self._functions, answers, strict=True) if not isinstance(answer, Failure)}
        parts = {label: sum(answer) if isinstance(answer, list) else answer for label, answer in known.items()}
        self.counters["scored"] += 1
        if len(parts) < len(self._functions):
            return sample.with_reward(None, parts)
        weighted = [[f.weight * value for value in answer] for f in self._functions if isinstance(answer := known[f.label], list)]
        if weighted:
            sample = with_steps(sample, steps, [sum(of_step) for of_step in zip(*weighted, strict=True)])
        return sample.with_reward(sum(f.weight * parts[f.label] for f in self._functions), parts)

    async def _steps(self, sample: Sample) -> list[Step] | Failure:
        """Where the pattern ends them, within the deadline; the event loop goes on meanwhile."""
        if self._cut is None:
            return []
        try:
            steps = await searched(partial(self._cut, sample, self._config.timeout_s))
        except TimeoutError:
            failure = Failure("timeout", f"{self._config.steps!r} was not through its {sample.response_length} tokens within {self._config.timeout_s:g} s")
            self._count(_STEPS, failure, sample)
            return failure
        self._streaks[_STEPS].length = 0
        return steps

    async def _counted(self, function: RewardFunction, sample: Sample, prompt: Prompt, text: str, steps: list[str] | None) -> Answer | Failure:
        if function.place == "process":
            answer = await self._call_process(function, sample, prompt, text, steps)
        else:
            answer = await self._call_here(function, sample, prompt, text, steps)
        if isinstance(answer, Failure):
            self._count(function.label, answer, sample)
        else:
            self._streaks[function.label].length = 0
        return answer

    async def _call_process(self, function: RewardFunction, sample: Sample, prompt: Prompt, text: str, steps: list[str] | None) -> Answer | Failure:
        assert self._pool is not None
        return await self._pool.call((self._index[function.label], sample, prompt, text, steps), self._config.timeout_s)

    async def _call_here(self, function: RewardFunction, sample: Sample, prompt: Prompt, text: str, steps: list[str] | None) -> Answer | Failure:
        given = {} if steps is None else {"steps": steps}
        try:
            value = function.function(sample, prompt=prompt, text=text, **given, **function.args)
            return answered(value, steps) if function.place == "inline" else await self._await(value, steps)
        except Exception:  # noqa: BLE001 - a reward may raise anything; the failure is counted and carries the traceback
            return Failure("raised", traceback.format_exc())

    async def _await(self, coroutine: Any, steps: list[str] | None) -> Answer | Failure:
        """A coroutine's answer within the deadline. One that ignores its cancellation is left behind until `close`, not waited for."""
        task = asyncio.ensure_future(coroutine)
        self._left_behind.add(task)
        task.add_done_callback(self._left_behind.discard)
        try:
            done, _ = await asyncio.wait({task}, timeout=self._config.timeout_s)
        finally:
            task.cancel()
        if not done:
            return Failure("timeout", f"it did not come back within {self._config.timeout_s:g} s and was cancelled")
        return Failure("raised", "it was cancelled from inside") if task.cancelled() else answered(task.result(), steps)

    def _count(self, label: str, failure: Failure, sample: Sample) -> None:
        if self._error is not None or self._closed:
            return
        key, name = f"{label}/{failure.kind}", label if label == _STEPS else f"reward function {label!r}"
        self.counters[key] += 1
        if self.counters[key] == 1:
            logger.warning("%s gave no reward for sample %s (%s): %s", name, sample.sample_id, failure.kind, failure.detail)
        streak = self._streaks[label]
        streak.length += 1
        streak.last = failure
        if streak.length >= self._config.max_failures:
            kinds = ", ".join(f"{count} x {k}" for k, count in sorted(self.counters.items()) if k.startswith(f"{label}/"))
            self._error = RewardError(
                f"{name} failed {streak.length} times in a row (reward.max_failures = {self._config.max_failures}; "
                f"in all: {kinds}). The last one, for sample {sample.sample_id}: {failure.kind}: {failure.detail}"
            )
            if self._pool is not None:
                self._pool.stop()  # or each call that waits would take a deadline more before the run can end

    def _raise_if_over(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise RewardError("the rewards were closed")
