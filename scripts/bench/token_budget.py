"""The fsdp backend's micro-batches by token budget: against transformers' Trainer under FSDP2, how long ranks wait for each other, and loading.

    python scripts/bench/token_budget.py                       one table with the bounds, about three minutes on two cores
    python scripts/bench/token_budget.py --parts idle loading

trainer: SFT steps on the same rows by two ranks on gloo, one thread each, which take turns step by step with those of Trainer (padded batches of
    8, gradient accumulation, fused AdamW, everything else its default). Tokens (no padding) per CPU-second of both ranks. accelerate offers
    FSDP2 on accelerators only, so its answer to "is this FSDP" is set by hand; what follows is its own code.
idle: CPU-seconds of each row's forward and backward, one after the other on one core; ranks meet in every row, as FSDP's collectives make
    them. The share of that time in which the rank that waits most has nothing to do, by the cost model's rows and by a naive split: sequences
    dealt out in turn, and laid into rows as they come.
loading: bytes that two ranks asked the kernel for while they built a model of 135M parameters in float32, over those of its tensors.

Exit code 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from miles.core.environment import set_defaults  # noqa: E402

set_defaults(threads=1)
os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from algorithms.contracts import LossOutput  # noqa: E402
from miles.core.model.config import ModelConfig  # noqa: E402
from miles.core.model.fused_layer import fuse_layers  # noqa: E402
from miles.core.model.tiny import character_tokenizer  # noqa: E402
from miles.core.planning.hardware import CPU_CORE  # noqa: E402
from miles.core.planning.workload import workload_of  # noqa: E402
from miles.data.packing import balanced_rows, pack  # noqa: E402
from miles.data.types import Sample, Status  # noqa: E402
from trainer.config import TrainerConfig  # noqa: E402
from trainer.fsdp.backend import FSDPBackend  # noqa: E402
from trainer.fsdp.mesh import open_mesh  # noqa: E402
from trainer.fsdp.model import build_model  # noqa: E402
from trainer.fsdp.scoring import Scorer  # noqa: E402
from trainer.rows.share import MicroBatch  # noqa: E402

VOCABULARY, LONGEST, BUDGET = 4096, 1024, 2048
BATCH, DEVICE_BATCH, RANKS = 64, 8, 2
LEARNING_RATE = 1e-4


def main() -> int:
    parser = argparse.ArgumentParser(description="Micro-batches by token budget, and loading by slices.")
    parser.add_argument("--parts", nargs="+", choices=["trainer", "idle", "loading"], default=["trainer", "idle", "loading"])
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each side and each kind of lengths")
    options = parser.parse_args()
    met = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"{'':<46}{'naive or Trainer':>18}{'fsdp':>12}{'ratio':>8}{'bound':>9}")
        if "loading" in options.parts:
            make_135m(folder / "135m")
            size = sum(tensor_bytes(file) for file in (folder / "135m").glob("*.safetensors"))
            read = ranks(load, folder / "135m")
            title = f"bytes read of {size / 2**20:,.0f} MiB by 2 ranks, MiB"
            print(f"{title:<46}{'':>18}{sum(read) / 2**20:>12,.1f}{sum(read) / size:>8.3f}{'<= 1.01':>9}", flush=True)
            met.append(sum(read) <= 1.01 * size)
        if "idle" in options.parts:
            for world in (2, 4):
                naive, balanced = idle(lengths_of("long-tailed", BATCH), world)
                title = f"idle of the rank that waits most, {world} ranks"
                print(f"{title:<46}{naive:>17.1%}{balanced:>12.1%}{'':>9}{'< 5%':>9}", flush=True)
                met.append(balanced < 0.05)
        if "trainer" in options.parts:
            make_model(folder / "model")
            for kind, bound in (("long-tailed", 1.3), ("equal", 1.0)):
                theirs, ours, padding = ranks(against_trainer, folder / "model", lengths_of(kind, BATCH * (options.steps + 1)), options.steps)[0]
                title = f"tokens per CPU-second, {kind} ({padding:.0%} padding)"
                print(f"{title:<46}{theirs:>18,.0f}{ours:>12,.0f}{ours / theirs:>8.2f}{f'>= {bound}':>9}", flush=True)
                met.append(ours / theirs >= bound)
    return 0 if all(met) else 1


def lengths_of(kind: str, count: int) -> list[int]:
    """Tokens of sequences: log-normal, most of them short, or all of one length of about the same mean."""
    if kind == "equal":
        return [256] * count
    return np.random.default_rng(0).lognormal(5.0, 0.9, count).astype(int).clip(16, LONGEST).tolist()


def make_samples(lengths: Sequence[int]) -> list[Sample]:
    random = np.random.default_rng(1)
    return [
        Sample(
            sample_id=str(i),
            group_id=str(i),
            tokens=random.integers(0, VOCABULARY, n),
            prompt_length=n // 4,
            loss_mask=np.ones(n - n // 4, np.bool_),
            logprobs=np.zeros(n - n // 4, np.float32),
            weight_versions=np.zeros(n - n // 4, np.int32),
            status=Status.COMPLETED,
        )
        for i, n in enumerate(lengths)
    ]


def make_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, max_position_embeddings=LONGEST, tie_word_embeddings=True, eos_token_id=3, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    character_tokenizer("abc", LONGEST).save_pretrained(folder)


def make_135m(folder: Path) -> None:
    """Sizes of SmolLM2-135M, random weights."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def ranks(function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(rank, *args)` in RANKS processes on gloo; their results."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, f"{folder}/store", theirs, function, args))
            process.start()
            pipes.append(ours)
            processes.append(process)
        results = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    return results


def _serve(rank: int, store: str, pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS), ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    pipe.send(function(rank, *args))
    dist.barrier()
    dist.destroy_process_group()


def against_trainer(rank: int, model: Path, lengths: list[int], steps: int) -> tuple[float, float, float]:
    """Tokens per CPU-second of Trainer and of the backend, and Trainer's share of padding. Both ranks' seconds count."""
    samples = make_samples(lengths)
    backend = FSDPBackend(
        ModelConfig(path=str(model)), TrainerConfig(ranks=RANKS, lr=LEARNING_RATE, max_tokens_per_microbatch=BUDGET), None,
        temperature=1.0, max_new_tokens=LONGEST, seed=0, total_steps=steps + 1, rank=rank, world=RANKS,
    )  # fmt: skip
    clock = Turns(backend, [samples[start : start + BATCH] for start in range(0, len(samples), BATCH)])
    trainer = make_trainer(model, samples, clock, steps + 1)
    trainer.train()
    # The first step of each side warms up.
    seconds = torch.tensor([sum(clock.theirs[1:]), sum(clock.ours[1:])], dtype=torch.float64)
    dist.all_reduce(seconds)
    measured = lengths[BATCH : BATCH * (steps + 1)]
    tokens = sum(measured)
    padded = sum(DEVICE_BATCH * max(measured[start : start + DEVICE_BATCH]) for start in range(0, len(measured), DEVICE_BATCH))
    backend.close()
    return tokens / float(seconds[0]), tokens / float(seconds[1]), 1 - tokens / padded


class Turns(TrainerCallback):
    """After each step of Trainer one of the backend, on the same rows; CPU-seconds of this process for each."""

    def __init__(self, backend: FSDPBackend, batches: list[list[Sample]]):
        self._backend, self._batches = backend, batches
        self.theirs: list[float] = []
        self.ours: list[float] = []
        self._started = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._started = time.process_time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = time.process_time()
        self.theirs.append(now - self._started)
        self._backend.step_sft(self._batches[len(self.ours)])
        self._started = time.process_time()
        self.ours.append(self._started - now)


def make_trainer(model: Path, samples: list[Sample], clock: Turns, steps: int) -> Trainer:
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from torch.utils.data import SequentialSampler

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)

        def padded(name: str, value: int) -> torch.Tensor:
            return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

        return {"input_ids": padded("input_ids", 0), "attention_mask": padded("attention_mask", 0), "labels": padded("labels", -100)}

    class Sharded(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            state = self.accelerator.state
            state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
            AcceleratorState._shared_state["distributed_type"] = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.is_fsdp_enabled = True

        def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    data = []
    for sample in samples:
        tokens = sample.tokens.tolist()
        data.append({"input_ids": tokens, "attention_mask": [1] * len(tokens), "labels": [-100] * sample.prompt_length + tokens[sample.prompt_length :]})
    arguments = TrainingArguments(
        output_dir=str(model.parent / "trainer"), use_cpu=True, per_device_train_batch_size=DEVICE_BATCH,
        gradient_accumulation_steps=BATCH // (DEVICE_BATCH * RANKS), max_steps=steps, learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
        report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, optim="adamw_torch_fused", dataloader_pin_memory=False,
    )  # fmt: skip
    loaded = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32)
    return Sharded(model=loaded, args=arguments, train_dataset=data, data_collator=collate, callbacks=[clock])


def idle(lengths: list[int], world: int) -> tuple[float, float]:
    """Of the naive split and of the balanced one."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    fuse_layers(model)
    samples = make_samples(lengths)
    workload = workload_of(model)
    costs = [workload.sequence_seconds(n, s.response_length, CPU_CORE) for n, s in zip(lengths, samples, strict=True)]
    scorer = Scorer(model, 1024, torch.device("cpu"))
    return tuple(waited(scorer, samples, plan) for plan in (naive_rows(lengths, world), balanced_rows(lengths, costs, world, BUDGET)))  # type: ignore[return-value]


def naive_rows(lengths: Sequence[int], world: int) -> list[list[list[int]]]:
    plans: list[list[list[int]]] = [[] for _ in range(world)]
    for rank, rows in enumerate(plans):
        room = 0
        for index in range(rank, len(lengths), world):
            if lengths[index] > room:
                rows.append([])
                room = BUDGET
            rows[-1].append(index)
            room -= lengths[index]
    most = max(len(rows) for rows in plans)
    return [rows + [[]] * (most - len(rows)) for rows in plans]


def waited(scorer: Scorer, samples: list[Sample], plans: list[list[list[int]]]) -> float:
    busy_RM = np.array([[seconds_of(scorer, [samples[i] for i in row]) for row in rows] for rows in plans])
    return float(1 - busy_RM.sum(1).min() / busy_RM.max(0).sum())


def seconds_of(scorer: Scorer, samples: list[Sample]) -> float:
    """CPU-seconds of a row's forward and backward, the least of two."""
    if not samples:
        return 0.0
    found = []
    for _ in range(2):
        started = time.process_time()
        row = scorer.row(MicroBatch(packed=pack(samples), indices=()))
        scorer.loss(row, lambda part, logprobs_N, entropy_N: LossOutput(loss=-logprobs_N.sum() / 1000), 1.0, by_token=True).loss.backward()
        found.append(time.process_time() - started)
    return min(found)


def load(rank: int, model: Path) -> int:
    """Bytes that this rank read while it built the model."""
    mesh = open_mesh(TrainerConfig(ranks=RANKS), rank, RANKS, torch.device("cpu"))
    before = read_so_far()
    built = build_model(ModelConfig(path=str(model)), master_dtype=torch.float32, mesh=mesh, device=torch.device("cpu"))
    assert not any(p.is_meta for p in built.parameters())
    return read_so_far() - before


def read_so_far() -> int:
    """Bytes that this process asked the kernel for, from the page cache or not."""
    return int(Path("/proc/self/io").read_text().split()[1])


def tensor_bytes(file: Path) -> int:
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")


if __name__ == "__main__":
    sys.exit(main())
