"""The prompts of a step, computed while engines still answer them, and the step's micro-batches once they have: `run.prefix_overlap`."""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np
import torch

from miles.core.model.sharded import reshard
from miles.core.planning.residency import Residency
from miles.data.common import Tokens
from miles.data.packing import pack
from miles.data.types import Group
from trainer.contracts import ClaimedPrompt
from trainer.fsdp.scoring import Scorer
from trainer.rows.share import DUMMY, MicroBatch
from trainer.split_forward.ahead import Ahead
from trainer.split_forward.executor import Split, SplitPass
from trainer.split_forward.residency import local_bytes, residency_of
from trainer.split_forward.saved import saved_bytes_of
from trainer.split_forward.share import PromptSharing


class EarlyPrefills:
    """Of one rank. `prefill` any number of times, `meet` with the batch, then `clear` when the weights have moved.

    Args:
        sharing: whose model, capacity and counts are used. longest: tokens of the longest answer. apart: as in `Ahead`.
        entropy_gradient: whether the policy's loss differentiates entropies.
    Attributes:
        micros: of the batch that was met; None outside of a step. met: its plan, until there is another. ran: passes of it that ran early.
    """

    def __init__(
        self,
        sharing: PromptSharing,
        policy: Scorer,
        reference: Scorer | None,
        *,
        longest: int,
        apart: bool,
        temperature: float,
        entropy_gradient: bool,
    ):
        self._sharing, self._policy, self._reference = sharing, policy, reference
        self.micros: list[MicroBatch] | None = None
        self.met: Split | None = None
        self.ran: set[int] = set()
        self._waves_run: set[int] = set()
        self._longest, self._apart, self._temperature, self._entropy_gradient = longest, apart, temperature, entropy_gradient
        self.clear()

    def prefill(self, prompts: Sequence[ClaimedPrompt], open_claims: Set[int]) -> None:
        """Collective."""
        self._let_go(open_claims)
        if not prompts:
            return
        wave = self._ahead.add(prompts)
        if not wave.early:
            return
        tokens = self._tokens()
        split = Split(wave.plans[self._sharing.rank], tokens, [len(t) for t in tokens], self._sharing.device)
        number = len(self._ahead.waves) - 1
        if self._reference is not None:
            with torch.no_grad():
                self._reference.prefill(number, split, self._temperature)
        self._policy.prefill(number, split, self._temperature, True, self._entropy_gradient)
        self._waves_run.add(number)
        self._sharing.ahead += sum(wave.held(rank) for rank in range(self._sharing.world))

    def meet(self, groups: Sequence[Group]) -> None:
        """Make `micros` of the groups' trainable samples; their places are those in the batch. Prompts that were not announced come late."""
        known = {claim for wave in self._ahead.waves for claim in wave.slots}
        late = [g for g in groups if g.claim_id not in known and g.trainable]
        if late:
            first = [g.trainable[0] for g in late]
            prompts = [s.tokens[: s.prompt_length] for s in first]
            self._ahead.add([ClaimedPrompt(claim_id=g.claim_id, tokens=t, count=len(g.samples)) for g, t in zip(late, prompts, strict=True)])
        self._let_go({g.claim_id for g in groups if g.trainable})
        tokens = self._tokens()
        prompt_lengths = [len(t) for t in tokens]
        samples, place_of = [s for g in groups for s in g.trainable], dict[int, int]()
        for group in groups:
            slots = self._ahead.slot(group.claim_id) if group.trainable else range(0)
            for slot, sample in zip(slots, group.trainable, strict=False):
                assert np.array_equal(tokens[slot], sample.tokens[: sample.prompt_length]), f"claim {group.claim_id} has another prompt than was announced"
                tokens[slot] = sample.tokens
                place_of[slot] = len(place_of)
        assert len(place_of) == len(samples), "a group has more samples than its prompt was announced with"
        plans, early = self._ahead.plan({slot: len(tokens[slot]) for slot in place_of})
        # Where a group lies on several ranks, one of them may have none of the samples that came back.
        unused = {(number, n) for number, wave in enumerate(self._ahead.waves) for n in range(wave.early)} - set(early.values())
        for scorer in self._scorers:
            scorer.let_go(unused)
        self._sharing.count(plans)
        split = Split(plans[self._sharing.rank], tokens, prompt_lengths, self._sharing.device, early)
        self.met, self.ran = split, {number for number, (wave, _) in early.items() if wave in self._waves_run}
        self.micros = micros = list[MicroBatch]()
        for number in split.replays:
            places = tuple(place_of[slot] for slot in split.plan.passes[number].samples)
            packed = pack([samples[i] for i in places] or [DUMMY])
            micros.append(MicroBatch(packed=packed, indices=places, split=SplitPass(split=split, number=number, first=not micros)))

    def residency(self, chunk: int, constants: dict[str, int], budget: int | None) -> Residency | None:
        """What this rank holds and when, of the batch that was met last; None before there was one. Collective.

        Args:
            chunk: as in `Scorer`. constants: bytes by name that are there all the time, beside the weights. budget: bytes, if there is one.
        Raises:
            ValueError: more than the budget is needed.
        """
        if self.met is None:
            return None
        model, parameters = self._policy.model, list(self._policy.model.parameters())
        reference = None if self._reference is None or self._reference.model is model else self._reference.model
        whose = {"weights": local_bytes(parameters)}
        if reference is not None:
            whose["reference's weights"] = local_bytes(list(reference.parameters()))
        found = residency_of(
            self.met.plan,
            self.met.prompt_lengths,
            model,
            saved_bytes_of(model, chunk),
            early=self.ran,
            reference=None if self._reference is None else self._reference.model,
            constants=whose | constants,
            gradients=local_bytes([p for p in parameters if p.requires_grad]),
            budget=budget,
        )
        reshard(model)
        found.check()
        return found

    def clear(self) -> None:
        """Let go of everything."""
        self._ahead = Ahead(
            self._sharing.workload,
            self._sharing.hardware,
            world=self._sharing.world,
            capacity=self._sharing.capacity,
            longest=self._longest,
            apart=self._apart,
            thresholds=self._sharing.thresholds,
        )
        self.micros = None
        self._waves_run.clear()
        for scorer in self._scorers:
            scorer.let_go()

    @property
    def _scorers(self) -> list[Scorer]:
        return [self._policy] if self._reference is None else [self._policy, self._reference]

    def _let_go(self, open_claims: Set[int]) -> None:
        gone = self._ahead.let_go(open_claims)
        for scorer in self._scorers:
            scorer.let_go(gone)

    def _tokens(self) -> list[Tokens]:
        """Of the prompts, by slot."""
        return [t for wave in self._ahead.waves for t in wave.tokens]
