"""The model made on the spot is an ordinary Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles.core.model.tiny import make_tiny_model

MESSAGES = [{"role": "user", "content": "ab c"}, {"role": "assistant", "content": "cb"}]


def test_transformers_loads_it_and_embeddings_are_tied(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(tiny_model))


def test_the_chat_template_is_chatml_and_its_openings_are_one_token(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert text == "<|im_start|>user\nab c<|im_end|>\n<|im_start|>assistant\ncb<|im_end|>\n"
    ids = tokenizer.apply_chat_template(MESSAGES, return_dict=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_start|>user\n", *"ab c", "<|im_end|>", "\n", "<|im_start|>assistant\n", *"cb", "<|im_end|>", "\n"]


def test_pairs_of_characters_are_tokens_of_the_other_tokenizer(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(tmp_path, alphabet="abc", hidden=16, layers=1, pairs=True))
    ids = tokenizer.encode("cabca\n")
    assert tokenizer.convert_ids_to_tokens(ids) == ["c", "ab", "ca", "\n"]
    assert tokenizer.decode(ids) == "cabca\n"


def test_the_generation_prompt_opens_the_assistants_turn(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert tokenizer.apply_chat_template(MESSAGES[:1], tokenize=False, add_generation_prompt=True).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_text_comes_back_and_unknown_characters_are_marked(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert tokenizer.decode(tokenizer.encode("ab, 12")) == "ab, 12"
    assert tokenizer.decode(tokenizer.encode("aéb")) == "a<|unk|>b"


def test_the_end_token_is_not_the_padding(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert json.loads((tiny_model / "generation_config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id


def test_the_seed_decides_the_weights_and_leaves_the_generator_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first, again, other = ((make_tiny_model(tmp_path / str(i), alphabet="abc", seed=s) / "model.safetensors").read_bytes() for i, s in enumerate((0, 0, 1)))
    assert first == again != other
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("sizes", "message"), [({"alphabet": ""}, "alphabet is empty"), ({"hidden": 65}, "hidden = 65"), ({"heads": 4, "kv_heads": 3}, "heads = 4")]
)
def test_sizes_that_do_not_divide_are_refused(tmp_path: Path, sizes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_tiny_model(tmp_path / "model", **({"alphabet": "abc"} | sizes))  # type: ignore[arg-type]
    assert not (tmp_path / "model").exists()
