"""What the `delta` transport writes for one optimizer step, against a full snapshot: counted bytes, and seconds.

    python scripts/bench/delta.py                    50M parameters, learning rates 1e-6 and 3e-4
    python scripts/bench/delta.py --params 135e6

Real AdamW steps of the `fsdp` backend on real gradients, float32 masters, bfloat16 export, one rank; the record of each step is written
to a folder and read back by the engine's side, which checks every tensor's digest. The first steps are left out: AdamW's first ones are
its largest. The bound is for 1e-6; at the quickstart's 3e-4 most weights change.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# A script's own folder comes first on the path, where this file would hide the package it is named after.
sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p).resolve() not in (Path(__file__).resolve().parent, ROOT))]

from miles.core.environment import set_defaults  # noqa: E402

set_defaults(threads=1)
os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from miles.core.model.config import ModelConfig  # noqa: E402
from miles.core.model.tiny import make_tiny_model  # noqa: E402
from miles.data.types import Sample, Status  # noqa: E402
from trainer.config import TrainerConfig  # noqa: E402
from trainer.fsdp.backend import FSDPBackend  # noqa: E402
from weight_sync.buckets import export_bytes, plan  # noqa: E402
from weight_sync.contracts import FromStore, Manifest  # noqa: E402
from weight_sync.transports.delta import DeltaReader  # noqa: E402
from weight_sync.transports.delta_transport import write_record  # noqa: E402

BOUND = 1 / 12
LAYERS = 4


@dataclass(frozen=True)
class Figures:
    """Of one step's record: bytes written and their share of a full bfloat16 export, weights that changed, seconds on each side."""

    nbytes: int
    share: float
    changed: float
    write_s: float
    read_s: float


def main() -> int:
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        path = make_model(Path(folder) / "model", options.params)
        rates = {lr: steps(path, Path(folder) / f"store-{lr}", lr, options.warm_up, options.steps) for lr in (1e-6, 3e-4)}
        dist.destroy_process_group()
    table = Table(title=f"one step's record, {options.params:,.0f} parameters, bfloat16")
    for column in ("learning rate", "bytes written", "of a full export", "bound", "weights changed", "write", "read back"):
        table.add_column(column, justify="right")
    for lr, figures in rates.items():
        for f in figures:
            bound = f"1/{1 / BOUND:.0f}" if lr == 1e-6 else "none"
            table.add_row(f"{lr:g}", f"{f.nbytes:,}", f"1/{1 / f.share:.1f}", bound, f"{f.changed:.1%}", f"{f.write_s:.2f} s", f"{f.read_s:.2f} s")
    Console(width=120).print(table)
    return 1 if any(f.share > BOUND for f in rates[1e-6]) else 0


def make_model(folder: Path, params: float) -> Path:
    """A model of about `params` parameters: a layer has 15 x hidden^2 of them, 3 in attention and 12 in its feed-forward part."""
    hidden = round((params / (LAYERS * 15)) ** 0.5 / 64) * 64
    make_tiny_model(folder, alphabet="abcdefghij", hidden=hidden, layers=LAYERS, context=256, seed=0)
    return folder


def steps(model: Path, store: Path, lr: float, warm_up: int, count: int) -> list[Figures]:
    config = ModelConfig.model_validate({"path": str(model), "dtype": "bfloat16"})
    backend = FSDPBackend(config, TrainerConfig(lr=lr), None, temperature=1.0, max_new_tokens=64, seed=0, total_steps=100, rank=0, world=1)
    manifest = plan(1, backend.weight_specs(), 64)
    reader, held, figures = DeltaReader(), export(backend, manifest), []
    for number in range(warm_up + count):
        backend.step_sft(batch(number))
        started = time.process_time()
        written = write_record(backend, 0, str(store), manifest, False)
        assert written is not None
        wrote = time.process_time()
        payload = FromStore(str(store), written.record)
        new = {name: tensor for bucket in manifest.buckets for name, tensor in reader.read(bucket, payload, held.__getitem__).items()}
        read = time.process_time()
        reader.commit()
        different = sum(int((new[name].view(torch.int16) != held[name].view(torch.int16)).sum()) for name in new)
        total = sum(tensor.numel() for tensor in new.values())
        held = new
        if number >= warm_up:
            figures.append(Figures(written.nbytes, written.nbytes / export_bytes(manifest), different / total, wrote - started, read - wrote))
    return figures


def export(backend: FSDPBackend, manifest: Manifest) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.weight_tensors([spec.name for spec in manifest.tensors])}


def batch(number: int) -> list[Sample]:
    rng = np.random.default_rng(number)
    return [
        Sample(
            sample_id=f"{number}/{row}",
            group_id=str(row),
            tokens=rng.integers(3, 12, 64),
            prompt_length=1,
            loss_mask=np.ones(63, np.bool_),
            logprobs=np.zeros(63, np.float32),
            weight_versions=np.full(63, -1, np.int32),
            status=Status.COMPLETED,
        )
        for row in range(4)
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--params", type=float, default=50e6)
    parser.add_argument("--warm-up", type=int, default=4, help="steps before the first that is counted")
    parser.add_argument("--steps", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
