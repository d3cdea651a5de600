import json
import logging

import numpy as np
import pytest

from miles.config import ConfigError
from miles.data.config import SFTDataConfig
from miles.data.sft import SFTDataset, SFTStream
from tests.data.tokenizers_for_tests import BOS, DROPS_THINKING, END, assistant, byte_tokenizer, user

TWO_TURNS = [user("one"), assistant("ONE"), user("two"), assistant("TWO")]
THINKING = [user("one"), assistant("<think>hm</think>ONE"), user("two"), assistant("<think>so</think>TWO")]


def jsonl(folder, *rows) -> str:
    path = folder / "sft.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(path, tokenizer=None, max_tokens=1000, **options) -> SFTDataset:
    return SFTDataset.load(SFTDataConfig(paths=[path], **options), tokenizer or byte_tokenizer(), max_tokens)


def trained(tokenizer, sample) -> str:
    return tokenizer.decode(sample.response_tokens[sample.loss_mask].tolist())


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [
        ("completion", f"TWO{END}"),
        ("assistant", f"ONE{END}TWO{END}"),
        # All but the very first token, which nothing predicts.
        ("all", "user\none<|im_end|>\n<|im_start|>assistant\nONE<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\nTWO<|im_end|>\n"),
    ],
)
def test_train_on_says_which_tokens_count(tmp_path, train_on, expected):
    tokenizer = byte_tokenizer()
    dataset = load(jsonl(tmp_path, {"messages": TWO_TURNS}), tokenizer, messages_column="messages", train_on=train_on)
    assert len(dataset) == 1
    assert trained(tokenizer, dataset[0]) == expected


def test_prompt_and_completion_columns_make_a_conversation(tmp_path):
    tokenizer = byte_tokenizer()
    sample = load(jsonl(tmp_path, {"prompt": "hi", "completion": "ho"}), tokenizer)[0]
    assert tokenizer.decode(sample.tokens[: sample.prompt_length].tolist()) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert trained(tokenizer, sample) == f"ho{END}"


def test_a_one_token_answer_is_trained(tmp_path):
    tokenizer = byte_tokenizer(None)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    sample = load(jsonl(tmp_path, {"prompt": "2+2=", "completion": "4"}), tokenizer)[0]
    assert sample.response_length == 1
    assert sample.loss_mask.tolist() == [True]
    assert trained(tokenizer, sample) == "4"


@pytest.mark.parametrize("pad_is_eos", [True, False])
def test_the_end_token_counts_also_when_it_is_the_pad_token(tmp_path, pad_is_eos):
    tokenizer = byte_tokenizer(pad_is_eos=pad_is_eos)
    sample = load(jsonl(tmp_path, {"prompt": "hi", "completion": "ho"}), tokenizer)[0]
    assert sample.tokens[-1] == tokenizer.eos_token_id
    assert bool(sample.loss_mask[-1])


def test_without_a_chat_template_strings_are_joined_and_the_end_token_added(tmp_path):
    tokenizer = byte_tokenizer(None, adds_bos=True)
    sample = load(jsonl(tmp_path, {"prompt": "hi ", "completion": "ho"}), tokenizer)[0]
    assert tokenizer.decode(sample.tokens.tolist()) == f"{BOS}hi ho{END}"
    assert trained(tokenizer, sample) == f"ho{END}"


def test_a_template_that_rewrites_history_gives_one_sample_per_turn_and_says_so(tmp_path, caplog):
    tokenizer = byte_tokenizer(DROPS_THINKING)
    with caplog.at_level(logging.WARNING):
        dataset = load(jsonl(tmp_path, {"messages": THINKING}), tokenizer, messages_column="messages")
    assert [trained(tokenizer, s) for s in (dataset[0], dataset[1])] == [f"<think>hm</think>ONE{END}", f"<think>so</think>TWO{END}"]
    assert (dataset.report.rows, dataset.report.split, dataset.report.kept) == (1, 1, 2)
    assert "rewrites history: 1 of 1 rows" in caplog.text


def test_training_on_all_tokens_of_a_rewritten_history_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"sft\.jsonl:1: .*train_on = 'all' cannot be right here"):
        load(jsonl(tmp_path, {"messages": THINKING}), byte_tokenizer(DROPS_THINKING), messages_column="messages", train_on="all")


def test_long_and_unaligned_rows_are_left_out_counted_and_said(tmp_path, caplog):
    tokenizer = byte_tokenizer(merges=(("Ċ", "Ċ"),))
    path = jsonl(tmp_path, *[{"prompt": "a", "completion": c} for c in ("b", "b" * 500, "\nb")])
    report = load(path, tokenizer, max_tokens=200).report
    assert (report.rows, report.kept, report.too_long, report.unaligned) == (3, 1, 1, 1)
    assert f"{path}: 1 samples of 3 rows" in caplog.text


def test_nothing_left_is_an_error_with_the_counts(tmp_path):
    with pytest.raises(ConfigError, match=r"no conversation is left of 1 rows .*1 are longer than 20 tokens"):
        load(jsonl(tmp_path, {"prompt": "a" * 50, "completion": "b"}), max_tokens=20)


@pytest.mark.parametrize(
    ("row", "options", "words"),
    [
        ({"prompt": "a", "completion": ""}, {}, "column 'completion' is empty; 1 of 1"),
        ({"prompt": "", "completion": "b"}, {}, "column 'prompt' is empty"),
        ({"prompt": "a", "complete": "b"}, {}, r"has no column 'completion' .*did you mean 'complete'\?"),
        ({"prompt": "a", "completion": 3}, {}, "a completion is a string"),
        ({"messages": [user("a")]}, {"messages_column": "messages"}, "no assistant turn to train; its roles are user"),
        ({"messages": [*TWO_TURNS, user("a")]}, {"messages_column": "messages", "train_on": "completion"}, "ends with an assistant turn, not 'user'"),
        ({"messages": "a"}, {"messages_column": "messages"}, "column 'messages' is a string"),
        ({"messages": []}, {"messages_column": "messages"}, "column 'messages' is empty"),
        ({"messages": [assistant("a")]}, {"messages_column": "messages"}, "no message before the assistant's first turn"),
    ],
)
def test_rows_that_cannot_be_trained_are_refused_by_place(tmp_path, row, options, words):
    with pytest.raises(ConfigError, match=words) as error:
        load(jsonl(tmp_path, row), **options)
    assert "sft.jsonl:1" in str(error.value)


def test_messages_without_a_template_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no chat template: give prompt and completion strings"):
        load(jsonl(tmp_path, {"messages": TWO_TURNS}), byte_tokenizer(None), messages_column="messages")


def stream_of(tmp_path, count: int, seed: int = 0) -> SFTStream:
    return SFTStream(load(jsonl(tmp_path, *[{"prompt": f"p{i}", "completion": "c"} for i in range(count)])), seed)


def ids(batch) -> list[str]:
    return [sample.sample_id for sample in batch]


def test_batches_cover_every_epoch_once_across_its_end(tmp_path):
    stream = stream_of(tmp_path, 10)
    seen = [i for step in range(5) for i in ids(stream.batch(step, 4))]
    assert sorted(seen[:10]) == sorted(seen[10:])
    assert len(set(seen[:10])) == 10


def test_a_batch_depends_on_its_step_alone(tmp_path):
    first = stream_of(tmp_path, 10)
    forwards = [ids(first.batch(step, 4)) for step in range(8)]
    resumed = stream_of(tmp_path, 10)
    assert ids(resumed.batch(7, 4)) == forwards[7]
    assert ids(resumed.batch(2, 4)) == forwards[2]


def test_a_fingerprint_changes_with_whatever_moves_a_row(tmp_path):
    def fingerprint(*rows: str, seed: int = 0) -> str:
        return SFTStream(load(jsonl(tmp_path, *[{"prompt": row, "completion": "c"} for row in rows])), seed).fingerprint

    same = fingerprint("a", "b", "c")
    assert same == fingerprint("a", "b", "c")
    others = [fingerprint("a", "b", "c", seed=1), fingerprint("a", "c", "b"), fingerprint("a", "b"), fingerprint("a", "b", "d")]
    assert len({same, *others}) == 5


def test_an_empty_turn_that_no_token_ends_is_refused_by_place(tmp_path):
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    path = jsonl(tmp_path, {"messages": [user("a"), assistant("")]})
    with pytest.raises(ConfigError, match=r"sft\.jsonl:1: an assistant turn is empty"):
        load(path, byte_tokenizer(template), messages_column="messages")


def test_samples_have_the_dtypes_and_marks_of_a_trajectory_without_an_engine(tmp_path):
    sample = load(jsonl(tmp_path, {"prompt": "a", "completion": "b"}))[0]
    assert sample.weight_versions.tolist() == [-1] * sample.response_length
    assert np.isfinite(sample.logprobs).all()


def test_a_rows_weight_stays_with_all_its_samples(tmp_path):
    path = jsonl(tmp_path, {"messages": THINKING, "w": 2}, {"messages": [user("hi"), assistant("ho")], "w": 0.5})
    dataset = load(path, byte_tokenizer(DROPS_THINKING), messages_column="messages", weight_column="w")
    assert [dataset[i].metadata for i in range(3)] == [{"weight": 2.0}, {"weight": 2.0}, {"weight": 0.5}]


@pytest.mark.parametrize("weight", [0, -1, "2", None, True, [1], float("inf")])
def test_a_weight_that_cannot_count_is_refused_by_place(tmp_path, weight):
    rows = [{"prompt": "a", "completion": "b", "w": 1.0}, {"prompt": "a", "completion": "b", "w": weight}]
    with pytest.raises(ConfigError, match=r"sft\.jsonl:2: column 'w' is .*: a weight is a number above 0"):
        load(jsonl(tmp_path, *rows), weight_column="w")


def test_a_weight_column_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.weight_column"):
        load(jsonl(tmp_path, {"prompt": "a", "completion": "b"}), weight_column="weight")


def test_a_turn_that_is_marked_is_context_alone(tmp_path):
    tokenizer = byte_tokenizer()
    marked = [user("one"), {**assistant("ONE"), "train": False}, user("two"), assistant("TWO")]
    plain, other = load(jsonl(tmp_path, {"messages": TWO_TURNS}, {"messages": marked}), tokenizer, messages_column="messages")
    assert trained(tokenizer, other) == f"TWO{END}"
    assert other.tokens.tolist() == plain.tokens.tolist()


def test_a_marked_turn_of_a_rewritten_history_gives_no_sample(tmp_path):
    tokenizer = byte_tokenizer(DROPS_THINKING)
    marked = [*THINKING[:3], {**THINKING[3], "train": False}]
    dataset = load(jsonl(tmp_path, {"messages": marked}), tokenizer, messages_column="messages")
    assert [trained(tokenizer, dataset[i]) for i in range(len(dataset))] == [f"<think>hm</think>ONE{END}"]


def test_templates_never_see_the_mark(tmp_path):
    shows_keys = "{% for m in messages %}{{ m.keys() | list | sort | join(',') }}:{{ m['content'] }};{% endfor %}"
    tokenizer = byte_tokenizer(shows_keys)
    sample = load(jsonl(tmp_path, {"messages": [user("q"), {**assistant("A"), "train": True}]}), tokenizer, messages_column="messages", train_on="all")[0]
    assert tokenizer.decode(sample.tokens.tolist()) == "content,role:q;content,role:A;"


@pytest.mark.parametrize(
    ("turn", "options", "words"),
    [
        ({"train": "no"}, {}, "message 1: train is 'no', but it is either true or false"),
        ({"train": False}, {}, '"train": false on message 1 leaves nothing to train'),
        ({"train": False}, {"train_on": "completion"}, '"train": false on message 1 leaves nothing to train'),
        ({"train": False}, {"train_on": "all"}, "data.train_on = 'all' trains every token"),
    ],
)
def test_marks_that_cannot_be_meant_are_refused_by_place(tmp_path, turn, options, words):
    with pytest.raises(ConfigError, match=words):
        load(jsonl(tmp_path, {"messages": [user("q"), {**assistant("A"), **turn}]}), messages_column="messages", **options)
