import sys

import numpy as np
import pytest

from miles.config import ConfigError
from miles.data.types import Prompt
from rollout.config import RewardConfig, RewardItem
from rollout.rewards.registry import check_columns, resolve

GRADERS = "tests.rollout.graders"


def of(*items):
    return resolve(RewardConfig(functions=[RewardItem(**item) for item in items]))


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"name": "exact_mach"}, r"unknown reward function 'exact_mach'; did you mean 'exact_match'\?"),
        ({"name": "zzz"}, "unknown reward function 'zzz'; valid: exact_match, format, judge, length, math, reward_model; a function of yours is named"),
        ({"name": "length", "args": {"max_tokens": 8, "buffer": 9}}, r"reward length: buffer = 9 must lie in 1\.\.max_tokens = 8"),
        ({"name": "length", "args": {"max_tokens": "8", "buffer": 9}}, "reward function 'length': one of its args has the wrong type"),
        ({"name": "format", "args": {"pattern": "(a"}}, r"reward format: pattern = '\(a' is no regular expression"),
        ({"name": "no_such_module:f"}, "no module named 'no_such_module' can be imported"),
        ({"name": f"{GRADERS}:goood"}, r"the module 'tests.rollout.graders' has no 'goood'; did you mean 'good'\?"),
        ({"name": f"{GRADERS}:not_a_function"}, "is a int, not a function"),
        (
            {"name": f"{GRADERS}:takes_no_prompt"},
            r"cannot be called as reward\(sample, \*, prompt, text\): got an unexpected keyword argument 'prompt'",
        ),
        ({"name": f"{GRADERS}:good", "args": {"bonsu": 1}}, "unexpected keyword argument 'bonsu'; its signature is .*bonus"),
        ({"name": "length"}, "missing a required argument: 'max_tokens'"),
        ({"name": "math:hypot", "args": {}}, "not written in Python|cannot be called"),
    ],
)
def test_what_cannot_be_called_is_refused_before_anything_starts(item, words):
    with pytest.raises(ConfigError, match=words):
        of(item)


def test_a_module_that_raises_on_import_is_refused_with_its_traceback(tmp_path, monkeypatch):
    (tmp_path / "broken_grader.py").write_text("raise OSError('no key for the judge')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"'broken_grader' raised on import:\n(.|\n)*OSError: no key for the judge"):
        of({"name": "broken_grader:f"})
    sys.modules.pop("broken_grader", None)


def test_no_function_at_all_is_refused():
    with pytest.raises(ConfigError, match=r"reward\.functions is empty"):
        of()


def test_the_same_function_twice_has_two_labels():
    a, b = of({"name": "format", "args": {"pattern": "a"}}, {"name": "format", "args": {"pattern": "b"}})
    assert [a.label, b.label] == ["format", "format#2"]


def test_functions_that_may_hang_go_to_a_process_and_coroutines_to_the_loop():
    places = [f.place for f in of({"name": f"{GRADERS}:good"}, {"name": f"{GRADERS}:slow_async"}, {"name": "math"}, {"name": "exact_match"})]
    assert places == ["process", "loop", "process", "inline"]


def test_a_column_that_no_prompt_has_is_refused():
    prompts = [Prompt(prompt_id=n, tokens=np.array([0]), text="", columns=columns) for n, columns in enumerate([{"level": 1}, {"answer": "7", "proof": ""}])]

    def check(*items):
        check_columns(RewardConfig(functions=[RewardItem(**item) for item in items]), prompts, "data")

    check({"name": "math"}, {"name": "exact_match", "args": {"column": "level"}}, {"name": f"{GRADERS}:good"})
    with pytest.raises(ConfigError, match="'math' compares with the column 'levle', which data lacks; did you mean 'level'"):
        check({"name": "math", "args": {"column": "levle"}})
