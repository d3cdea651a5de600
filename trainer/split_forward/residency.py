"""The memory plan of a step whose prompts are computed early: what each pass of a plan leaves, from its producer to its last consumer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch
from transformers import PreTrainedModel

from miles.core.model.batch_invariant import is_batch_invariant
from miles.core.planning.plan import Plan, Step
from miles.core.planning.residency import Residency, Resident
from trainer.split_forward.executor import PromptState
from trainer.split_forward.layout import FILLER, Places
from trainer.split_forward.saved import SavedBytes, features

ANSWERS, REFERENCE, OPTIMIZER = "answers", "reference", "optimizer"


def residency_of(
    plan: Plan,
    prompt_lengths: Sequence[int],
    model: PreTrainedModel,
    saved: SavedBytes,
    *,
    early: Set[int],
    reference: PreTrainedModel | None,
    constants: Mapping[str, int],
    gradients: int,
    budget: int | None,
) -> Residency:
    """Of one rank.

    Args:
        early: passes that run while engines answer. reference: a model that scores the plan without gradients, before the first replay.
        constants: bytes that stay, by name. gradients: bytes of the parameters' gradients, there from the first backward to the optimizer.
    """
    steps = [step for step in plan.steps if step.kind != "prefill" or step.number not in early]
    before = [ANSWERS, *([REFERENCE] if reference is not None else [])]
    moments = [*before, *(f"{step.kind} {step.number}" for step in steps), OPTIMIZER]
    when = {(step.kind, step.number): len(before) + i for i, step in enumerate(steps)}
    first = next((when[step.kind, step.number] for step in steps if step.kind == "replay"), len(moments) - 1)
    places = Places(plan)
    found = [Resident(name=name, kind=name, bytes=size, first=0, last=len(moments) - 1) for name, size in constants.items()]
    found.append(Resident(name="gradients", kind="gradients", bytes=gradients, first=first, last=len(moments) - 1))
    for step in plan.steps:
        if step.kind == "backward":
            continue
        kind, row = features(places, step, prompt_lengths)
        size = sum(weight * x for weight, x in zip(saved.weights[kind], row, strict=True))
        if step.kind == "replay":
            at = when["replay", step.number]
            found.append(Resident(name=f"replay {step.number}", kind="answers", bytes=size, first=at, last=at))
            continue
        at, end = when.get(("prefill", step.number), 0), when["backward", step.number]
        found.append(Resident(name=f"prefill {step.number}", kind="prompts: policy", bytes=size, first=at, last=end))
        readers = [when["replay", s.number] for s in steps if s.kind == "replay" and step.number in places.sources(s.number)]
        if readers:
            size = gradient_bytes(model, places, step)
            found.append(Resident(name=f"gradients of prefill {step.number}", kind="prompts: gradients", bytes=size, first=min(readers), last=end))
    if reference is not None:
        found += _of_reference(plan, places, reference, early)
    return Residency(moments=tuple(moments), residents=tuple(found), budget=budget)


def gradient_bytes(model: PreTrainedModel, places: Places, step: Step) -> int:
    """Of the keys, the values and the hidden states behind a prefill's segments, in float32 or wider."""
    segments = places.plan.passes[step.number].segments
    wide = max(model.dtype.itemsize, 4)
    return wide * (sum(places.lengths(step.number)) * _entries(model) + max(len(segments), 1) * model.config.get_text_config().hidden_size)


def kept_bytes(model: PreTrainedModel, places: Places, step: Step) -> int:
    """What a prefill leaves without a graph: keys and values, the hidden states behind its segments, and scores of its scored tokens."""
    plan, one = places.plan, places.plan.passes[step.number]
    scored = sum(plan.segments[s].scored for s in one.segments) if one.segments else FILLER - 1
    ends = max(len(one.segments), 1) * model.config.get_text_config().hidden_size
    wide = max(model.dtype.itemsize, 4)
    return model.dtype.itemsize * sum(places.lengths(step.number)) * _entries(model) + wide * (ends + scored)


def counted_bytes(state: PromptState) -> int:
    """Of the storages that a state without a graph holds, each once."""
    tensors = [*state.roots, *state.keys, *state.values, state.last_SD, state.logprobs_N]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _of_reference(plan: Plan, places: Places, model: PreTrainedModel, early: Set[int]) -> list[Resident]:
    """Its whole walk is one moment, in which late prefills come and go beside the early ones."""
    held: dict[int, int] = {}
    late = 0
    found = []
    for step in plan.steps:
        if step.kind == "prefill":
            held[step.number] = kept_bytes(model, places, step)
            if step.number in early:
                found.append(Resident(name=f"reference's prefill {step.number}", kind="prompts: reference", bytes=held[step.number], first=0, last=1))
        elif step.kind == "backward":
            del held[step.number]
        late = max(late, sum(size for number, size in held.items() if number not in early))
    if late:
        found.append(Resident(name="reference's late prefills", kind="prompts: reference", bytes=late, first=1, last=1))
    return found


def _entries(model: PreTrainedModel) -> int:
    """Keys and values of a token in all layers."""
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * int(config.num_hidden_layers) * int(config.num_key_value_heads) * int(width)


def can_plan(model: PreTrainedModel) -> bool:
    """Whether what autograd keeps of this model is linear in its tokens: experts' batches depend on the routing, and batch-invariant operators
    pad rows to whole tiles."""
    return not is_batch_invariant(model) and not any(parameter.ndim == 3 for parameter in model.parameters())


def local_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Of this rank's parts."""
    parts = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in parts)
