"""Are the log-probs that SGLang records while it decodes those that the trainer computes on packed rows, bit for bit?

    python scripts/bench/sglang_on_policy.py [--model DIR] [--sequences 32] [--new 64]

Starts the real server twice on CPU, as it is and with `model.true_on_policy`, which puts the operators of
`miles.core.model.batch_invariant` into it through SGLang's plugin entry point (`rollout/engines/sglang_invariant.py`). Prompts differ in length,
responses too, and some prompts share a prefix that the radix cache serves.

Found on 2 busy cores, Qwen3 architecture with 0.15M parameters, float32, 2,544 tokens at each temperature (1 and 0.7): SGLang's own
operators 7.2e-07, 46% of the tokens differ; batch-invariant ones 0.0, none differs, at about half the tokens per second (attention
then loops over requests in Python, as SGLang's own `torch_native` backend does too). Replaced are linear layers (SGLang fuses several
into one product), SiLU, attention, the output head (SGLang pads it to a multiple of 64 rows) and the normaliser of the log-probability;
norms, rotary embedding and embedding needed nothing. The same is a test, in
`tests/rollout/engines/test_sglang_process.py`, and `miles rl` checks it at every step of a `true_on_policy` run.
"""

# ruff: noqa: E402 - threads are set before torch is imported

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from miles.core.environment import set_defaults

set_defaults(threads=1)

import numpy as np
import torch

from miles.core.model.batch_invariant import make_batch_invariant
from miles.core.model.config import ModelConfig
from miles.core.model.load import load_model
from miles.core.model.packed import packed_logprobs
from miles.core.model.tiny import make_tiny_model
from rollout.config import RolloutConfig
from rollout.engines.contracts import Generation, Request, SamplingParams
from rollout.engines.sglang_engine import SGLangEngine

TEMPERATURES = (1.0, 0.7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory; default: a random Qwen3 of 0.15M parameters")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--new", type=int, default=64, help="new tokens of the shortest response")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="miles-bench-") as folder:
        path = options.model or make_tiny_model(Path(folder) / "model", alphabet="abcdefghijklmnopqrstuvwxyz0123456789 +-=.,:?", context=256)
        print(f"{'operators':<17} {'temperature':>11} {'tokens':>7} {'largest difference':>19} {'differing':>10} {'tok/s':>7}")
        for exact in (False, True):
            asyncio.run(_measure(path, exact, options.sequences, options.new, Path(folder)))


async def _measure(path: Path, exact: bool, sequences: int, new: int, log_folder: Path) -> None:
    model = ModelConfig(path=str(path), true_on_policy=exact)
    engine = SGLangEngine(model, RolloutConfig(engine="sglang", max_running=sequences), log_folder=log_folder)
    try:
        await engine.start()
        for temperature in TEMPERATURES:
            requests = [_request(i, new, temperature) for i in range(sequences)]
            started = time.perf_counter()
            made = await engine.generate(requests)
            seconds = time.perf_counter() - started
            difference = np.abs(np.concatenate([g.logprobs for g in made]) - trainer_logprobs(path, requests, made))
            name = "batch-invariant" if exact else "SGLang's own"
            share = f"{(difference > 0).mean():.1%}"
            print(f"{name:<17} {temperature:>11} {len(difference):>7} {difference.max():>19.3e} {share:>10} {len(difference) / seconds:>7.0f}", flush=True)
    finally:
        await engine.close()


def _request(index: int, new: int, temperature: float) -> Request:
    prompt = np.arange(10, 10 + (5 * (index // 4) + 3) % 40)
    sampling = SamplingParams(max_new_tokens=new + index, temperature=temperature, seed=index)
    return Request(request_id=str(index), prompt=prompt, sampling=sampling)


def trainer_logprobs(path: Path, requests: list[Request], made: list[Generation]) -> np.ndarray:
    """float32 [N]: log-probs of all response tokens, in order, as a `true_on_policy` trainer computes them on one packed row."""
    model = load_model(path)
    make_batch_invariant(model)
    rows = [np.concatenate([r.prompt, g.tokens]) for r, g in zip(requests, made, strict=True)]
    ends = np.cumsum([len(row) for row in rows])
    scored = np.concatenate([np.arange(end - len(g.tokens), end) for end, g in zip(ends, made, strict=True)])
    positions = np.concatenate([np.arange(len(row)) for row in rows])
    sequence = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    tensors = [torch.from_numpy(x) for x in (np.concatenate(rows), positions, sequence, scored)]
    with torch.no_grad():
        return packed_logprobs(model, *tensors, requests[0].sampling.temperature, 512)[0].numpy()


if __name__ == "__main__":  # SGLang's processes import this file again
    main()
