"""Generation by the torch engine against `transformers.generate`, tokens per CPU-second, taking turns in one process.

    python scripts/bench/generation.py             both sizes, a table with the bound
    python scripts/bench/generation.py --rounds 5

The work of one training step: 4 prompts x 8 samples, 64 new tokens at 156k parameters and 128 at 4M, sampled at temperature 1 without
stop tokens, one thread. The engine is used as a run uses it: through `generate`, with log-probs, seeds and its decoding thread; it
pays for computing the prompt of a group once. transformers computes no log-probs. `exact` is the engine with batch-invariant operators.
CPU time is user and system time of the process. Exit code 1 when the bound is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from miles.core.environment import set_defaults  # noqa: E402

set_defaults(threads=1)
os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")

import torch  # noqa: E402

from miles.core.model.config import ModelConfig  # noqa: E402
from miles.core.model.load import load_model, load_tokenizer  # noqa: E402
from rollout.engines.contracts import Request, SamplingParams  # noqa: E402
from rollout.engines.torch_engine import TorchEngine  # noqa: E402
from scripts.bench.digits import rows, write_model  # noqa: E402

PROMPTS, SAMPLES = 4, 8


@dataclass(frozen=True)
class Size:
    name: str
    hidden: int
    layers: int
    new_tokens: int
    bound: float | None  # tokens per CPU-second over transformers'


SIZES = (Size("156k x 64", 64, 2, 64, 2.0), Size("4.07M x 128", 256, 4, 128, None))


def main() -> int:
    parser = argparse.ArgumentParser(description="Torch engine against transformers.generate.")
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"{'size':<12} {'side':<14} {'tokens/CPU-s':>12} {'over transformers':>18} {'bound':>6}")
    met = [report(size, measure(size, rounds)) for size in SIZES]
    return 0 if all(met) else 1


def measure(size: Size, rounds: int) -> dict[str, list[float]]:
    """CPU-seconds of every round by side, after one round of warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", size.hidden, size.layers, seed=0)
        sides, close = _sides(model, size)
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds + 1):
            for name, run in sides.items():
                started = time.process_time()
                run()
                seconds[name].append(time.process_time() - started)
        close()
    return {name: values[1:] for name, values in seconds.items()}


def report(size: Size, seconds: dict[str, list[float]]) -> bool:
    """One line a side, by median; True when the bound holds."""
    tokens = PROMPTS * SAMPLES * size.new_tokens
    speed = {name: tokens / statistics.median(values) for name, values in seconds.items()}
    for name, value in speed.items():
        ratio = value / speed["transformers"]
        bound = f"{size.bound:.1f}" if size.bound and name == "engine" else "-"
        print(f"{size.name:<12} {name:<14} {value:>12,.0f} {ratio:>18.2f} {bound:>6}")
    return size.bound is None or speed["engine"] >= size.bound * speed["transformers"]


def _sides(folder: Path, size: Size) -> tuple[dict[str, Callable[[], None]], Callable[[], None]]:
    tokenizer = load_tokenizer(folder)
    conversations: list[Any] = [row["prompt"] for row in rows()[:: 400 // PROMPTS]]
    chosen: list[Any] = [tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) for messages in conversations]
    prompts = [prompt for prompt in chosen for _ in range(SAMPLES)]
    engines = {
        "engine": TorchEngine(ModelConfig(path=str(folder)), max_running=len(prompts), threads=1),
        "engine, exact": TorchEngine(ModelConfig(path=str(folder), true_on_policy=True), max_running=len(prompts), threads=1),
    }
    sampling = [SamplingParams(max_new_tokens=size.new_tokens, seed=seed) for seed in range(len(prompts))]
    requests = [Request(request_id=str(i), prompt=torch.tensor(p).numpy(), sampling=s) for i, (p, s) in enumerate(zip(prompts, sampling, strict=True))]

    def run_engine(engine: TorchEngine) -> None:
        made = asyncio.run(engine.generate(requests))
        assert all(len(g.tokens) == size.new_tokens for g in made)

    def close() -> None:
        for engine in engines.values():
            asyncio.run(engine.close())

    sides = {name: lambda engine=engine: run_engine(engine) for name, engine in engines.items()}
    return {"transformers": _transformers(folder, prompts, size.new_tokens), **sides}, close  # type: ignore[dict-item]


def _transformers(folder: Path, prompts: list[list[int]], new_tokens: int) -> Callable[[], None]:
    model: Any = load_model(folder)
    model.generation_config.eos_token_id = None
    width = max(len(prompt) for prompt in prompts)
    pad = model.config.pad_token_id
    tokens_NT = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask_NT = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])

    def run() -> None:
        made = model.generate(tokens_NT, attention_mask=mask_NT, max_new_tokens=new_tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
        assert made.shape[1] == width + new_tokens

    return run


if __name__ == "__main__":
    sys.exit(main())
