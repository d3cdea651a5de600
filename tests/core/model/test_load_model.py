"""Model directories are read strictly: what is missing or does not fit is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles.core.model.config import ModelConfig
from miles.core.model.load import context_length, end_tokens, load_model, load_tokenizer, longest_sequence, stop_token_ids, tokenizer_of


@pytest.fixture
def copied(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def _edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_weights_come_in_the_dtype_asked_for_and_eval_mode(tiny_model: Path) -> None:
    model = load_model(tiny_model, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not model.training


@pytest.mark.parametrize("change", ["missing", "unexpected", "mismatched"])
def test_tensors_that_do_not_fit_are_refused_by_name(copied: Path, change: str) -> None:
    tensors = load_file(copied / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del tensors[name]
    elif change == "unexpected":
        name = "model.layers.7.mlp.up_proj.weight"
        tensors[name] = torch.zeros(3)
    else:
        tensors[name] = torch.zeros(3, 3)
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        load_model(copied)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_model(tmp_path)


def test_a_name_that_nothing_answers_to_is_refused() -> None:
    with pytest.raises(ValueError, match="'no-such/model'"):
        load_model("no-such/model")


def test_an_architecture_that_is_no_causal_language_model_is_refused(copied: Path) -> None:
    _edit(copied, model_type="t5", architectures=["T5Model"])
    with pytest.raises(ValueError, match="no causal language model"):
        load_model(copied)


def test_context_length_is_the_configurations(tiny_model: Path) -> None:
    assert context_length(tiny_model) == 256


def test_stop_tokens_of_all_sources_are_joined(copied: Path) -> None:
    tokenizer = load_tokenizer(copied)
    _edit(copied, eos_token_id=[10, 11])
    newline = tokenizer.convert_tokens_to_ids("\n")
    assert stop_token_ids(copied, tokenizer, ["\n"]) == tuple(sorted({10, 11, tokenizer.eos_token_id, newline}))


@pytest.mark.parametrize("text", ["ab", "é", ""])
def test_a_stop_text_that_is_not_one_token_is_refused(tiny_model: Path, text: str) -> None:
    with pytest.raises(ValueError, match=f"stop text '{text}' must be one token"):
        stop_token_ids(tiny_model, load_tokenizer(tiny_model), [text])


def test_a_model_that_brings_its_own_code_is_read_where_the_recipe_trusts_it(copied: Path) -> None:
    _edit(copied, model_type="brought", auto_map={"AutoConfig": "configuration_brought.BroughtConfig"})
    (copied / "configuration_brought.py").write_text(
        'from transformers import Qwen3Config\n\n\nclass BroughtConfig(Qwen3Config):\n    model_type = "brought"\n', encoding="utf-8"
    )
    model = ModelConfig(path=str(copied), trust_remote_code=True)
    tokenizer = tokenizer_of(model)
    assert longest_sequence(model) == 256
    assert end_tokens(model, tokenizer, []) == (tokenizer.eos_token_id,)
