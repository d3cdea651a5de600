"""Decoding with a KV cache against transformers' own forward of the whole row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from miles.core.model.batch_invariant import make_batch_invariant
from miles.core.model.decode import Decoder
from miles.core.model.packed import packed_logprobs
from miles.core.model.token_softmax import softmax_parts
from tests.core.model.architectures import alone, pack, random_model, random_rows

PROMPTS = [1, 7, 33, 12, 64, 2, 31, 32, 40]
NEW = 40


def decoded(model: PreTrainedModel, rows: list[Tensor], prompts: list[int], new: int = NEW) -> Tensor:
    """Log-probs [rows, new] of the tokens behind each prompt, fed one at a time."""
    decoder = Decoder(model, max_rows=16, context=256)
    decoder.prefill([row[: prompt - 1] for row, prompt in zip(rows, prompts, strict=True)], range(len(rows)))
    found = []
    for place in range(new):
        at_N = torch.tensor(prompts) + place
        logits_NV = decoder.step(torch.stack([row[at - 1] for row, at in zip(rows, at_N, strict=True)]), at_N - 1)
        targets_N = torch.stack([row[at] for row, at in zip(rows, at_N, strict=True)])
        found.append(logits_NV.gather(1, targets_N[:, None])[:, 0] - softmax_parts(logits_NV)[1])
    return torch.stack(found, 1)


def expected(model: PreTrainedModel, rows: list[Tensor], prompts: list[int]) -> Tensor:
    parts = alone(model, rows)[0].detach().split([len(row) - 1 for row in rows])
    return torch.stack([part[prompt - 1 :] for part, prompt in zip(parts, prompts, strict=True)])


ARCHITECTURES = [
    ("qwen3", {}),
    ("qwen3", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    ("qwen3", {"num_attention_heads": 12, "num_key_value_heads": 1, "attention_bias": True}),
    ("qwen2", {}),
    ("llama", {"hidden_act": "gelu"}),
    ("mistral", {"sliding_window": 24}),
    ("olmo2", {}),
]


@pytest.mark.parametrize(("kind", "changes"), ARCHITECTURES, ids=lambda value: value if isinstance(value, str) else " ".join(value) or "plain")
def test_decoding_gives_the_logprobs_of_the_whole_row(kind: str, changes: dict) -> None:
    model = random_model(kind, **changes)
    rows = random_rows([prompt + NEW for prompt in PROMPTS])
    wanted = expected(model, rows, PROMPTS)
    assert float((decoded(model, rows, PROMPTS) - wanted).abs().max()) < 1e-5


def test_bfloat16_decodes_as_transformers_does() -> None:
    model = random_model(dtype=torch.bfloat16)
    rows = random_rows([prompt + NEW for prompt in PROMPTS])
    wanted = expected(model, rows, PROMPTS)
    assert float((decoded(model, rows, PROMPTS) - wanted).abs().mean()) < 3e-2


@pytest.mark.parametrize(
    ("kind", "changes"), [*ARCHITECTURES[:4], ("llama", {})], ids=lambda value: value if isinstance(value, str) else " ".join(value) or "plain"
)
def test_batch_invariant_decoding_and_packed_scoring_agree_bit_for_bit(kind: str, changes: dict) -> None:
    rows = random_rows([prompt + NEW for prompt in PROMPTS])
    tokens_T, positions_T, sequence_T = pack(rows)
    targets_N = torch.cat([torch.where(sequence_T == i)[0][prompt:] for i, prompt in enumerate(PROMPTS)])
    model = random_model(kind, **changes)
    make_batch_invariant(model)
    scored_N, _ = packed_logprobs(model, tokens_T, positions_T, sequence_T, targets_N, 1.0, 64)
    assert float((decoded(model, rows, PROMPTS) - scored_N.detach().view(len(rows), NEW)).abs().max()) == 0.0


def test_plain_decoding_and_packed_scoring_do_not() -> None:
    rows = random_rows([prompt + NEW for prompt in PROMPTS])
    tokens_T, positions_T, sequence_T = pack(rows)
    targets_N = torch.cat([torch.where(sequence_T == i)[0][prompt:] for i, prompt in enumerate(PROMPTS)])
    model = random_model()
    scored_N, _ = packed_logprobs(model, tokens_T, positions_T, sequence_T, targets_N, 1.0, 64)
    assert float((decoded(model, rows, PROMPTS) - scored_N.detach().view(len(rows), NEW)).abs().max()) > 0.0


@pytest.mark.parametrize("invariant", [False, True])
def test_equal_prompts_are_computed_once_and_a_copied_slot_goes_on_alike(invariant: bool) -> None:
    model = random_model()
    if invariant:
        make_batch_invariant(model)
    decoder = Decoder(model, max_rows=8, context=256)
    prompt, other = random_rows([50, 20])
    decoder.prefill([prompt, other, prompt, prompt], range(4))
    with torch.inference_mode():
        decoder.cache.copy(2, 1, 50)
    logits_NV = decoder.step(torch.full((4,), 5), torch.full((4,), 50))
    assert (logits_NV == logits_NV[0]).all()


@pytest.mark.parametrize("replaced", [False, True])
def test_new_weights_are_used_once_they_are_announced(replaced: bool) -> None:
    """Written in place, or, by a decoder that is unbound, in other memory."""
    model, new = random_model(), random_model(seed=1)
    rows = random_rows([30, 45])
    decoder = Decoder(model, max_rows=8, context=256)
    decoder.prefill([row[:-1] for row in rows], range(2))
    if replaced:
        decoder.unbind()
    with torch.no_grad():
        for own, other in zip(model.parameters(), new.parameters(), strict=True):
            if replaced:
                own.data = other.data
            else:
                own.copy_(other)
    decoder.weights_changed()
    decoder.prefill([row[:-1] for row in rows], range(2))
    found = decoder.step(torch.stack([row[-1] for row in rows]), torch.tensor([29, 44]))
    wanted = torch.stack([new(input_ids=row[None], use_cache=False).logits[0, -1] for row in rows])
    assert torch.allclose(found, wanted, atol=1e-4)


def test_memory_is_held_for_rows_that_came_and_given_back() -> None:
    decoder = Decoder(random_model(), max_rows=10_000, context=256)
    assert decoder.cache.keys[0].numel() == 0
    decoder.prefill(random_rows([10, 70]), range(2))
    assert (decoder.cache.rows, decoder.cache.capacity) == (2, 128)
    decoder.cache.drop()
    assert decoder.cache.keys[0].numel() == 0


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("granite", {"embedding_multiplier": 12.0}, "more than embedding"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}}, "dynamic"),
        ("gpt_neox", {}, "embed_tokens"),
    ],
)
def test_an_architecture_that_would_decode_wrongly_is_refused(kind: str, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Decoder(random_model(kind, **changes), max_rows=8, context=256)
