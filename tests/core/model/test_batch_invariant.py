"""Equal bits for a row whatever is computed beside it, operator by operator and through whole models."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear as plain_linear
from torch.nn.functional import scaled_dot_product_attention

from miles.core.model.batch_invariant import InvariantRows, InvariantSiLU, is_batch_invariant, linear, make_batch_invariant
from miles.core.model.packed import packed_logprobs
from miles.data.common import first_places
from tests.core.model.architectures import every_target, pack, random_model, random_rows

COUNTS = (1, 2, 3, 7, 8, 31, 32, 33, 64, 100, 257)


def rows_that_differ(function: Callable[[Tensor], Tensor], rows_ND: Tensor) -> int:
    """How many rows get other bits in another batch, at another place."""
    together = function(rows_ND)
    return sum(
        int((function(rows_ND[start : start + count].clone()) != together[start : start + count]).flatten(1).any(1).sum())
        for count in COUNTS
        for start in (0, 1, 5)
    )


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def _threads(request: pytest.FixtureRequest):
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 256), (100, 70), (256, 64), (576, 192)])
def test_linear(inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    rows_ND, weight_VD = torch.randn(300, inputs), torch.randn(outputs, inputs)
    assert rows_that_differ(lambda rows: linear(rows, weight_VD), rows_ND) == 0
    assert torch.allclose(linear(rows_ND, weight_VD), plain_linear(rows_ND, weight_VD), atol=1e-4)
    assert rows_that_differ(lambda rows: plain_linear(rows, weight_VD), rows_ND) > 0, "the plain one would do: this machine cannot show the difference"


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("width", [48, 64, 100, 1500])
@pytest.mark.parametrize(
    "function",
    [
        InvariantSiLU(),
        lambda x: x.pow(2).mean(-1, keepdim=True),
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
        torch.exp,
        torch.cos,
        torch.sin,
    ],
    ids=["silu", "mean of squares", "rms norm", "exp", "cos", "sin"],
)
def test_operators_that_work_row_by_row(function: Callable[[Tensor], Tensor], width: int) -> None:
    torch.manual_seed(0)
    assert rows_that_differ(function, torch.randn(300, width) * 3) == 0


def test_torch_s_own_silu_is_not_such_an_operator() -> None:
    torch.manual_seed(0)
    assert rows_that_differ(torch.nn.functional.silu, torch.randn(300, 100) * 3) > 0


def test_silu_and_its_gradient_are_torch_s() -> None:
    x = torch.tensor([-200.0, -90.0, -3.0, -0.0, 0.5, 20.0, 200.0], requires_grad=True)
    y = x.detach().clone().requires_grad_()
    InvariantSiLU()(x).sum().backward()
    torch.nn.functional.silu(y).sum().backward()
    assert torch.allclose(InvariantSiLU()(x), torch.nn.functional.silu(y), atol=1e-6)
    assert torch.equal(x.grad, y.grad)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 2, 16), (4, 4, 64), (12, 1, 16), (20, 2, 24)])
def test_attention(heads: int, groups: int, width: int) -> None:
    torch.manual_seed(0)
    lengths = [1, 5, 31, 32, 33, 70, 8, 33]
    parts = [tuple(torch.randn(length, h, width) for h in (heads, groups, groups)) for length in lengths]

    def attend(some: list[int]) -> list[Tensor]:
        query, key, value = (torch.cat([parts[i][k] for i in some]) for k in range(3))
        sequence_T = torch.arange(len(some)).repeat_interleave(torch.tensor([lengths[i] for i in some]))
        return list(InvariantRows(sequence_T).attend(0, query, key, value, 0.3, 0.0, None).split([lengths[i] for i in some]))

    together = attend(list(range(8)))
    for some in ([3], [6, 0], [7, 5, 4, 2], [5, 5]):
        assert all(torch.equal(found, together[i]) for found, i in zip(attend(some), some, strict=True))
    for (query, key, value), found in zip(parts, together, strict=True):
        expected = scaled_dot_product_attention(*(x.transpose(0, 1) for x in (query, key, value)), is_causal=True, scale=0.3, enable_gqa=True)
        assert torch.allclose(found, expected.transpose(0, 1), atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2"])
def test_a_model_scores_a_row_alike_alone_and_packed(kind: str) -> None:
    model = random_model(kind)
    make_batch_invariant(model)
    rows = random_rows([5, 17, 9, 16, 2, 40, 120, 33])

    def score(some: list[Tensor]) -> Tensor:
        tokens_T, positions_T, sequence_T = pack(some)
        return packed_logprobs(model, tokens_T, positions_T, sequence_T, every_target(positions_T), 0.7, 50)[0].detach()

    together = score(rows)
    assert float((torch.cat([score([row]) for row in rows]) - together).abs().max()) == 0.0
    assert float((torch.cat([score(rows[:3]), score(rows[3:])]) - together).abs().max()) == 0.0


def test_a_model_scores_a_row_alike_when_others_begin_as_it_does() -> None:
    model = random_model()
    make_batch_invariant(model)
    prompt, *answers = random_rows([40, 5, 33, 9])
    rows = [torch.cat((prompt, answer)) for answer in answers]

    def score(some: list[Tensor]) -> Tensor:
        tokens_T, positions_T, sequence_T = pack(some)
        first_T = torch.from_numpy(first_places([row.numpy() for row in some]))
        return packed_logprobs(model, tokens_T, positions_T, sequence_T, every_target(positions_T), 0.7, 50, first_T=first_T)[0].detach()

    assert float((torch.cat([score([row]) for row in rows]) - score(rows)).abs().max()) == 0.0


def test_a_plain_model_scores_a_row_otherwise_alone_and_packed() -> None:
    model = random_model()
    rows = random_rows([5, 17, 9, 16, 2, 40, 120, 33])

    def score(some: list[Tensor]) -> Tensor:
        tokens_T, positions_T, sequence_T = pack(some)
        return packed_logprobs(model, tokens_T, positions_T, sequence_T, every_target(positions_T), 0.7, 50)[0].detach()

    assert float((torch.cat([score([row]) for row in rows]) - score(rows)).abs().max()) > 0.0


def test_gradients_are_the_plain_model_s() -> None:
    plain = random_model()
    invariant = copy.deepcopy(plain)
    make_batch_invariant(invariant)
    tokens_T, positions_T, sequence_T = pack(random_rows([5, 17, 9, 40]))
    for model in (plain, invariant):
        packed_logprobs(model, tokens_T, positions_T, sequence_T, every_target(positions_T), 1.0, 50)[0].square().mean().backward()
    found = dict(invariant.named_parameters())
    for name, parameter in plain.named_parameters():
        assert float((found[name].grad - parameter.grad).abs().max() / parameter.grad.abs().max()) < 1e-5, name


def test_parameters_stay_the_same_objects_under_the_same_names() -> None:
    model = random_model()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    make_batch_invariant(model)
    make_batch_invariant(model)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert is_batch_invariant(model)


def test_a_module_without_a_batch_invariant_version_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.act_fn.*GELU"):
        make_batch_invariant(random_model(hidden_act="gelu"))


def test_only_float32_is_exact() -> None:
    with pytest.raises(ValueError, match="float32"):
        make_batch_invariant(random_model(dtype=torch.bfloat16))


def test_a_sequence_beyond_the_sliding_window_is_refused() -> None:
    model = random_model("mistral", sliding_window=8)
    make_batch_invariant(model)
    tokens_T, positions_T, sequence_T = pack(random_rows([9]))
    with pytest.raises(ValueError, match=r"model\.context = 8"):
        packed_logprobs(model, tokens_T, positions_T, sequence_T, every_target(positions_T), 1.0, 50)
