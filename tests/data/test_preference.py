"""Pairs: what counts in each answer, what is left out, and what is refused by file, line and column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles.config import ConfigError
from miles.core.model.load import load_tokenizer
from miles.data.config import PairDataConfig
from miles.data.preference import PairDataset, PairStream

ROW = {"prompt": "abc", "chosen": "cba", "rejected": "bca"}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(tiny_model)


def load(tokenizer: Any, folder: Path, rows: list[dict[str, Any]], limit: int = 256, **options: Any) -> PairDataset:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return PairDataset.load(PairDataConfig(paths=[str(path)], **options), tokenizer, limit)


def trained(tokenizer: Any, sample: Any) -> str:
    return tokenizer.decode(sample.response_tokens[sample.loss_mask].tolist())


def test_the_answer_and_its_end_token_count_and_the_prompt_is_shared(tokenizer, tmp_path):
    chosen, rejected = load(tokenizer, tmp_path, [ROW])[0]
    assert trained(tokenizer, chosen) == "cba<|im_end|>"
    assert trained(tokenizer, rejected) == "bca<|im_end|>"
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "abc"}], add_generation_prompt=True, tokenize=False)
    for sample in (chosen, rejected):
        assert tokenizer.decode(sample.tokens[: sample.prompt_length].tolist()) == prompt


def test_messages_give_the_same_pair_as_strings(tokenizer, tmp_path):
    user, good, bad = ({"role": r, "content": c} for r, c in (("user", "abc"), ("assistant", "cba"), ("assistant", "bca")))
    plain = load(tokenizer, tmp_path, [ROW])[0]
    apart = load(tokenizer, tmp_path, [{"prompt": [user], "chosen": [good], "rejected": [bad]}])[0]
    whole = load(tokenizer, tmp_path, [{"chosen": [user, good], "rejected": [user, bad]}], prompt_column=None)[0]
    for pair in (apart, whole):
        for one, other in zip(pair, plain, strict=True):
            assert np.array_equal(one.tokens, other.tokens)
            assert one.prompt_length == other.prompt_length


def test_an_earlier_assistant_turn_is_context(tokenizer, tmp_path):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    chosen, _ = load(tokenizer, tmp_path, [{"prompt": talk, "chosen": "d", "rejected": "e"}])[0]
    assert trained(tokenizer, chosen) == "d<|im_end|>"


def test_long_and_equal_pairs_are_left_out_counted_and_said(tokenizer, tmp_path, caplog):
    rows = [ROW, ROW | {"rejected": "b" * 60}, ROW | {"rejected": "cba"}]
    report = load(tokenizer, tmp_path, rows, limit=60).report
    assert (report.rows, report.kept, report.too_long, report.identical) == (3, 1, 1, 1)
    assert "1 pairs of 3 rows" in caplog.text


def test_a_file_without_a_usable_pair_is_refused(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match=r"no pair is left .* 1 with equal answers"):
        load(tokenizer, tmp_path, [ROW | {"rejected": "cba"}])


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, {}, r"pairs.jsonl:2 has no column 'rejected' \(data.rejected_column\)"),
        (ROW | {"chosen": " "}, {}, r"pairs.jsonl:2: column 'chosen' is empty"),
        (ROW | {"chosen": 3}, {}, r"column 'chosen' is a number at .*pairs.jsonl:2, but a string"),
    ],
)
def test_a_wrong_row_is_named(tokenizer, tmp_path, row, options, message):
    with pytest.raises(ConfigError, match=message):
        load(tokenizer, tmp_path, [ROW, row], **options)


def test_conversations_on_different_prompts_are_refused(tokenizer, tmp_path):
    row = {side: [{"role": "user", "content": side}, {"role": "assistant", "content": "b"}] for side in ("chosen", "rejected")}
    with pytest.raises(ConfigError, match="they answer different prompts"):
        load(tokenizer, tmp_path, [row], prompt_column=None)


def test_strings_without_a_prompt_column_are_refused(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="needs whole conversations, but column 'chosen' has strings"):
        load(tokenizer, tmp_path, [ROW], prompt_column=None)


def test_a_batch_holds_whole_pairs_and_an_epoch_every_pair_once(tokenizer, tmp_path):
    rows = [{"prompt": "abc"[i], "chosen": "def"[i], "rejected": "ghi"[i]} for i in range(3)]
    stream = PairStream(load(tokenizer, tmp_path, rows), seed=0)
    ids = [s.sample_id for step in range(3) for s in stream.batch(step, 2)]
    assert all(one.partition("/")[0] == other.partition("/")[0] for one, other in zip(ids[::2], ids[1::2], strict=True))
    assert [i.partition("/")[2] for i in ids[:2]] == ["chosen", "rejected"]
    assert sorted(ids[:6]) == sorted(ids[6:])


def test_the_fingerprint_sees_a_changed_answer(tokenizer, tmp_path):
    first = PairStream(load(tokenizer, tmp_path, [ROW]), seed=0).fingerprint
    assert PairStream(load(tokenizer, tmp_path, [ROW]), seed=0).fingerprint == first
    assert PairStream(load(tokenizer, tmp_path, [ROW | {"rejected": "acb"}]), seed=0).fingerprint != first
