import json

from miles.data.toy import ALPHABET, write_reverse_task


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_no_test_word_is_in_a_training_file(tmp_path):
    paths = write_reverse_task(tmp_path, seed=3)
    test = {row["prompt"] for row in rows(paths["test"])}
    train = {row["prompt"] for row in rows(paths["train"])}
    sft = {row["messages"][0]["content"] for row in rows(paths["sft"])}
    assert not test & (train | sft)


def test_counts_are_those_asked_for_and_test_words_are_distinct(tmp_path):
    paths = write_reverse_task(tmp_path, seed=0, train=50, sft=60, test=40)
    assert [len(rows(paths[name])) for name in ("train", "sft", "test")] == [50, 60, 40]
    assert len({row["prompt"] for row in rows(paths["test"])}) == 40


def test_answers_are_reversed_words_of_three_to_five_letters(tmp_path):
    for row in rows(write_reverse_task(tmp_path, seed=1)["train"]):
        assert row["answer"] == "".join(reversed(row["prompt"]))
        assert 3 <= len(row["prompt"]) <= 5
        assert set(row["prompt"]) <= set(ALPHABET)


def test_a_rejected_answer_has_the_letters_of_the_chosen_one_in_another_order(tmp_path):
    paths = write_reverse_task(tmp_path, pairs=50)
    pairs, test = rows(paths["pairs"]), {row["prompt"] for row in rows(paths["test"])}
    assert len(pairs) == 50
    for row in pairs:
        assert row["chosen"] == row["prompt"][::-1] != row["rejected"]
        assert sorted(row["rejected"]) == sorted(row["prompt"])
        assert row["prompt"] not in test


def test_one_seed_gives_the_same_bytes_and_another_gives_others(tmp_path):
    first = write_reverse_task(tmp_path / "a", seed=7)
    again = write_reverse_task(tmp_path / "b", seed=7)
    other = write_reverse_task(tmp_path / "c", seed=8)
    assert all(first[name].read_bytes() == again[name].read_bytes() for name in first)
    assert all(first[name].read_bytes() != other[name].read_bytes() for name in first)
