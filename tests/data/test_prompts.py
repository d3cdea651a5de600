import json

import pyarrow
import pyarrow.parquet
import pytest

from miles.config import ConfigError
from miles.data.config import PromptDataConfig
from miles.data.prompts import PromptDataset, PromptStream
from tests.data.tokenizers_for_tests import BOS, REFUSES_SYSTEM, WRITES_BOS, byte_tokenizer, user


def jsonl(folder, *rows) -> str:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(path, tokenizer=None, max_tokens=1000, **options) -> PromptDataset:
    return PromptDataset.load(PromptDataConfig(paths=[path], **options), tokenizer or byte_tokenizer(), max_tokens)


def test_a_string_becomes_a_user_turn_of_the_models_own_template(tmp_path):
    tokenizer = byte_tokenizer()
    prompt = load(jsonl(tmp_path, {"prompt": "2+2", "answer": "4", "level": 3}), tokenizer)[0]
    expected = tokenizer.apply_chat_template([user("2+2")], add_generation_prompt=True, return_dict=False)
    assert prompt.tokens.tolist() == expected
    assert prompt.text == "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.columns == {"answer": "4", "level": 3}
    assert prompt.prompt_id == 0


def test_messages_are_used_as_they_are(tmp_path):
    tokenizer = byte_tokenizer()
    messages = [{"role": "system", "content": "be brief"}, user("hi")]
    prompt = load(jsonl(tmp_path, {"prompt": messages, "answer": "x"}), tokenizer)[0]
    assert prompt.tokens.tolist() == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_parquet_messages_with_a_key_that_only_some_have(tmp_path):
    path = tmp_path / "a.parquet"
    messages = [{"role": "user", "content": "hi", "name": "ann"}, {"role": "user", "content": "there", "name": None}]
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [messages], "answer": ["x"]}), path)
    assert load(str(path))[0].text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>user\nthere<|im_end|>\n<|im_start|>assistant\n"


def test_columns_are_mapped_and_the_answer_is_found_under_its_own_name_too(tmp_path):
    path = jsonl(tmp_path, {"question": "2+2", "solution": "4"})
    prompt = load(path, prompt_column="question", answer_column="solution")[0]
    assert prompt.columns == {"solution": "4", "answer": "4"}


def test_a_system_message_comes_before_string_prompts(tmp_path):
    path = jsonl(tmp_path, {"prompt": "hi", "answer": "x"})
    assert load(path, system="be brief")[0].text.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi")


def test_one_bos_when_the_template_writes_it_and_the_tokenizer_adds_it(tmp_path):
    tokenizer = byte_tokenizer(WRITES_BOS, adds_bos=True)
    tokens = load(jsonl(tmp_path, {"prompt": "hi", "answer": "x"}), tokenizer)[0].tokens.tolist()
    assert tokens[0] == tokenizer.bos_token_id
    assert tokens.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("text", ["hi", BOS + "hi"])
def test_one_bos_without_a_template(tmp_path, text):
    tokenizer = byte_tokenizer(None, adds_bos=True)
    tokens = load(jsonl(tmp_path, {"prompt": text, "answer": "x"}), tokenizer, apply_chat_template=False)[0].tokens.tolist()
    assert tokens == tokenizer.encode("hi")
    assert tokens.count(tokenizer.bos_token_id) == 1


def test_no_bos_where_the_tokenizer_adds_none(tmp_path):
    tokenizer = byte_tokenizer(None, adds_bos=False)
    tokens = load(jsonl(tmp_path, {"prompt": "hi", "answer": "x"}), tokenizer, apply_chat_template=False)[0].tokens.tolist()
    assert tokenizer.bos_token_id not in tokens


def test_non_ascii_prompts_come_back_from_their_tokens(tmp_path):
    tokenizer = byte_tokenizer()
    prompt = load(jsonl(tmp_path, {"prompt": "größe 数学 🙂", "answer": "ü"}), tokenizer)[0]
    assert "größe 数学 🙂" in tokenizer.decode(prompt.tokens.tolist())


def test_long_prompts_are_left_out_counted_and_said_and_ids_are_places_after_that(tmp_path, caplog):
    path = jsonl(tmp_path, *[{"prompt": "x" * n, "answer": "a", "n": n} for n in (3, 500, 4, 600)])
    dataset = load(path, max_tokens=200)
    assert [(p.prompt_id, p.columns["n"]) for p in (dataset[0], dataset[1])] == [(0, 3), (1, 4)]
    assert (len(dataset), dataset.report.rows, dataset.report.too_long, dataset.report.kept) == (2, 4, 2, 2)
    assert f"{path}: 2 prompts of 4 rows" in caplog.text
    assert "left out: 2 longer than 200 tokens, 0 blank lines" in caplog.text


def test_the_option_can_only_lower_the_limit(tmp_path):
    path = jsonl(tmp_path, {"prompt": "x", "answer": "a"}, {"prompt": "x" * 100, "answer": "a"})
    assert load(path, max_tokens=1000, max_prompt_tokens=60).report.too_long == 1
    assert load(path, max_tokens=60, max_prompt_tokens=1000).report.too_long == 1


def test_nothing_left_is_an_error_with_the_counts(tmp_path):
    path = jsonl(tmp_path, {"prompt": "x" * 100, "answer": "a"})
    with pytest.raises(ConfigError, match=r"all 1 rows .* are longer than 20 tokens; the shortest has 1"):
        load(path, max_tokens=20)


def test_no_room_for_a_prompt_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="at most -6 tokens are left"):
        load(jsonl(tmp_path, {"prompt": "x", "answer": "a"}), max_tokens=-6)


@pytest.mark.parametrize("empty", ["", "  \n"])
def test_an_empty_prompt_is_refused_with_line_and_count(tmp_path, empty):
    path = jsonl(tmp_path, {"prompt": "a", "answer": "x"}, {"prompt": empty, "answer": "x"}, {"prompt": empty, "answer": "x"})
    with pytest.raises(ConfigError, match=r"train\.jsonl:2: column 'prompt' is empty; 2 of 3 rows"):
        load(path)


@pytest.mark.parametrize("empty", [[], [user("")]])
def test_empty_messages_are_refused(tmp_path, empty):
    with pytest.raises(ConfigError, match=r"train\.jsonl:2: column 'prompt' is empty"):
        load(jsonl(tmp_path, {"prompt": [user("a")], "answer": "x"}, {"prompt": empty, "answer": "x"}))


def test_prompts_of_mixed_kinds_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"column 'prompt' is a list at .*train\.jsonl:2, but a string"):
        load(jsonl(tmp_path, {"prompt": "a", "answer": "x"}, {"prompt": [user("b")], "answer": "x"}))


def test_a_null_answer_is_refused_by_place(tmp_path):
    with pytest.raises(ConfigError, match=r"column 'answer' is a null at .*train\.jsonl:2"):
        load(jsonl(tmp_path, {"prompt": "a", "answer": "x"}, {"prompt": "b", "answer": None}))


def test_a_dataset_without_answers_is_read_when_the_option_says_so(tmp_path):
    assert load(jsonl(tmp_path, {"prompt": "a"}), answer_column=None)[0].columns == {}


def test_a_missing_answer_column_says_which_option_asks_for_it(tmp_path):
    with pytest.raises(ConfigError, match=r"train\.jsonl:1 has no column 'answer' \(data\.answer_column"):
        load(jsonl(tmp_path, {"prompt": "a"}))


@pytest.mark.parametrize(
    ("message", "words"),
    [("hi", "message 0 is a string"), ({"content": "hi"}, "message 0 has no role"), ({"role": "user", "text": "hi"}, "message 0 has no content")],
)
def test_a_malformed_message_is_refused_by_row_and_message(tmp_path, message, words):
    with pytest.raises(ConfigError, match=rf"train\.jsonl:1: column 'prompt', {words}"):
        load(jsonl(tmp_path, {"prompt": [message], "answer": "x"}))


def test_a_prompt_that_ends_with_the_assistant_is_refused(tmp_path):
    row = {"prompt": [user("a"), {"role": "assistant", "content": "b"}], "answer": "x"}
    with pytest.raises(ConfigError, match="ends with an assistant turn"):
        load(jsonl(tmp_path, row))


def test_a_tokenizer_without_a_template_says_what_to_set(tmp_path):
    with pytest.raises(ConfigError, match=r"train\.jsonl:1: .*no chat template: set data\.apply_chat_template = false"):
        load(jsonl(tmp_path, {"prompt": "a", "answer": "x"}), byte_tokenizer(None))


def test_a_template_that_refuses_a_role_is_quoted(tmp_path):
    with pytest.raises(ConfigError, match=r"train\.jsonl:1: the chat template refuses the conversation: no system role here"):
        load(jsonl(tmp_path, {"prompt": "a", "answer": "x"}), byte_tokenizer(REFUSES_SYSTEM), system="be brief")


@pytest.mark.parametrize(
    ("options", "words"),
    [({"system": "s"}, "data.system is put before string prompts"), ({"apply_chat_template": False}, "apply_chat_template = false needs prompts as strings")],
)
def test_options_that_messages_cannot_follow_are_refused(tmp_path, options, words):
    with pytest.raises(ConfigError, match=words):
        load(jsonl(tmp_path, {"prompt": [user("a")], "answer": "x"}), **options)


def dataset_of(tmp_path, count: int, shuffle: bool = True) -> PromptDataset:
    return load(jsonl(tmp_path, *[{"prompt": f"p{i}", "answer": "x"} for i in range(count)]), shuffle=shuffle)


def test_every_epoch_of_the_stream_holds_every_prompt_once_in_another_order(tmp_path):
    stream = PromptStream(dataset_of(tmp_path, 20), seed=0)
    epochs = [[stream.prompt(e * 20 + i).prompt_id for i in range(20)] for e in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != list(range(20))


def test_the_stream_has_no_state_but_the_claim_id(tmp_path):
    dataset = dataset_of(tmp_path, 7)
    stream = PromptStream(dataset, seed=5)
    forwards = [stream.prompt(c).prompt_id for c in range(30)]
    resumed = PromptStream(dataset, seed=5)
    backwards = [resumed.prompt(c).prompt_id for c in reversed(range(30))]
    assert forwards == backwards[::-1]


def test_another_seed_is_another_order(tmp_path):
    dataset = dataset_of(tmp_path, 20)
    first, second = (PromptStream(dataset, seed) for seed in (0, 1))
    assert [first.prompt(i).prompt_id for i in range(20)] != [second.prompt(i).prompt_id for i in range(20)]


def test_without_shuffling_the_stream_is_the_file_again_and_again(tmp_path):
    stream = PromptStream(dataset_of(tmp_path, 3, shuffle=False), seed=0)
    assert [stream.prompt(c).prompt_id for c in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_a_step_of_more_prompts_than_there_are_is_refused(tmp_path):
    stream = PromptStream(dataset_of(tmp_path, 3), seed=0)
    stream.check_step(3)
    with pytest.raises(ConfigError, match=r"rollout\.prompts_per_step = 4, but there are 3 prompts in 3 rows: .*Use at most 3"):
        stream.check_step(4)
