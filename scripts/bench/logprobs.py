"""Log-probs, entropies and the loss on them over a large vocabulary: the fused form against autograd over whole logits.

    python scripts/bench/logprobs.py                        # vocabularies 32,000 and 150,000, with and without entropy; some 5 minutes on a CPU
    python scripts/bench/logprobs.py --vocabulary 32000 --width 256
    python scripts/bench/logprobs.py --device cuda          # the Triton kernels; not measured yet

Forward and backward of one batch, forms alternating in one session, one CPU thread, CPU-seconds (on CUDA: seconds by events). The loss is
the clipped surrogate's, token by token, with an entropy bonus where entropy is asked for. `sequences` is the fused form for losses that
need whole sequences, of which each is half of all tokens here: where it is longer than a chunk, logits are computed twice. Beside it: the
bytes that the graph keeps between forward and backward, and how far the resident memory of a fresh process rises (on CUDA: allocated
bytes).

Bound: fused / unfused is at most 1.00 at both vocabularies, with and without entropy, by the medians and by the fastest runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from miles.core.environment import worker_environment  # noqa: E402

if "GLIBC_TUNABLES" not in os.environ:  # the allocator of a trainer's rank, for all forms alike; it is chosen when a process starts
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **worker_environment(1)})

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from miles.core.model.fused_loss import even_parts, fused_loss  # noqa: E402
from trainer.config import TrainerConfig  # noqa: E402

MIB = 2**20
BOUND = 1.0
FORMS = ("unfused", "fused", "sequences")


class Task:
    """One batch: `step(form)` is its forward and backward."""

    def __init__(self, options: argparse.Namespace, vocabulary: int, entropy: bool) -> None:
        self.options, self.entropy = options, entropy
        torch.manual_seed(0)
        make = {"dtype": getattr(torch, options.dtype), "device": options.device}
        self.hidden_ND = torch.randn(options.tokens, options.width, **make).requires_grad_()
        self.weight_VD = torch.randn(vocabulary, options.width, **make).mul_(options.width**-0.5).requires_grad_()
        self.targets_N = torch.randint(0, vocabulary, (options.tokens,), device=options.device)
        self.old_N = torch.full((options.tokens,), -11.0, device=options.device)
        self.saved = 0

    def step(self, form: str) -> float:
        self.hidden_ND.grad = self.weight_VD.grad = None
        kept: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = self._unfused() if form == "unfused" else self._fused(form)
        # The weight is there anyway.
        kept.pop(self.weight_VD.untyped_storage().data_ptr(), None)
        self.saved = sum(kept.values())
        loss.backward()
        return loss.item()

    def _loss(self, part: slice, logprobs_N: Tensor, entropy_N: Tensor | None) -> Tensor:
        ratio_N = (logprobs_N - self.old_N[part]).clamp(-20, 20).exp()
        loss = -torch.minimum(ratio_N, ratio_N.clamp(0.8, 1.28)).sum() / len(self.targets_N)
        return loss if entropy_N is None else loss - 0.01 * entropy_N.sum() / len(self.targets_N)

    def _unfused(self) -> Tensor:
        every_NV = torch.log_softmax((self.hidden_ND @ self.weight_VD.T).float(), -1)
        logprobs_N = every_NV.gather(1, self.targets_N[:, None]).squeeze(1)
        return self._loss(slice(None), logprobs_N, -(every_NV.exp() * every_NV).sum(-1) if self.entropy else None)

    def _fused(self, form: str) -> Tensor:
        count, chunk = self.options.tokens, self.options.chunk
        parts = even_parts(count, chunk) if form == "fused" else even_parts(count, count // 2)
        return fused_loss(self.hidden_ND, self.weight_VD, self.targets_N, self._loss, parts, temperature=1.0, chunk=chunk, entropy=self.entropy)


def seconds(device: str, step: Callable[[], object]) -> float:
    if device == "cpu":
        begin = time.process_time()
        step()
        return time.process_time() - begin
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin_event.record()
    step()
    end_event.record()
    torch.cuda.synchronize()
    return begin_event.elapsed_time(end_event) / 1000


def rise(arguments: list[str], vocabulary: int, entropy: bool, form: str) -> float:
    """MiB by which one step raises a fresh process's peak."""
    command = [sys.executable, __file__, *arguments, "--vocabulary", str(vocabulary), "--alone", form, *(["--entropy"] if entropy else [])]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def alone(options: argparse.Namespace) -> float:
    task = Task(options, options.vocabulary[0], options.entropy)
    if options.device != "cpu":
        before = torch.cuda.memory_allocated()
        task.step(options.alone)
        return (torch.cuda.max_memory_allocated() - before) / MIB
    (task.hidden_ND @ task.weight_VD[:64].T).sum()  # the library's own buffers
    before = peak_resident()
    task.step(options.alone)
    return peak_resident() - before


def peak_resident() -> float:
    """MiB this process has had resident at most (getrusage would count its parent before exec, too)."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def compare(options: argparse.Namespace, vocabulary: int, entropy: bool) -> bool:
    """Prints one line a form; whether the bound is kept."""
    task = Task(options, vocabulary, entropy)
    taken: dict[str, list[float]] = {form: [] for form in FORMS}
    losses, saved = {}, {}
    for repeat in range(options.repeats + 1):
        for form in FORMS if repeat % 2 else FORMS[::-1]:
            spent = seconds(options.device, lambda form=form: losses.__setitem__(form, task.step(form)))  # type: ignore[misc]
            saved[form] = task.saved
            if repeat:
                taken[form].append(spent)
    assert max(losses.values()) - min(losses.values()) < 1e-4 * abs(losses["unfused"]), losses
    base, fastest = statistics.median(taken["unfused"]), min(taken["unfused"])
    arguments = [f"--{name}={getattr(options, name)}" for name in ("tokens", "width", "chunk", "dtype", "device")]
    for form in FORMS:
        median, extra = statistics.median(taken[form]), rise(arguments, vocabulary, entropy, form)
        print(
            f"{vocabulary:>10,} {options.chunk:>6,} {'yes' if entropy else 'no':>8} {form:>10} "
            f"{median:>9.3f} {min(taken[form]):>7.3f} {max(taken[form]):>7.3f} "
            f"{median / base:>7.2f} {min(taken[form]) / fastest:>9.2f} {saved[form] / MIB:>11.0f} {extra:>13.0f}",
            flush=True,
        )
    return statistics.median(taken["fused"]) <= BOUND * base and min(taken["fused"]) <= BOUND * fastest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32_000, 150_000])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=0, help="tokens whose logits exist at once; 0: as many as the trainer takes by itself")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--alone", choices=FORMS, help=argparse.SUPPRESS)
    parser.add_argument("--entropy", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.alone:
        options.chunk = options.chunk or TrainerConfig().chunk(options.vocabulary[0])
        print(alone(options))
        return 0
    print(f"{options.tokens} tokens, width {options.width}, {options.dtype} on {options.device}; median of {options.repeats}")
    times = f"{'seconds':>9} {'min':>7} {'max':>7} {'ratio':>7} {'of mins':>9}"
    print(f"{'vocabulary':>10} {'chunk':>6} {'entropy':>8} {'form':>10} {times} {'saved MiB':>11} {'peak rise MiB':>13}")
    kept = []
    for vocabulary in options.vocabulary:
        own = argparse.Namespace(**vars(options) | {"chunk": options.chunk or TrainerConfig().chunk(vocabulary)})
        kept += [compare(own, vocabulary, entropy) for entropy in (False, True)]
    print(f"fused / unfused <= {BOUND:.2f}: {'kept' if all(kept) else 'MISSED'}")
    return 0 if all(kept) else 1


if __name__ == "__main__":
    raise SystemExit(main())
