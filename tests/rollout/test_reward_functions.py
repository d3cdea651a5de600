import threading

import numpy as np
import pytest

from miles.data.types import Prompt
from rollout.rewards.exact_match import exact_match
from rollout.rewards.maths import equivalent, last_boxed
from rollout.rewards.shaping import length, matches
from rollout.rewards.values import Failure, checked
from tests.rollout.groups_for_tests import group

SAMPLE = group(0, [0]).samples[0]


def row(answer) -> Prompt:
    return Prompt(prompt_id=0, tokens=np.array([1]), text="", columns={"answer": answer})


def graded(answer, text: str, **args) -> float:
    return equivalent(SAMPLE, prompt=row(answer), text=text, **args)


HALVES = ["1/2", "0.5", r"\frac12", r"\dfrac{1}{2}", r"\frac{1}{2}", ".5", r"\boxed{\frac12}", "The answer is 1/2.", r"So $x = \dfrac{1}{2}$"]


@pytest.mark.parametrize("answer", HALVES[:5])
@pytest.mark.parametrize("text", HALVES)
def test_a_half_is_a_half_however_it_is_written(answer, text):
    assert graded(answer, text) == 1.0


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("0.5", r"\boxed{50\%}", False),
        ("0.5", "50%", False),
        ("0.5", "The answer is 50%.", False),
        ("0.5", "50 percent", False),
        (r"50\%", "0.5", False),
        ("50", r"\boxed{50\%}", True),
        (r"50\%", "50%", True),
    ],
)
def test_a_percent_sign_is_a_unit_unless_asked(answer, text, right):
    assert graded(answer, text) == float(right)


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [("0.5", r"\boxed{50\%}", True), ("0.5", "The answer is 50%.", True), (r"50\%", "1/2", True), ("50", "50%", False), ("12.5%", "1/8", True)],
)
def test_a_percent_sign_divides_by_a_hundred_when_asked(answer, text, right):
    assert graded(answer, text, percent=True) == float(right)


@pytest.mark.parametrize(
    ("answer", "text"),
    [("(1,2,3)", "(1,2)"), ("(1,2)", "(1,2,3)"), ("(1,2)", "1"), ("1", "(1,2)"), ("1,2,3", "1,2"), ("1,2", r"\boxed{1}"), ("12", "1,2"), ("(1,2)", "(2,1)")],
)
def test_a_tuple_is_not_its_prefix_nor_its_reverse(answer, text):
    assert graded(answer, text) == 0.0


@pytest.mark.parametrize(
    ("answer", "text"),
    [("1000", "1,000"), ("1,000", "1000"), (1000, r"\boxed{1,000}"), ("1,000,000", "$10^6$"), ("1000", "The answer is 1,000."), ("12,345.5", "12345.5")],
)
def test_thousands_separators_are_read(answer, text):
    assert graded(answer, text) == 1.0


@pytest.mark.parametrize("said", [r"\boxed{7}", r"Therefore $\boxed{\boxed{7}}$.", "The answer is 7.", "**Answer:** 7\n"])
def test_an_answer_followed_by_a_long_tail_is_found(said):
    assert graded("7", said + " And some more words follow here, on and on." * 3000) == 1.0


def test_the_last_box_counts():
    assert graded("7", r"First I thought \boxed{6}, but it is \boxed{7}.") == 1.0
    assert graded("6", r"First I thought \boxed{6}, but it is \boxed{7}.") == 0.0


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{a}", "a"),
        (r"\boxed{\frac{1}{2}} tail }", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"{ \boxed{3}", "3"),
        (r"\boxed {3} and \boxed{4", "3"),
        (r"\fbox{5}", "5"),
        ("no box", None),
        (r"\boxed{", None),
    ],
)
def test_boxes_end_at_their_own_brace(text, content):
    assert last_boxed(text) == content


def test_ten_thousand_open_boxes_are_read_once():
    assert last_boxed(r"\boxed{" * 10_000) is None


@pytest.mark.parametrize("text", ["", "I do not know.", r"\boxed{}", "$$$", "\\", "{" * 100])
def test_no_answer_is_a_reward_of_zero_and_no_failure(text):
    assert graded("7", text) == 0.0


@pytest.mark.parametrize(("answer", "text"), [(7, "7"), (0.25, "1/4"), (1e-07, "0.0000001"), (-3, r"\boxed{-3}")])
def test_answers_may_be_json_numbers(answer, text):
    assert graded(answer, text) == 1.0


def test_a_row_whose_answer_is_no_mathematics_is_a_failure_and_not_a_zero():
    with pytest.raises(ValueError, match="prompt 0 is no mathematical expression: ''"):
        graded("", "7")


def test_maths_is_graded_in_a_thread_that_is_not_the_main_one():
    results = []
    thread = threading.Thread(target=lambda: results.append(graded("1/2", r"\boxed{0.5}")))
    thread.start()
    thread.join(30)
    assert results == [1.0]


@pytest.mark.parametrize(
    ("answer", "text", "args", "expected"),
    [
        ("cba", " cba\n", {}, 1.0),
        ("cba", "cb a", {}, 0.0),
        ("Größe", "größe", {}, 0.0),
        ("Größe", "GRÖSSE", {"ignore_case": True}, 1.0),
        (4, "4", {}, 1.0),
        (["4", "four"], "four", {}, 1.0),
    ],
)
def test_exact_match(answer, text, args, expected):
    assert exact_match(SAMPLE, prompt=row(answer), text=text, **args) == expected


@pytest.mark.parametrize(("tokens", "expected"), [(1, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (300, -1.0)])
def test_length_follows_the_worked_example(tokens, expected):
    sample = group(0, [0]).samples[0]
    long = type(sample)(
        sample_id="0/0",
        group_id="0",
        tokens=[1] * (tokens + 1),
        prompt_length=1,
        loss_mask=[True] * tokens,
        logprobs=[0.0] * tokens,
        weight_versions=[0] * tokens,
        status=sample.status,
    )
    assert length(long, prompt=row(""), text="", max_tokens=100, buffer=20) == expected


@pytest.mark.parametrize(("text", "expected"), [("<think>a\nb</think>c", 1.0), ("c", 0.0)])
def test_format_is_a_pattern_over_the_whole_response(text, expected):
    assert matches(SAMPLE, prompt=row(""), text=text, pattern="^<think>.+</think>.+$") == expected


@pytest.mark.parametrize(("value", "number"), [(1, 1.0), (True, 1.0), (np.float32(0.5), 0.5), (np.int64(2), 2.0), (np.bool_(False), 0.0)])
def test_numbers_of_every_make_are_rewards(value, number):
    assert checked(value) == number


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "none"),
        (float("nan"), "nan"),
        (float("inf"), "infinite"),
        ("1", "string"),
        ([1.0], "list"),
        ((1.0, 2.0), "list"),
        (np.ones(1), "list"),
        ({}, "type"),
    ],
)
def test_everything_else_is_a_failure_by_kind(value, kind):
    answer = checked(value)
    assert isinstance(answer, Failure)
    assert answer.kind == kind
