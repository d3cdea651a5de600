"""Runs a plan on a model: prefills whose graph stays, replays whose loss the caller takes, and the prefills' backwards.

What a segment hands on is cut from its graph: keys and values of every layer, the hidden state behind its last token (which scores the first
token of what follows) and the log-probs of its own scored tokens. Behind the cut they are leaves. Replays add their gradients to the leaves, in
float32 or wider; a prefill's backward starts from what has gathered there. Nothing is computed twice and every gradient is exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear as plain_linear
from transformers import PreTrainedModel

from miles.core.model.batch_invariant import is_batch_invariant
from miles.core.model.fused_loss import PartLoss, fused_loss
from miles.core.model.packed import through_head_of
from miles.core.model.routing import Routed, Routers, routed
from miles.core.model.scoring import score
from miles.core.model.sharded import last_microbatch
from miles.core.planning.plan import Plan
from trainer.split_forward.layout import PassLayout, Places
from trainer.split_forward.rows import SplitRows


class Split:
    """A plan with its sequences, laid out for a device as its passes are first run; used by every model that scores them.

    Args:
        early: passes that may have run before the plan was made, and what they are known by.
    """

    def __init__(
        self,
        plan: Plan,
        tokens: Sequence[np.ndarray],
        prompt_lengths: Sequence[int],
        device: torch.device,
        early: Mapping[int, tuple[int, int]] | None = None,
    ):
        self.plan, self.early, self.prompt_lengths = plan, early or {}, prompt_lengths
        self.places = Places(plan)
        self._tokens, self._device = tokens, device
        self._layouts: dict[int, PassLayout] = {}

    @property
    def replays(self) -> list[int]:
        """Passes with samples, in order."""
        return [step.number for step in self.plan.steps if step.kind == "replay"]

    def layout(self, number: int) -> PassLayout:
        if number not in self._layouts:
            self._layouts[number] = PassLayout(self.places, number, self._tokens, self.prompt_lengths, self._device)
        return self._layouts[number]

    def longest(self, number: int) -> int:
        return max((self.plan.segments[s].stop for s in self.plan.passes[number].segments), default=0)


@dataclass(frozen=True, eq=False, kw_only=True)
class SplitPass:
    """A replay of a plan; `first`: a walk through it begins here."""

    split: Split
    number: int
    first: bool


@dataclass(eq=False)
class PromptState:
    """What a prefill leaves. `roots` carry its graph; the other tensors are cut from it, leaves where gradients are wanted.

    Attributes:
        roots: values [X] of the head, then keys and values of each layer, [T, G, E].
        keys, values: by layer. last_SD: hidden state behind each segment, in float32 or wider. logprobs_N, entropy_N: of scored tokens.
        routed: what routers did with each segment, where that is watched; `routed_root` has the graph of the probabilities.
    """

    roots: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    last_SD: Tensor
    logprobs_N: Tensor
    entropy_N: Tensor | None
    routed_root: Tensor | None = None
    routed: Routed | None = None

    def watched(self) -> Routed:
        assert self.routed is not None, "the prefill was run by an executor that was given the routers"
        return self.routed

    def backward(self) -> None:
        """From the gradients that have gathered in the leaves, none of which is then needed any more."""
        head, *others = self.roots
        parts = [x for x in (self.logprobs_N, self.entropy_N, self.last_SD) if x is not None]
        # The head's values are always among the roots: without them FSDP2 would not gather the last layer's parameters.
        grads = [torch.cat([(torch.zeros_like(x) if x.grad is None else x.grad).flatten() for x in parts])]
        roots = [head]
        for root, leaf in zip(others, [*self.keys, *self.values], strict=True):
            # With adapters on some projections the first layer's keys may need no gradient at all.
            if root.requires_grad and leaf.grad is not None:
                roots.append(root)
                grads.append(leaf.grad.to(root.dtype))
        if self.routed_root is not None and self.routed is not None and self.routed.probability_SLX.grad is not None:
            roots.append(self.routed_root)
            grads.append(self.routed.probability_SLX.grad)
        torch.autograd.backward(roots, grads)


class Executor:
    """One walk through a plan, with gradients or, under `no_grad`, without.

    Call `replay` or `loss` for each pass with samples in the plan's order; with gradients, run the backward; then `settle`.

    Args:
        states: what prefills that have run already left, by pass; taken over.
        readers: to which every state that a prefill leaves is added. It reads the model's weights for as long as it lives.
        routers: the model's, to watch in passes with gradients; None: nobody asks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        split: Split,
        chunk: int,
        states: dict[int, PromptState] | None = None,
        readers: WeakSet[PromptState] | None = None,
        routers: Routers | None = None,
    ):
        if model.training:
            raise ValueError("trainer.prompt_sharing needs the model in eval mode: dropout would differ from an answer's own")
        self._model, self.split, self._chunk = model, split, chunk
        self._steps = deque(split.plan.steps)
        self._states: dict[int, PromptState] = states or {}
        self._readers = readers
        self._routers = routers
        self._own_routed: Routed | None = None
        self._linear = getattr(model, "batch_invariant_linear", plain_linear)

    def loss(self, number: int, loss: PartLoss, parts: Sequence[slice], *, temperature: float, entropy: bool, entropy_gradient: bool) -> Tensor:
        """As `replay`, but the sum of a loss over `parts` of the samples' scored tokens, by `fused_loss`. Only where `alone(number)`. Collective."""
        self._advance(number, temperature, entropy, entropy_gradient)
        layout = self.split.layout(number)
        assert layout.value_N is not None
        order_N = layout.value_N

        def forward(hidden_ND: Tensor, _: Tensor, weight_VD: Tensor) -> Tensor:
            hidden_ND, targets_N = hidden_ND.index_select(0, order_N), layout.targets_N.index_select(0, order_N)
            return fused_loss(
                hidden_ND,
                weight_VD,
                targets_N,
                loss,
                parts,
                temperature=temperature,
                chunk=self._chunk,
                entropy=entropy,
                entropy_gradient=entropy_gradient,
                linear=self._linear,
            )

        return self._forward(number, forward)[0]

    def alone(self, number: int) -> bool:
        """Whether all log-probs of the samples of pass `number` are its own: none of their scored tokens is shared."""
        return self.split.places.alone(number)

    def replay(self, number: int, temperature: float, entropy: bool, entropy_gradient: bool) -> tuple[Tensor, Tensor | None]:
        """`(logprobs_N, entropy_N or None)` of the samples of pass `number`, its prefills being computed first. Collective."""
        self._advance(number, temperature, entropy, entropy_gradient)
        layout = self.split.layout(number)
        values, _ = self._score(number, temperature, entropy, entropy_gradient)
        count = len(layout.targets_N)
        logprobs_N, entropy_N = values[:count], values[count:] if entropy else None
        before = [self._states[p] for p in layout.values_from[:-1]]
        assert layout.value_N is not None
        # This pass's own values take part also where none of them is a sample's: its backward must run on every rank.
        all_logprobs = torch.cat([*(state.logprobs_N for state in before), logprobs_N]).index_select(0, layout.value_N)
        if entropy_N is None:
            return all_logprobs, None
        entropies = [state.entropy_N for state in before if state.entropy_N is not None]
        all_entropies = torch.cat([*entropies, entropy_N]).index_select(0, layout.value_N)
        return all_logprobs, all_entropies if entropy_gradient else all_entropies.detach()

    def routed(self, number: int) -> tuple[Routed, Tensor]:
        """What routers did with the samples of pass `number`, which was replayed last, in all their passes; and the samples' tokens, [S]."""
        plan, places, own = self.split.plan, self.split.places, self._own_routed
        assert own is not None, "routers are watched in passes with gradients, by an executor that was given them"
        samples = plan.passes[number].samples
        chains = [plan.chain(plan.ends[sample]) for sample in samples]
        passes = sorted({places.of_pass[s] for chain in chains for s in chain} - {number})
        parts = [*(self._states[p].watched() for p in passes), own]
        first = dict(zip([*passes, number], accumulate((len(part.chosen_SLX) for part in parts), initial=0), strict=False))
        where = [first[places.of_pass[s]] + places.number[s] for chain in chains for s in chain]
        whose = [i for i, chain in enumerate(chains) for _ in chain]
        device = own.chosen_SLX.device
        where_P, whose_P = torch.tensor(where, dtype=torch.int64, device=device), torch.tensor(whose, dtype=torch.int64, device=device)

        def summed(tensors: list[Tensor]) -> Tensor:
            every_PLX = torch.cat(tensors).index_select(0, where_P)
            return every_PLX.new_zeros(len(samples), *every_PLX.shape[1:]).index_add(0, whose_P, every_PLX)

        found = Routed(summed([part.probability_SLX for part in parts]), summed([part.chosen_SLX for part in parts]))
        lengths = [sum(plan.segments[s].length for s in chain) for chain in chains]
        return found, torch.tensor(lengths, dtype=found.chosen_SLX.dtype, device=device)

    def settle(self) -> None:
        """What follows on a replay: backwards of prefills that nothing builds on any more. Collective."""
        while self._steps and self._steps[0].kind == "backward":
            state = self._states.pop(self._steps.popleft().number)
            if torch.is_grad_enabled():
                last_microbatch(self._model, not self._steps)
                state.backward()

    @property
    def begun(self) -> bool:
        """Whether any step was taken."""
        return len(self._steps) < len(self.split.plan.steps)

    def prefill(self, temperature: float, entropy: bool = False, entropy_gradient: bool = False, at_most: int | None = None) -> list[int]:
        """The prefills before the next replay, `at_most` so many; a replay computes those that are left. Which passes. Collective."""
        done: list[int] = []
        while self._steps[0].kind == "prefill" and (at_most is None or len(done) < at_most):
            number = self._steps.popleft().number
            if number not in self._states:
                self._prefill(number, temperature, entropy, entropy_gradient)
                done.append(number)
        return done

    def hand_over(self) -> dict[int, PromptState]:
        """By pass, what the prefills left; this walk ends here."""
        states, self._states = self._states, {}
        return states

    def _advance(self, number: int, temperature: float, entropy: bool, entropy_gradient: bool) -> None:
        """To replay `number`, which must be next; the one before it is done with."""
        self.settle()
        self.prefill(temperature, entropy, entropy_gradient)
        step = self._steps.popleft()
        assert (step.kind, step.number) == ("replay", number), f"pass {number} is not what comes next: {step}"
        last_microbatch(self._model, not self._steps)

    def _prefill(self, number: int, temperature: float, entropy: bool, entropy_gradient: bool) -> None:
        layout = self.split.layout(number)
        values, rows = self._score(number, temperature, entropy, entropy_gradient)
        layers, found = self._model.config.get_text_config().num_hidden_layers, len(rows.own_keys)
        if found != layers:
            raise ValueError(
                f"trainer.prompt_sharing hands on keys and values, but only {found} of the {layers} layers of {type(self._model).__name__} have them: "
                "set trainer.prompt_sharing = false"
            )
        count = len(layout.targets_N)
        keys, own_values = ([own[layer] for layer in sorted(own)] for own in (rows.own_keys, rows.own_values))
        logprobs_N, rest = values[:count], values[count:]
        entropy_N = rest[:count] if entropy else None
        last_SD = rest[count if entropy else 0 :].unflatten(0, (layout.ends, -1))
        self._states[number] = PromptState(
            roots=[values, *keys, *own_values],
            keys=[_leaf(x) for x in keys],
            values=[_leaf(x) for x in own_values],
            last_SD=_leaf(last_SD),
            logprobs_N=_leaf(logprobs_N),
            entropy_N=None if entropy_N is None else _leaf(entropy_N),
            routed_root=None if self._own_routed is None else self._own_routed.probability_SLX,
            routed=None if self._own_routed is None else replace(self._own_routed, probability_SLX=_leaf(self._own_routed.probability_SLX)),
        )
        if self._readers is not None:
            self._readers.add(self._states[number])

    def _score(self, number: int, temperature: float, entropy: bool, entropy_gradient: bool) -> tuple[Tensor, SplitRows]:
        """The head's values, one behind the other: log-probs [N], entropies [N] if wanted, and last hidden states [S, D] in a prefill."""
        layout = self.split.layout(number)

        def forward(hidden_ND: Tensor, last_SD: Tensor, weight_VD: Tensor) -> Tensor:
            logprobs_N, entropy_N = score(hidden_ND, weight_VD, layout.targets_N, temperature, self._chunk, entropy, self._linear, entropy_gradient)
            return torch.cat([x.flatten().to(logprobs_N.dtype) for x in (logprobs_N, entropy_N, last_SD) if x is not None])

        return self._forward(number, forward)

    def _forward(self, number: int, forward: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[Tensor, SplitRows]:
        """`forward(hidden states of the scored tokens [N, D], those that end the segments of a prefill [S, D], head's weight)` of a pass."""
        layout = self.split.layout(number)
        sources = [self._states[p] for p in layout.sources]
        rows = SplitRows(
            layout.attention,
            [s.keys for s in sources],
            [s.values for s in sources],
            longest=self.split.longest(number),
            record=not layout.replay,
            exact=is_batch_invariant(self._model),
        )
        before = [self._states[p].last_SD for p in layout.before]

        def head(hidden_KD: Tensor, weight_VD: Tensor) -> Tensor:
            hidden_ND = hidden_KD[: layout.own]
            if before:
                hidden_ND = torch.cat((hidden_ND, torch.cat(before).index_select(0, layout.before_F).to(hidden_KD.dtype)))
            return forward(hidden_ND, hidden_KD[layout.own :], weight_VD)

        seen: list[tuple[Tensor, Tensor]] = []
        with ExitStack() as watching:
            if self._routers is not None and torch.is_grad_enabled():
                seen = watching.enter_context(self._routers.watched())
            out = through_head_of(self._model, layout.tokens_T, layout.positions_T, rows, layout.keep_K, head)
        self._own_routed = routed(seen, layout.segment_T, layout.ends) if seen else None
        return out, rows


def _leaf(tensor: Tensor) -> Tensor:
    """`tensor` cut from its graph. Its gradient is summed in float32 where it is narrower: three hundred ones make 256 in bfloat16."""
    leaf = tensor.detach()
    if torch.is_grad_enabled() and tensor.requires_grad:
        leaf.requires_grad_()
        if leaf.dtype.itemsize < 4:
            leaf.grad_dtype = torch.float32
    return leaf
