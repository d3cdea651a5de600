"""What layers keep never changes a gradient's bits, unless 8 bits were asked for; hooks refuse what autograd would have refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from miles.core.memory.actions import Action
from miles.core.memory.float8 import compress, restore
from miles.core.model.config import LoraConfig
from miles.core.model.fused_layer import fuse_layers
from miles.core.model.lora import add_adapters
from miles.core.model.packed import packed_logprobs
from miles.core.planning.meters import Meter
from tests.core.model.architectures import every_target, pack, random_model, random_rows
from trainer.fsdp.model import decoder_layers
from trainer.split_forward.activations import Activations, Choice, compressible

K, L, R = Action.KEEP, Action.COMPRESS, Action.RECOMPUTE
LENGTHS = [5, 3, 7]


def made(kind: str, *, fused: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    model = random_model(kind.removesuffix("+lora"), dtype=dtype)
    if kind.endswith("+lora"):
        add_adapters(model, LoraConfig(rank=2, alpha=4), 0)
    if fused:
        fuse_layers(model)
    return model


def gradients(model: Any, activations: Activations | None = None, actions: Sequence[Action] | None = None) -> dict[str, Tensor]:
    if activations is not None:
        activations.choice = None if actions is None else Choice(actions)
    loss_of(model).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def loss_of(model: Any) -> Tensor:
    tokens_T, positions_T, sequence_T = pack(random_rows(LENGTHS))
    logprobs_N, _ = packed_logprobs(model, tokens_T, positions_T, sequence_T, every_target(positions_T), 1.0, 64)
    return (logprobs_N * torch.linspace(-1, 1, len(logprobs_N))).sum()


def attached(model: Any) -> Activations:
    activations = Activations(model.config.intermediate_size)
    activations.attach(decoder_layers(model))
    return activations


@pytest.mark.parametrize(
    ("kind", "fused"),  # layers with experts are never fused
    [*((kind, fused) for kind in ("qwen3", "llama", "qwen3+lora") for fused in (True, False)), ("qwen3_moe", False)],
)
def test_kept_and_recomputed_layers_give_autograds_bits(kind: str, fused: bool) -> None:
    expected = gradients(made(kind, fused=fused))
    model = made(kind, fused=fused)
    activations = attached(model)
    for actions in ((K, K), (R, R), (K, R), (R, K)):
        found = gradients(model, activations, actions)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), actions
    assert activations.ledger.now == 0


def test_a_recomputed_layer_holds_its_input_alone() -> None:
    """15 tokens of width 64 a layer. What the call gives to all layers is held once: rotation tables, 2 x 15 x 16 values, and 15 positions."""
    model = made("qwen3")
    activations = attached(model)
    activations.choice = Choice([R, R])
    loss = loss_of(model)
    assert activations.ledger.now == 4 * (2 * 15 * 64 + 2 * 15 * 16) + 8 * 15
    loss.backward()
    assert activations.ledger.now == 0


def test_a_compressed_layer_holds_one_byte_in_place_of_four() -> None:
    """In one of the MLP's tensors, 15 x 100; it holds the call's cosines, sines and positions too, where a kept layer had the cosines."""
    model = made("qwen3")
    activations = attached(model)
    held = []
    for last in (K, L):
        activations.choice = Choice([K, last])
        with Meter(model, activations.ledger) as meter:
            loss = loss_of(model)
            held.append(meter.saved_bytes)
            del loss
    assert held[0] - held[1] == 3 * 15 * 100 - 4 * 15 * 16 - 8 * 15


def test_a_compressed_layer_changes_gradients_a_little_from_itself_on_down() -> None:
    model = made("qwen3")
    activations = attached(model)
    expected = gradients(model, activations, (K, K))
    upper, lower = gradients(model, activations, (K, L)), gradients(model, activations, (L, K))
    assert torch.equal(lower["model.layers.1.mlp.down_proj.weight"], expected["model.layers.1.mlp.down_proj.weight"])
    for found in (upper, lower):
        moved = {n: float((found[n] - expected[n]).norm() / expected[n].norm()) for n in expected}
        assert 1e-5 < moved["model.layers.0.self_attn.q_proj.weight"] < 0.05
        assert max(moved.values()) < 0.1
    assert activations.overflows == 0


def test_a_value_that_8_bits_do_not_have_makes_its_layer_compute_again() -> None:
    model = made("qwen3")
    activations = attached(model)
    with torch.no_grad():
        model.model.layers[1].mlp.gate_proj.weight.mul_(1e4)
    expected = gradients(model, activations, (K, K))
    found = gradients(model, activations, (K, L))
    assert activations.overflows == 1
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_was_compressed_can_be_computed_again_after_the_forward() -> None:
    class Never(Choice):
        def stays(self, layer: int) -> bool:
            return False

    model = made("qwen3")
    activations = attached(model)
    expected = gradients(model, activations, (K, K))
    activations.choice = Never([L, L])
    loss_of(model).backward()
    assert activations.revoked == 2
    assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("actions", [(R, R), (L, L)])
def test_a_second_backward_through_a_retained_graph(actions: tuple[Action, ...]) -> None:
    model = made("qwen3", fused=False)
    activations = attached(model)
    activations.choice = Choice(actions)
    loss = loss_of(model)
    names, parameters = zip(*model.named_parameters(), strict=True)
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), names


class Squares(nn.Module):
    """Saves its input twice and its MLP's output; `spoil` changes one of them afterwards."""

    def __init__(self, spoil: str = ""):
        super().__init__()
        self.weight, self.spoil = nn.Parameter(torch.eye(4)), spoil

    def forward(self, x: Tensor) -> Tensor:
        wide = x @ self.weight
        y = (wide.square() * x).sum(0, keepdim=True) + x
        if self.spoil == "wide":
            wide.add_(1)
        return y


def spoilt(action: Action, spoil: str) -> Tensor:
    """The gradient of `Squares`' input after something was changed in place behind its back."""
    layer = Squares(spoil)
    activations = Activations(4)
    activations.attach([layer])
    activations.choice = Choice([action])
    leaf = torch.arange(12.0).view(3, 4).requires_grad_()
    x = leaf.clone()
    y = layer.forward(x)
    if spoil == "input":
        with torch.no_grad():
            x.add_(1)
    y.sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize(("action", "spoil"), [(K, "wide"), (K, "input"), (L, "wide"), (L, "input"), (R, "input")])
def test_a_tensor_changed_after_it_was_saved_is_refused(action: Action, spoil: str) -> None:
    with pytest.raises(RuntimeError, match=r"in place|inplace"):
        spoilt(action, spoil)


def test_a_second_forward_ends_before_a_tensor_is_changed() -> None:
    assert torch.equal(spoilt(R, "wide"), spoilt(K, ""))


def test_the_tensor_to_compress_is_the_first_that_nobody_else_needs() -> None:
    x, wide, other = torch.ones(3, 4), torch.ones(3, 8), torch.ones(3, 8)
    part, whole = torch.ones(6, 8)[:3], torch.ones(3, 8, dtype=torch.int64)
    assert compressible([x, whole, part, wide, other, wide.view(3, 8)], [x], 8) == [3, 5]
    assert compressible([x, wide.t(), wide, other], [x], 8) == [3], "saved in two shapes"
    assert compressible([x, wide], [x, wide], 8) == []
    assert compressible([x, wide], [x], None) == []


def test_float8_keeps_what_it_can_hold_and_says_what_it_cannot() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = every[~every.float().isnan()]
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert torch.equal(restore(numbers, dtype), numbers.to(dtype))
        packed = compress(numbers.to(dtype))
        assert packed is not None
        assert torch.equal(packed.view(torch.uint8), numbers.view(torch.uint8))
    assert compress(torch.tensor([1.0, 449.0])) is None
    assert compress(torch.tensor([1.0, float("nan")])) is None
    assert compress(torch.zeros(0, 4)) is not None
