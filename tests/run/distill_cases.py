"""Students and teachers for the runs of `miles distill`, and how far apart they are, measured by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles.config import Resolved, load
from miles.run.recipe import DistillRecipe, RLRecipe
from tests.run.runs import rl_overrides


def surer(folder: Path) -> Path:
    """The model in `folder` with its logits scaled by 6: a random one says too little to learn from."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] *= 6
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def distill_recipe(task: dict[str, Path], folder: Path, *overrides: str) -> Resolved[RLRecipe]:
    common = [item for item in rl_overrides(task, folder) if not item.startswith("reward.")]
    common += ["run.steps=12", "rollout.prompts_per_step=8", "rollout.samples_per_prompt=1", "checkpoint.export=true", "cluster.cpus=4"]
    resolved: Resolved[RLRecipe] = load(DistillRecipe, None, [*common, f"distill.teacher={task['teacher']}", *overrides])
    return resolved


def divergence(student: Path, teacher: Path, prompts: Path) -> float:
    """KL(student || teacher) over the whole vocabulary, nats per token of the student's own sampled answers to `prompts`."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(student)
    own, other = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (student, teacher))
    total, count = 0.0, 0
    for line in prompts.read_text().splitlines():
        chat = [{"role": "user", "content": json.loads(line)["prompt"]}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
        with torch.no_grad():
            whole = own.generate(ids.expand(8, -1), do_sample=True, top_k=0, max_new_tokens=6, pad_token_id=0)
            for row in whole:
                answer = row[ids.shape[1] :].tolist()
                length = answer.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in answer else len(answer)
                place = slice(ids.shape[1] - 1, ids.shape[1] - 1 + length)
                p, q = (model(row[None]).logits[0, place].double().log_softmax(-1) for model in (own, other))
                total, count = total + float((p.exp() * (p - q)).sum()), count + length
    return total / count
