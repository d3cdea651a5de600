"""Reward functions by name or import path, checked at the start.

A reward is a plain function of the sample, or a coroutine function:

    def reward(sample: Sample, *, prompt: Prompt, text: str, **args) -> float

`text` is the decoded response without special tokens; `prompt.columns` has the row's other columns, the answer as `answer`; `args` are
`reward.functions[i].args` of the recipe. It returns one finite number. None, NaN, an infinite number, a string, a list, an exception
or a passed deadline are no reward: the sample's reward is unknown (None) and the failure is counted by kind.

One that takes `steps`, too, is given the texts of the answer's steps (`reward.steps` says where they end) and returns a list with a finite
number for each.

Where it runs: a coroutine function on the event loop of the rollout (it must not block); any other function of a user in a worker
process, which is killed and replaced when the function does not come back; built-in functions that cannot hang, in place.
"""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from miles.config import ConfigError, nearest
from miles.data.types import Prompt
from rollout.config import RewardConfig, RewardItem

Place = Literal["inline", "process", "loop"]

BUILT_IN: dict[str, tuple[str, Place]] = {
    "exact_match": ("rollout.rewards.exact_match:exact_match", "inline"),
    "math": ("rollout.rewards.maths:equivalent", "process"),
    "length": ("rollout.rewards.shaping:length", "inline"),
    "format": ("rollout.rewards.shaping:matches", "process"),
    "judge": ("rollout.rewards.judge:judge", "loop"),
    "reward_model": ("rollout.rewards.reward_model:reward_model", "process"),
}
_CHECKS = {
    "judge": "rollout.rewards.judge:check",
    "reward_model": "rollout.rewards.reward_model:check",
    "length": "rollout.rewards.shaping:check_length",
    "format": "rollout.rewards.shaping:check_matches",
}
"""What a built-in function has to say about its arguments before a run starts: called with the item's `args`, it raises ConfigError."""
_COMPARES = ("exact_match", "math")
PREPARATIONS = {"rollout.rewards.reward_model:reward_model": "rollout.rewards.reward_model:prepare"}
"""What a worker process calls with the item's `args` before the first call, whose deadline would count it."""


@dataclass(frozen=True)
class RewardFunction:
    """A resolved `RewardItem`. `label` is its name in counters and `reward_parts`, unique in the run; `target` is module:function; `by_steps`:
    it takes `steps`."""

    label: str
    target: str
    weight: float
    args: dict[str, Any]
    place: Place
    function: Callable[..., Any]
    by_steps: bool


def resolve(config: RewardConfig) -> list[RewardFunction]:
    """Import every function of `config` and check that it takes the arguments it will get.

    Raises:
        ConfigError: an unknown name (with the nearest), a module that does not import (with its traceback), a function that is not
            there, or one that does not take `sample`, `prompt`, `text` and the item's `args`, or cannot work with them.
    """
    if not config.functions:
        raise ConfigError("reward.functions is empty: name at least one reward function")
    names = [item.name for item in config.functions]
    resolved = []
    for index, item in enumerate(config.functions):
        target, place = _target(item.name)
        function = import_function(target)
        if place is None:
            place = "loop" if _is_async(function) else "process"
        by_steps = takes_steps(function)
        _check_arguments(item, function, by_steps)
        if by_steps and not config.steps:
            raise ConfigError(f"reward function {item.name!r} takes the steps of an answer: say in reward.steps what ends one, for example steps = '\\n'")
        _check_values(item)
        count = names[: index + 1].count(item.name)
        label = item.name if count == 1 else f"{item.name}#{count}"
        resolved.append(RewardFunction(label, target, item.weight, item.args, place, function, by_steps))
    if config.steps and not any(f.by_steps for f in resolved):
        raise ConfigError(f"reward.steps = {config.steps!r}, but no reward function takes `steps`: each would see the whole answer; leave it out")
    return resolved


def check_columns(config: RewardConfig, prompts: Iterable[Prompt], option: str) -> None:
    """Raises ConfigError where a built-in function compares with a column that none of the prompts of `option` has."""
    for item in config.functions:
        column = item.args.get("column", "answer")
        if item.name in _COMPARES and not any(column in prompt.columns for prompt in prompts):
            columns = sorted(next(iter(prompts)).columns)
            there = nearest(str(column), columns) if columns else ", which has no other than the prompts"
            raise ConfigError(f"reward function {item.name!r} compares with the column {column!r}, which {option} lacks{there}")


def takes_steps(function: Callable[..., Any]) -> bool:
    """Whether it has a parameter of that name."""
    try:
        return "steps" in inspect.signature(function).parameters
    except ValueError:  # not written in Python; `_check_arguments` refuses it
        return False


def import_function(target: str) -> Callable[..., Any]:
    """The function at `module:function`. Raises ConfigError as `resolve` does."""
    module_name, _, name = target.partition(":")
    module = _import(module_name, target)
    if not hasattr(module, name):
        functions = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ConfigError(f"reward function {target!r}: the module {module_name!r} has no {name!r}{nearest(name, functions)}")
    function = getattr(module, name)
    if not callable(function):
        raise ConfigError(f"reward function {target!r} is a {type(function).__name__}, not a function")
    return function


def _target(name: str) -> tuple[str, Place | None]:
    if name in BUILT_IN:
        return BUILT_IN[name]
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        raise ConfigError(f"unknown reward function {name!r}{nearest(name, list(BUILT_IN))}; a function of yours is named module:function")
    return name, None


def _import(module_name: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"reward function {target!r}: no module named {error.name!r} can be imported; put its folder on PYTHONPATH") from error
    except Exception as error:  # a user's module may raise anything, and the recovery is to say so before the run starts
        raise ConfigError(f"reward function {target!r}: the module {module_name!r} raised on import:\n{traceback.format_exc()}") from error


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _check_arguments(item: RewardItem, function: Callable[..., Any], by_steps: bool) -> None:
    given: dict[str, Any] = {"prompt": None, "text": ""} | ({"steps": []} if by_steps else {})
    call = f"reward(sample, *, {', '.join([*given, *item.args])})"
    try:
        signature = inspect.signature(function)
    except ValueError:
        raise ConfigError(f"reward function {item.name!r} is not written in Python and cannot be called as {call}") from None
    try:
        signature.bind(None, **given, **item.args)
    except TypeError as error:
        raise ConfigError(f"reward function {item.name!r} cannot be called as {call}: {error}; its signature is {signature}") from None


def _check_values(item: RewardItem) -> None:
    if item.name not in _CHECKS:
        return
    try:
        import_function(_CHECKS[item.name])(**item.args)
    except TypeError as error:
        raise ConfigError(f"reward function {item.name!r}: one of its args has the wrong type: {error}") from error
