"""The layers' own backward against autograd over transformers' modules, row by row."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from miles.core.model.batch_invariant import make_batch_invariant
from miles.core.model.fused_layer import fuse_layers
from miles.core.model.packed import packed_logprobs
from tests.core.model.architectures import alone, every_target, make_norms_exact, pack, random_model, random_rows

ROWS = random_rows([5, 17, 9, 16, 1, 40, 20, 2])


def loss(logprobs_N: Tensor, entropy_N: Tensor) -> Tensor:
    weights_N = torch.linspace(-1, 1, len(logprobs_N), dtype=logprobs_N.dtype)
    return logprobs_N @ weights_N + entropy_N @ weights_N.cos()


def packed_loss(model: PreTrainedModel) -> Tensor:
    tokens_T, positions_T, sequence_T = pack(ROWS)
    return loss(*packed_logprobs(model, tokens_T, positions_T, sequence_T, every_target(positions_T), 0.7, 13, entropy=True))


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    packed_loss(model).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", ["qwen3", "llama", "mistral"])
def test_loss_and_gradients_are_those_of_the_models_own_modules(kind: str) -> None:
    model = random_model(kind, dtype=torch.float64)
    reference = copy.deepcopy(model)
    make_norms_exact(reference)
    expected = loss(*alone(reference, ROWS, 0.7))
    expected.backward()
    assert fuse_layers(model) == 2
    make_norms_exact(model.model.norm)
    found = packed_loss(model)
    found.backward()
    assert abs((found - expected).item()) < 1e-12 * abs(expected.item())
    for (name, parameter), own in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (parameter.grad - own.grad).abs().max() < 1e-12 * own.grad.abs().max(), name


def test_a_checkpointed_layer_has_the_same_gradients_bit_for_bit() -> None:
    models = [random_model() for _ in range(2)]
    for model in models:
        fuse_layers(model)
    for layer in models[1].model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    stored, recomputed = (gradients(model) for model in models)
    assert all(torch.equal(gradient, recomputed[name]) for name, gradient in stored.items())


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_a_part_that_is_replaced_later_is_the_one_that_runs() -> None:
    model = random_model()
    fuse_layers(model)
    plain = packed_loss(model).item()
    own = model.model.layers[0].mlp.up_proj
    model.model.layers[0].mlp.up_proj = Doubled(own.in_features, own.out_features, bias=False)
    model.model.layers[0].mlp.up_proj.weight = own.weight
    with torch.no_grad():
        doubled = packed_loss(model).item()
        model.model.layers[0].mlp.up_proj = own
        own.weight.mul_(2)
        by_weight = packed_loss(model).item()
    assert doubled != plain
    assert doubled == pytest.approx(by_weight, rel=1e-5)


def test_a_hook_on_a_part_runs() -> None:
    model = random_model()
    fuse_layers(model)
    seen = []
    model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda *_: seen.append(True))
    packed_loss(model)
    assert seen == [True]


def test_layers_that_are_not_of_the_family_keep_their_forward() -> None:
    exact = random_model()
    make_batch_invariant(exact)
    others = [random_model("qwen2"), random_model("llama", attention_bias=True), random_model(dtype=torch.bfloat16), exact]
    assert [fuse_layers(model) for model in others] == [0, 0, 0, 0]
