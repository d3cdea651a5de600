"""Where a resumed run goes on: behind its last checkpoint, on the same data, and saying what else is another than it was."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from miles.config import ConfigError
from miles.core.checkpoint.store import CheckpointStore, read_manifest
from miles.data.order import refuse_other_data
from miles.run.recipe import RLRecipe, SupervisedRecipe, lora_of
from miles.tracking.redact import redact
from miles.tracking.tracker import CONFIG_FILE

logger = logging.getLogger(__name__)

_NOTHING = "not there"
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "num_experts")


def position(recipe: RLRecipe | SupervisedRecipe, version: int) -> dict[str, Any]:
    """What every checkpoint says of itself: the steps behind it, the model it is of, and what of that is trained."""
    return {"version": version, "model": {"path": recipe.model.path, "sizes": _sizes(recipe.model.path)}, "trained": _trained(recipe)}


def first_step(recipe: RLRecipe | SupervisedRecipe, checkpoints: CheckpointStore, fingerprint: str) -> int | None:
    """The first step that the resumed run records; None where there is no checkpoint, so that it begins anew.

    Options that changed since the run began are named: most may change, but whoever did not mean to will want to know.

    Args:
        fingerprint: of the data and its order.
    Raises:
        ConfigError: the checkpoint's position was counted in other data, or it is of a model of another size or of other trained parts of one.
    """
    latest = checkpoints.latest()
    if latest is None:
        logger.warning("--resume: there is no complete checkpoint in %s, so the run begins anew; checkpoint.every writes some on the way", checkpoints.root)
        return None
    extra = read_manifest(latest)["extra"]
    _refuse_other_sizes(extra, recipe.model.path)
    _refuse_other_parts(extra.get("trained", {}), _trained(recipe))
    refuse_other_data(extra["producer"]["stream"] if "producer" in extra else extra["stream"], fingerprint)
    kept = checkpoints.root.parent / CONFIG_FILE
    if kept.is_file():
        before, now = json.loads(kept.read_text(encoding="utf-8")), redact(recipe.model_dump(mode="json"))
        if changes := list(_changes(before, now, "")):
            logger.warning("--resume: other options than before: %s", "; ".join(changes))
    reached, steps = int(extra["version"]), recipe.run.steps
    if reached >= steps:
        logger.warning("--resume: the checkpoint is of step %d and run.steps = %d, so there is nothing left to train", reached, steps)
    return reached + 1


def _refuse_other_sizes(extra: dict[str, Any], path: str) -> None:
    """Checkpoints of before this was kept are checked when they are loaded, tensor by tensor."""
    kept, here = extra.get("model", {"path": "", "sizes": {}}), _sizes(path)
    both = [name for name in _SIZES if name in kept["sizes"] and name in here]
    for name in both:
        if kept["sizes"][name] != here[name]:
            raise ConfigError(
                f"--resume: model.path = {path!r} has {name} = {here[name]}, but the checkpoint is of {kept['path']!r} with {name} = {kept['sizes'][name]}. "
                "Go on with the model that the run began with, or name a new run.folder"
            )


def _refuse_other_parts(kept: dict[str, Any], here: dict[str, Any]) -> None:
    """As `_refuse_other_sizes`, of what `_trained` gives."""
    both = [name for name in here if name in kept and [] not in (kept[name], here[name])]  # no targets: all that the model has, whichever these are
    for name in (name for name in both if kept[name] != here[name]):
        raise ConfigError(
            f"--resume: {name} is {here[name]}, but the checkpoint is of a run in which it was {kept[name]}, and has other tensors than this one would. "
            "Go on with what the run began with, or name a new run.folder"
        )


def _trained(recipe: RLRecipe | SupervisedRecipe) -> dict[str, Any]:
    """What the names and shapes of the trained tensors depend on, beside the model."""
    lora, critic = lora_of(recipe), getattr(recipe, "critic", None)
    of_lora = {} if lora is None else {"lora.rank": lora.rank, "lora.targets": sorted(set(lora.targets)), "lora.dora": lora.dora}
    sections = {"[lora]": lora, "[critic]": critic}
    return {"trainer.backend": recipe.trainer.backend} | {name: "left out" if s is None else "given" for name, s in sections.items()} | of_lora


def _sizes(path: str) -> dict[str, int]:
    """Of a model directory, from its config.json; nothing for a model on the hub."""
    file = Path(path) / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    config = config.get("text_config", config)
    return {name: config[name] for name in _SIZES if isinstance(config.get(name), int)}


def _changes(before: Any, now: Any, key: str) -> Iterator[str]:
    """`trainer.lr = 0.01, was 0.1`, for every leaf that differs."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted(before.keys() | now.keys()):
            yield from _changes(before.get(name, _NOTHING), now.get(name, _NOTHING), f"{key}.{name}" if key else name)
    elif before != now:
        yield f"{key} = {now}, was {before}"
