"""Packed rows against transformers' own forward of each row alone."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from miles.core.model.packed import forward_hidden, output_head, packed_logprobs
from miles.data.common import first_places
from tests.core.model.architectures import alone, every_target, make_norms_exact, pack, random_model, random_rows

LENGTHS = [5, 17, 9, 16, 1, 40, 20, 2]


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).detach().abs().max())


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2"])
def test_logprobs_and_entropies_are_those_of_each_row_alone(kind: str, tied: bool) -> None:
    model = random_model(kind, dtype=torch.float64, tie_word_embeddings=tied)
    rows = random_rows(LENGTHS)
    expected = alone(model, rows, 0.7)
    tokens_T, positions_T, sequence_T = pack(rows)
    found = packed_logprobs(model, tokens_T, positions_T, sequence_T, every_target(positions_T), 0.7, 13, entropy=True)
    assert max(gap(f, e) for f, e in zip(found, expected, strict=True)) < 1e-12


@pytest.mark.parametrize("checkpointed", [False, True], ids=["stored", "checkpointed"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_gradients_are_those_of_each_row_alone(tied: bool, checkpointed: bool) -> None:
    model = random_model(dtype=torch.float64, tie_word_embeddings=tied)
    rows = random_rows(LENGTHS)
    reference = copy.deepcopy(model)
    logprobs_N, entropy_N = alone(reference, rows, 0.7)
    weights_N = torch.randn(len(logprobs_N), dtype=torch.float64)
    (logprobs_N @ weights_N + entropy_N @ weights_N.sin()).backward()
    if checkpointed:
        for layer in model.model.layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    tokens_T, positions_T, sequence_T = pack(rows)
    logprobs_N, entropy_N = packed_logprobs(model, tokens_T, positions_T, sequence_T, every_target(positions_T), 0.7, 13, entropy=True)
    (logprobs_N @ weights_N + entropy_N @ weights_N.sin()).backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert max(relative(parameter.grad, expected[name]) for name, parameter in model.named_parameters()) < 1e-12


def test_what_rows_begin_with_in_common_is_computed_once_with_the_same_gradients() -> None:
    """Answers to one prompt, of which one comes twice and one goes on where another ends, among rows of their own."""
    model = random_model(dtype=torch.float64)
    make_norms_exact(model)
    prompt, a, b, c, other = random_rows([12, 9, 6, 4, 15])
    long = torch.cat((prompt, a))
    rows = [long, torch.cat((prompt, b)), other, torch.cat((long, c)), long, torch.cat((prompt, c)), other[:1]]
    reference = copy.deepcopy(model)
    expected = alone(reference, rows, 0.7)
    weights_N = torch.randn(len(expected[0]), dtype=torch.float64)
    (expected[0] @ weights_N + expected[1] @ weights_N.sin()).backward()
    computed = []
    model.model.embed_tokens.register_forward_hook(lambda module, args, hidden: computed.append(hidden.shape[1]))
    tokens_T, positions_T, sequence_T = pack(rows)
    first_T = torch.from_numpy(first_places([row.numpy() for row in rows]))
    found = packed_logprobs(model, tokens_T, positions_T, sequence_T, every_target(positions_T), 0.7, 13, entropy=True, first_T=first_T)
    (found[0] @ weights_N + found[1] @ weights_N.sin()).backward()
    assert computed == [12 + 9 + 6 + 15 + 4 + 4]
    assert max(gap(f, e) for f, e in zip(found, expected, strict=True)) < 1e-12
    grads = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert max(relative(parameter.grad, grads[name]) for name, parameter in model.named_parameters()) < 1e-12


def test_rows_of_one_length_may_begin_alike_too() -> None:
    model = random_model(dtype=torch.float64)
    rows = random_rows([10, 10, 10])
    rows[2] = torch.cat((rows[0][:7], rows[2][7:]))
    expected, _ = alone(model, rows)
    tokens_T, positions_T, sequence_T = pack(rows)
    first_T = torch.from_numpy(first_places([row.numpy() for row in rows]))
    found, _ = packed_logprobs(model, tokens_T, positions_T, sequence_T, every_target(positions_T), 1.0, 64, first_T=first_T)
    assert gap(found, expected) < 1e-12


def test_another_order_of_the_rows_changes_nothing() -> None:
    model = random_model(dtype=torch.float64)
    rows = random_rows(LENGTHS)

    def scored(order: list[int]) -> list[torch.Tensor]:
        tokens_T, positions_T, sequence_T = pack([rows[i] for i in order])
        logprobs_N, _ = packed_logprobs(model, tokens_T, positions_T, sequence_T, every_target(positions_T), 1.0, 64)
        parts = logprobs_N.split([len(rows[i]) - 1 for i in order])
        return [parts[order.index(i)] for i in range(len(rows))]

    pairs = zip(scored(list(range(8))), scored([3, 1, 7, 0, 2, 6, 5, 4]), strict=True)
    assert max(gap(a, b) for a, b in pairs if len(a)) < 1e-12


def test_only_the_asked_targets_are_scored_in_their_order() -> None:
    model = random_model(dtype=torch.float64)
    rows = random_rows([6, 9])
    expected = alone(model, rows)[0]
    some_N = torch.tensor([14, 2, 7])
    found, entropy = packed_logprobs(model, *pack(rows), some_N, 1.0, 64)
    assert torch.allclose(found, expected[torch.tensor([12, 1, 5])], atol=1e-12)
    assert entropy is None


def test_a_sliding_window_cuts_what_lies_further_back() -> None:
    model = random_model("mistral", dtype=torch.float64, sliding_window=8)
    rows = random_rows([30, 5, 12])
    expected, _ = alone(model, rows)
    tokens_T, positions_T, sequence_T = pack(rows)
    found, _ = packed_logprobs(model, tokens_T, positions_T, sequence_T, every_target(positions_T), 1.0, 64)
    assert gap(found, expected) < 1e-12


def test_without_targets_every_parameter_still_gets_a_gradient_of_zero() -> None:
    """A data-parallel rank with nothing to score takes part in the collectives all the same."""
    model = random_model()
    logprobs_N, _ = packed_logprobs(model, *pack(random_rows([4])), torch.zeros(0, dtype=torch.int64), 1.0, 64)
    logprobs_N.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_no_tensor_of_the_graph_is_as_large_as_tokens_squared() -> None:
    model = random_model()
    rows = random_rows([50 + i for i in range(16)])
    tokens_T, positions_T, sequence_T = pack(rows)
    largest = 0

    def note(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        packed_logprobs(model, tokens_T, positions_T, sequence_T, every_target(positions_T), 1.0, 64)
    assert largest < len(tokens_T) ** 2 / 4


def test_hidden_states_are_those_before_the_head() -> None:
    model = random_model(dtype=torch.float64)
    rows = random_rows([7, 12])
    expected = torch.cat([model.model(input_ids=row[None], use_cache=False).last_hidden_state[0] for row in rows])
    assert gap(forward_hidden(model, *pack(rows)), expected) < 1e-12


def test_a_call_without_packed_rows_says_what_to_do() -> None:
    model = random_model()
    forward_hidden(model, *pack(random_rows([4])))
    with pytest.raises(ValueError, match="set_attn_implementation"):
        model(input_ids=torch.tensor([[1, 2, 3]]))


@pytest.mark.parametrize(("option", "value"), [("final_logit_softcapping", 30.0), ("logit_scale", 0.5), ("logits_scaling", 8.0)])
def test_a_head_with_more_behind_it_is_refused_by_name(option: str, value: float) -> None:
    model = random_model()
    setattr(model.config, option, value)
    with pytest.raises(ValueError, match=f"{option} = {value}"):
        output_head(model)


def test_a_head_with_a_bias_is_refused() -> None:
    model = random_model()
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(101))
    with pytest.raises(ValueError, match="bias"):
        output_head(model)
