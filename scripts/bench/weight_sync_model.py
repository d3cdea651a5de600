"""How long an update takes on a cluster, from a model with three constants: checked here against small cases, then printed for 8 to 1,024 ranks.

    python scripts/bench/weight_sync_model.py                          64 MiB over loopback TCP, 1, 2, 4 ranks to 1 and 2 engines
    python scripts/bench/weight_sync_model.py --weights-gb 140 --nic-gb 50 --ranks-per-nic 8

The model of `p2p`: every engine reads all P bytes; a trainer machine sends its share to each engine, an engine's machine takes P for each
of its engines; machines work at once, and a NIC is shared by the ranks (or the engine) of its machine.

    seconds = per_request * requests of one engine + max(E P / trainer NICs, P engines_per_nic) / bandwidth + P / ranks / memory   (packing)

and of gather and broadcast through rank 0, overlapped by buckets: max(gather, broadcast) = P / bandwidth, and the copies that rank 0 makes of
all P. `digests` adds xxh3 of P / ranks on a trainer rank, which runs while engines read, and of P on each engine behind it.

Of one machine, loopback is the one NIC of all. Two of the small cases give `bandwidth` and `per_request`; the others are predictions. What is
printed for a cluster is *simulated*: bandwidth there is an argument, not a measurement.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# A script's own folder comes first on the path, where weight_sync.py would hide the package of that name.
sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p).resolve() not in (Path(__file__).resolve().parent, ROOT))]

from miles.core.environment import set_defaults  # noqa: E402

set_defaults(threads=1)
os.environ.update(CUDA_VISIBLE_DEVICES="")

import torch  # noqa: E402

from weight_sync.buckets import plan  # noqa: E402
from weight_sync.contracts import FromShards, Manifest, TensorSpec  # noqa: E402
from weight_sync.digests import digest  # noqa: E402
from weight_sync.layout import nbytes  # noqa: E402
from weight_sync.slices import Slice, rows_of, whole  # noqa: E402
from weight_sync.transports.p2p import Outbox, ShardReader  # noqa: E402
from weight_sync.transports.p2p_transport import Plan  # noqa: E402

MOST_RANKS, MOST_ENGINES, TENSORS = 4, 2, 128


@dataclass(frozen=True)
class Constants:
    """Bytes a second of one NIC, of copying in memory and of xxh3, and seconds of one request."""

    bandwidth: float
    memory: float
    hashing: float
    per_request: float


def p2p_seconds(weights: float, ranks: int, engines: int, requests: int, c: Constants, *, ranks_per_nic: int, engines_per_nic: int, digests: bool) -> float:
    """See the module. `weights`: bytes of the export."""
    nics = -(-ranks // ranks_per_nic)
    wire = max(engines * weights / nics, weights * min(engines, engines_per_nic)) / c.bandwidth
    hashing = max(0.0, weights / ranks / c.hashing - wire) + weights / c.hashing if digests else 0.0
    return requests * c.per_request + wire + weights / ranks / c.memory + hashing


def gathered_seconds(weights: float, c: Constants, *, copies: int = 2) -> float:
    """Through rank 0: gathering and a pipelined broadcast overlap, the copies of all bytes on one rank do not."""
    return weights / c.bandwidth + copies * weights / c.memory


def _source(pipe: Connection, size: int) -> None:
    outbox = Outbox(loopback=True)  # must live while engines read
    pipe.send(outbox.reserve(size))
    pipe.recv()


def _engine(pipe: Connection) -> None:
    reader = ShardReader("engine")
    buffers: dict[int, torch.Tensor] = {}
    while (work := pipe.recv()) is not None:
        started = time.perf_counter()
        for bucket, payload in work:
            flat = buffers.setdefault(bucket.index, torch.zeros(nbytes(bucket), dtype=torch.uint8))
            reader.read(bucket, payload, flat)
        pipe.send((time.perf_counter() - started, reader.moved))


def manifest_of(size: int) -> Manifest:
    rows = max(MOST_RANKS, size // TENSORS // 1024)
    return plan(1, [TensorSpec(f"t{i}", (rows, 256), "float32") for i in range(TENSORS)], 16)


def measure(size: int, rounds: int) -> dict[tuple[int, int], tuple[float, int, int]]:
    """Median seconds, requests of one engine and bytes that one engine read, by ranks and engines."""
    manifest = manifest_of(size)
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for number in range(MOST_RANKS + MOST_ENGINES):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_source, args=(theirs, 2 * size)) if number < MOST_RANKS else context.Process(target=_engine, args=(theirs,)))
        processes[-1].start()
        pipes.append(ours)
    sources = tuple(pipe.recv() for pipe in pipes[:MOST_RANKS])
    cases = list(itertools.product((1, 2, 4), (1, 2)))
    seconds: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    requests: dict[tuple[int, int], int] = {}
    read: dict[tuple[int, int], int] = {}
    before = [0] * MOST_ENGINES
    for _ in range(rounds + 1):
        for ranks, engines in cases:
            held = [[Slice(s.name, (rows_of(s.shape[0], ranks, rank), (0, s.shape[1]))) for s in manifest.tensors] for rank in range(ranks)]
            made = Plan(manifest, held, [[whole(spec) for spec in manifest.tensors]] * engines)
            started = time.perf_counter()
            for engine in range(engines):
                work = [(bucket, FromShards(sources, made.reads[engine, bucket.index], True, 60)) for bucket in manifest.buckets]
                pipes[MOST_RANKS + engine].send(work)
            answers = [pipes[MOST_RANKS + engine].recv() for engine in range(engines)]
            seconds[ranks, engines].append(time.perf_counter() - started)
            read[ranks, engines] = answers[0][1].bytes - before[0]
            before[: len(answers)] = [moved.bytes for _, moved in answers]
            requests[ranks, engines] = sum(len(made.reads[0, bucket.index]) for bucket in manifest.buckets)
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join()
    return {case: (statistics.median(times[1:]), requests[case], read[case]) for case, times in seconds.items()}


def timed(function: object, *args: object) -> float:
    started = time.perf_counter()
    function(*args)  # type: ignore[operator]
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size-mb", type=int, default=64, help="bytes of the small cases, MiB")
    parser.add_argument("--rounds", type=int, default=5, help="updates of each small case after a warm-up")
    parser.add_argument("--weights-gb", type=float, default=140.0, help="the cluster's export, GB (70B parameters in bfloat16: 140)")
    parser.add_argument("--nic-gb", type=float, default=50.0, help="bandwidth of one NIC, GB/s (400 Gb/s: 50)")
    parser.add_argument("--ranks-per-nic", type=int, default=8, help="trainer ranks that share a NIC")
    arguments = parser.parse_args()
    size = arguments.size_mb * 2**20
    found = measure(size, arguments.rounds)
    held = sum(map(nbytes, manifest_of(size).buckets))
    one, four = found[1, 1], found[4, 1]
    # Loopback is one NIC for all: seconds = requests * per_request + engines * bytes / bandwidth, from (1, 1), (4, 1) and nothing else.
    per_request = max(0.0, (four[0] - one[0]) / (four[1] - one[1]))
    buffer = torch.zeros(size // 4)
    other = torch.empty_like(buffer).fill_(1)
    constants = Constants(
        bandwidth=held / max(one[0] - one[1] * per_request, 1e-9),
        memory=size / min(timed(other.copy_, buffer) for _ in range(5)),
        hashing=size / min(timed(digest, buffer) for _ in range(5)),
        per_request=per_request,
    )
    print(f"loopback {constants.bandwidth / 2**20:,.0f} MiB/s, {1e6 * per_request:.0f} us a request, copying {constants.memory / 2**30:.1f} GiB/s, "
          f"xxh3 {constants.hashing / 2**30:.1f} GiB/s of {torch.get_num_threads()} thread")  # fmt: skip
    print(f"\n{'ranks':>5} {'engines':>7} {'read/held':>9} {'requests':>8} {'seconds':>8} {'model':>8}  {'':>9}")
    for (ranks, engines), (seconds, requests, read) in found.items():
        predicted = requests * per_request + engines * held / constants.bandwidth
        kind = "fitted" if (ranks, engines) in ((1, 1), (4, 1)) else f"{predicted / seconds - 1:+.0%}"
        print(f"{ranks:5} {engines:7} {read / held:9.4f} {requests:8} {seconds:8.3f} {predicted:8.3f}  {kind:>9}")
    cluster = Constants(arguments.nic_gb * 1e9, constants.memory, constants.hashing, per_request)
    weights = arguments.weights_gb * 1e9
    print(f"\nsimulated: {arguments.weights_gb:g} GB, {arguments.nic_gb:g} GB/s a NIC, {arguments.ranks_per_nic} trainer ranks and one engine on each; seconds")
    print(f"{'ranks':>5} {'engines':>7} {'p2p':>8} {'+ xxh3':>8} {'through rank 0':>15}")
    for ranks in (8, 16, 32, 64, 128, 256, 512, 1024):
        engines = max(1, ranks // 8)
        args = (weights, ranks, engines, 1000 * min(ranks, 8), cluster)
        times = [p2p_seconds(*args, ranks_per_nic=arguments.ranks_per_nic, engines_per_nic=1, digests=digests) for digests in (False, True)]
        print(f"{ranks:5} {engines:7} {times[0]:8.2f} {times[1]:8.2f} {gathered_seconds(weights, cluster):15.2f}")


if __name__ == "__main__":
    main()
