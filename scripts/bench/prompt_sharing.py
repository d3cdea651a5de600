"""A training step's forward and backward with `trainer.prompt_sharing` against packed rows (each causal on its own), taking turns.

    python scripts/bench/prompt_sharing.py               every mix, a table with the bounds
    python scripts/bench/prompt_sharing.py --rounds 9 --vocabulary 512

Qwen3 of 4 layers x 256 (4 heads on 2, MLP 1024), float32, one process, one thread, G answers of R tokens to one prompt of P tokens in one
micro-batch; the trainer's own code on both sides, fused loss and layers included, optimizer step left out. `saved`: the most that autograd
holds at one moment, parameters left out. `flops`: counted, packed rows over shared. `predicted`: the planner's seconds over measured ones.
Exit code 1 when a bound on the ratio of wall-clock seconds is missed, or more is saved than by packed rows.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from miles.core.environment import set_defaults  # noqa: E402

set_defaults(threads=1)
os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from algorithms.contracts import LossOutput  # noqa: E402
from miles.core.model.fused_layer import fuse_layers  # noqa: E402
from miles.core.planning.meters import Meter  # noqa: E402
from miles.data.types import Sample, Status  # noqa: E402
from trainer.fsdp.scoring import Scorer  # noqa: E402
from trainer.rows.row import Row  # noqa: E402
from trainer.rows.share import MicroBatch, share  # noqa: E402
from trainer.split_forward.share import PromptSharing  # noqa: E402

MAX_TOKENS = 16384
CHUNK = 1024


@dataclass(frozen=True)
class Mix:
    prompt: int
    response: int
    group: int
    vocabulary: int
    bound: float | None


MIXES = (
    Mix(1024, 64, 8, 512, 3.5),
    Mix(256, 256, 8, 512, 1.5),
    Mix(1024, 64, 8, 32_000, None),
    Mix(256, 256, 8, 32_000, None),
    Mix(64, 16, 8, 512, None),
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Prompt sharing against packed rows.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--vocabulary", type=int, help="only the mixes with this one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'P x R x G, vocabulary':<26}{'packed':>9}{'shared':>9}{'ratio':>8}{'bound':>7}{'flops':>8}{'saved MiB':>16}{'predicted':>11}")
    chosen = [mix for mix in MIXES if options.vocabulary in (None, mix.vocabulary)]
    met = [report(mix, options.rounds) for mix in chosen]
    return 0 if all(met) else 1


def report(mix: Mix, rounds: int) -> bool:
    """One line; True when its bounds hold."""
    model, samples = make_model(mix.vocabulary), make_samples(mix)
    sharing = PromptSharing(model, rank=0, world=1, capacity=MAX_TOKENS, threads=1, device=torch.device("cpu"))
    scorer = Scorer(model, CHUNK, torch.device("cpu"))
    sides: dict[str, Callable[[], None]] = {
        "packed": lambda: step(scorer, share(samples, range(len(samples)), rank=0, world=1, max_tokens=MAX_TOKENS)),
        "shared": lambda: step(scorer, sharing.share(samples, range(len(samples)))),
    }
    saved, flops = {}, {}
    for name, run in sides.items():
        with Meter(model) as meter:
            run()
        saved[name], flops[name] = meter.peak_saved_bytes / 2**20, sum(meter.flops.values())
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    packed, shared = (statistics.median(seconds[name]) for name in ("packed", "shared"))
    ratio = statistics.median(a / b for a, b in zip(seconds["packed"], seconds["shared"], strict=True))
    one = sharing.share(samples, range(len(samples)))[0].split
    assert one is not None
    title = f"{mix.prompt} x {mix.response} x {mix.group}, {mix.vocabulary}"
    held = f"{saved['packed']:.0f} / {saved['shared']:.0f}"
    bound = "-" if mix.bound is None else f"{mix.bound:.1f}"
    work = f"{flops['packed'] / flops['shared']:.2f}"
    print(f"{title:<26}{packed:>8.3f}s{shared:>8.3f}s{ratio:>8.2f}{bound:>7}{work:>8}{held:>16}{one.split.plan.predicted.seconds / shared:>11.2f}", flush=True)
    return (mix.bound is None or ratio >= mix.bound) and saved["shared"] <= saved["packed"]


def step(scorer: Scorer, micros: list[MicroBatch]) -> None:
    for micro in micros:
        row = replace(scorer.row(micro), first_T=None)  # packed rows that share nothing
        scorer.loss(row, _policy_gradient, 1.0, entropy=True, by_token=True).loss.backward()
        scorer.settle(row)


def _policy_gradient(row: Row, logprobs_N: Tensor, entropy_N: Tensor | None) -> LossOutput:
    return LossOutput(loss=-logprobs_N.sum() / 1000)


def make_model(vocabulary: int) -> PreTrainedModel:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        )
    ).eval()
    fuse_layers(model)
    return model


def make_samples(mix: Mix) -> list[Sample]:
    random = np.random.default_rng(0)
    prompt = random.integers(0, mix.vocabulary, mix.prompt)
    return [
        Sample(
            sample_id=str(i),
            group_id="0",
            tokens=np.concatenate([prompt, random.integers(0, mix.vocabulary, mix.response)]),
            prompt_length=mix.prompt,
            loss_mask=np.ones(mix.response, np.bool_),
            logprobs=np.zeros(mix.response, np.float32),
            weight_versions=np.zeros(mix.response, np.int32),
            status=Status.COMPLETED,
        )
        for i in range(mix.group)
    ]


if __name__ == "__main__":
    sys.exit(main())
