"""The balance of the experts' loads: whole sequences one by one, by transformers and the formula as it is printed, against rows and shared prefixes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from miles.core.model.routing import Routed, Routers
from miles.data.common import first_places
from tests.core.model.architectures import pack
from tests.trainer.split_forward.cases import CHUNK, Case, every_kind, exact, model, plans
from trainer.fsdp.scoring import Scorer
from trainer.rows.row import Row
from trainer.split_forward.executor import Executor, Split


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    exact(monkeypatch)


def printed(moe: PreTrainedModel, tokens_T: Tensor) -> Tensor:
    """DeepSeek-V3's equations 17 to 20 for one sequence, token by token, averaged over layers, with alpha = 1."""
    logits: list[Tensor] = []
    hooks = [layer.mlp.gate.register_forward_hook(lambda _, __, out: logits.append(out[0])) for layer in moe.model.layers]
    moe.set_attn_implementation("sdpa")
    moe(tokens_T[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    config = moe.config
    total = torch.zeros((), dtype=torch.float64)
    for logits_TX in logits:
        for expert in range(config.num_experts):
            chosen = sum(int(expert in row.topk(config.num_experts_per_tok).indices) for row in logits_TX)
            f = config.num_experts / (config.num_experts_per_tok * len(tokens_T)) * chosen
            total = total + f * sum(row.softmax(0)[expert] for row in logits_TX) / len(tokens_T)
    return total / len(logits)


def weights(case: Case) -> Tensor:
    return torch.from_numpy(np.random.default_rng(3).normal(size=len(case[0])))


def by_sequence(moe: PreTrainedModel, case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    balance_S = torch.stack([printed(moe, torch.from_numpy(tokens)) for tokens in case[0]])
    (balance_S @ weights(case)).backward()
    found = {name: p.grad.clone() for name, p in moe.named_parameters() if p.grad is not None}
    moe.zero_grad()
    return balance_S.detach(), found


def nothing(part: slice, logprobs_N: Tensor, entropy_N: Tensor | None) -> Tensor:
    """A loss that is 0, but of every token."""
    return (0 * logprobs_N).sum()


@pytest.mark.parametrize(("capacity", "threshold", "checkpointed"), [(1000, 1, False), (30, 1, True), (30, 4, False)])
def test_a_shared_prompt_counts_as_often_as_it_is_there(capacity: int, threshold: int, checkpointed: bool) -> None:
    moe, case = model("qwen3_moe", checkpointed=checkpointed), every_kind()
    expected_S, expected = by_sequence(moe, case)
    (plan,) = plans(moe, case, capacity=capacity, threshold=threshold)
    executor = Executor(moe, Split(plan, *case, torch.device("cpu")), CHUNK, routers=Routers(moe))
    found = {}
    for number in executor.split.replays:
        logprobs_N, _ = executor.replay(number, 1.0, False, False)
        routed, length_S = executor.routed(number)
        samples = list(plan.passes[number].samples)
        assert length_S.tolist() == [len(case[0][s]) for s in samples]
        balance_S = routed.balance_S(length_S)
        (nothing(slice(None), logprobs_N, None) + balance_S @ weights(case)[samples]).backward()
        executor.settle()
        found |= dict(zip(samples, balance_S.tolist(), strict=True))
    assert max(abs(found[s] - expected_S[s].item()) for s in range(len(case[0]))) < 1e-12
    assert far(moe, expected) < 1e-12


def far(moe: PreTrainedModel, expected: dict[str, Tensor]) -> float:
    """The largest error of a gradient's entry, over the largest entry of its tensor. What no router reads (head, last experts) has 0."""
    found = {name: p.grad for name, p in moe.named_parameters() if p.grad is not None}
    assert expected.keys() <= found.keys()
    assert not any(found[name].any() for name in found.keys() - expected.keys())
    return max(float((found[n] - expected[n]).abs().max() / expected[n].abs().max()) for n in expected)


@pytest.mark.parametrize("common", [False, True])
def test_a_packed_row_has_each_sequences_balance(common: bool) -> None:
    moe, (tokens, prompts) = model("qwen3_moe"), every_kind()
    expected_S, expected = by_sequence(moe, (tokens, prompts))
    tokens_T, positions_T, sequence_T = pack([torch.from_numpy(t) for t in tokens])
    scored_N = (positions_T > 0).nonzero().squeeze(1)
    first_T = torch.from_numpy(first_places(tokens)) if common else None
    row = row_with(tokens_T=tokens_T, positions_T=positions_T, sequence_T=sequence_T, scored_N=scored_N, first_T=first_T, num_sequences=len(tokens))
    scorer = Scorer(moe, CHUNK, torch.device("cpu"), Routers(moe))
    logprobs_N, _ = run(scorer, row)
    routed, length_S = scorer.routed(row)
    balance_S = routed.balance_S(length_S)
    ((0 * logprobs_N).sum() + balance_S @ weights((tokens, prompts))).backward()
    assert (balance_S - expected_S).abs().max() < 1e-12
    assert far(moe, expected) < 1e-12


def run(scorer: Scorer, row: Row) -> tuple[Tensor, Tensor | None]:
    with scorer._routers.watched() as scorer._seen:  # type: ignore[union-attr]
        return scorer.forward(row, 1.0, False)


def row_with(**values: Any) -> Row:
    empty = torch.zeros(0)
    unread = dict.fromkeys(("mask_N", "rollout_logprobs_N", "advantages_N", "sequence_N", "sequence_length_S"), empty)
    return Row(**unread, response_length_S=(), **values)


def test_even_loads_have_a_balance_of_one_and_a_single_expert_has_x() -> None:
    even = Routed(torch.full((1, 2, 4), 0.25 * 6), torch.full((1, 2, 4), 3.0))
    alone = Routed(torch.tensor([[[6.0, 0, 0, 0]]]), torch.tensor([[[6.0, 0, 0, 0]]]))
    assert even.balance_S(torch.tensor([6.0])).tolist() == [1.0]
    assert alone.balance_S(torch.tensor([6.0])).tolist() == [4.0]


def test_a_dense_model_is_refused() -> None:
    with pytest.raises(ValueError, match="routers of qwen3_moe alone, and Qwen3ForCausalLM is no mixture of experts: set it to 0"):
        Routers(model("qwen3"))
