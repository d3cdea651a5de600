"""Weight sync against what other systems do, alternating in one run on one machine: bytes, copies, seconds.

    python scripts/bench/weight_sync.py                            torch engines, 4M parameters
    python scripts/bench/weight_sync.py --params 50e6 --engines 2
    python scripts/bench/weight_sync.py --sglang                   one SGLang server as well

An FSDP2 trainer and its engines are Ray actors, as in a run. Every way moves the same export into every engine, after the weights have
changed, and in the first round the engines' bytes are checked. Ways:

    miles views                       engines read the trainer's own weights; for synchronous runs. The transaction is the same
    miles tensor, broadcast, p2p      WeightSync.publish: the whole transaction, journal and pause included, digests off
    miles p2p, digests                the same with xxh3 of every piece on both sides: what `weight_sync.verify = "always"` costs
    torch.save through Ray            rank 0 gathers all tensors, torch.save, object store, torch.load, load_state_dict; no transaction
    SGLang update_weights_from_tensor rank 0 gathers, SGLang's own serialiser and endpoint, between its begin and end; no transaction

`copies` counts how often each byte of the export is written in user space or into a socket on its way from gathered tensor to served
parameter, read off the code; for `p2p` from shard to served parameter. `read` is what the transfer engine's own telemetry counts in one
engine, over what that engine holds. `CPU-s` is user and system time of trainer, engines and driver for one update. Gloo on loopback
says nothing about NCCL, nor NIXL's TCP about RDMA: machines with GPUs are not measured here.

The last lines say what the trainer's ranks and the engines hold together before and after the first update of their lives by `views`, shared
pages counted once (PSS), and how fast a plain copy of the export's bytes is.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# A script's own folder comes first on the path, where this file would hide the package it is named after.
sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p).resolve() not in (Path(__file__).resolve().parent, ROOT))]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

from miles.core.environment import set_defaults, worker_environment  # noqa: E402

set_defaults(threads=1)
os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")

import psutil  # noqa: E402
import ray  # noqa: E402
import torch  # noqa: E402

from miles.core.checkpoint.config import CheckpointConfig  # noqa: E402
from miles.core.model.config import ModelConfig  # noqa: E402
from miles.core.model.tiny import make_tiny_model  # noqa: E402
from trainer.actor import TrainerGroup  # noqa: E402
from trainer.config import TrainerConfig  # noqa: E402
from weight_sync.buckets import export_bytes, plan  # noqa: E402
from weight_sync.config import WeightSyncConfig  # noqa: E402
from weight_sync.gather import export_specs  # noqa: E402
from weight_sync.transaction import WeightSync  # noqa: E402

LAYERS = 4


@dataclass
class Way:
    """One way of bringing weights across, and what it took in each round."""

    name: str
    engine: str
    copies: str
    run: Callable[[], Awaitable[None]]
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    read: int = 0


class TorchHost:
    """Holds a torch engine."""

    def __init__(self, model: ModelConfig) -> None:
        from rollout.engines.torch_engine import TorchEngine

        self.engine: Any = TorchEngine(model, max_running=4, threads=1)

    async def start(self) -> int:
        return os.getpid()

    async def call(self, method: str, *args: Any) -> Any:
        function = getattr(self.engine, method)
        if asyncio.iscoroutinefunction(function):
            return await function(*args)
        return await asyncio.to_thread(function, *args)

    async def load_saved(self, saved: bytes) -> None:
        """Into a model as transformers has it: the engine's own products of several parameters would be slow to copy into."""
        if self.engine._decoder.bound:
            self.engine._decoder.unbind()
            for parameter in self.engine._weights._model.parameters():
                parameter.data = parameter.data.contiguous()
        await self.engine.pause("retract")
        self.engine._weights._model.load_state_dict(torch.load(io.BytesIO(saved)), strict=False)
        await self.engine.resume()

    async def bytes_read(self) -> int:
        """By p2p, since the start."""
        return int(self.engine._weights._shards.moved.bytes)

    async def total(self) -> float:
        return _total(self.engine._weights._model)

    async def close(self) -> None:
        await self.engine.close()


class SGLangHost(TorchHost):
    """Holds an SGLang engine and its server."""

    def __init__(self, model: ModelConfig) -> None:
        from rollout.config import RolloutConfig
        from rollout.engines.sglang_engine import SGLangEngine

        self.engine = SGLangEngine(model, RolloutConfig(engine="sglang", max_running=8), log_folder=Path(tempfile.mkdtemp()))

    async def start(self) -> int:
        await self.engine.start()
        return os.getpid()

    async def address(self) -> tuple[str, dict[str, str]]:
        return self.engine._server.url, self.engine._server._headers()


@dataclass
class Hosts:
    """The `Engines` of weight_sync over Ray actors."""

    actors: list[Any]

    @property
    def engine_ids(self) -> Sequence[int]:
        return range(len(self.actors))

    async def call(self, engine_id: int, method: str, *args: Any) -> Any:
        return await self.actors[engine_id].call.remote(method, *args)


def move(backend: Any, rank: int) -> int:
    """Other weights."""
    with torch.no_grad():
        for parameter in backend.model.parameters():
            parameter.mul_(0.999)
    return os.getpid()


def total(backend: Any, rank: int) -> float:
    names = [spec.name for spec in backend.weight_specs()]
    return sum(float(tensor.double().sum()) for _, tensor in backend.weight_tensors(names))


def _total(model: torch.nn.Module) -> float:
    return sum(float(parameter.double().sum()) for parameter in model.parameters())


def save_all(backend: Any, rank: int) -> Any:
    """Rank 0's whole state dict as torch.save writes it, in the object store."""
    state = dict(backend.weight_tensors([spec.name for spec in backend.weight_specs()]))
    if rank != 0:
        return None
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return ray.put(buffer.getvalue())


def post_tensors(backend: Any, rank: int, url: str, headers: dict[str, str]) -> None:
    """Rank 0 hands all tensors to SGLang's own endpoint."""
    tensors = list(backend.weight_tensors([spec.name for spec in backend.weight_specs()]))
    if rank != 0:
        return
    import json
    import urllib.request

    import torch.multiprocessing

    torch.multiprocessing.set_sharing_strategy("file_system")  # the server is no child of this process
    from sglang.srt.utils import MultiprocessingSerializer

    if backend.world == 1:  # sharing would move the parameters themselves
        tensors = [(name, tensor.clone()) for name, tensor in tensors]
    payload = MultiprocessingSerializer.serialize([(name, tensor.detach()) for name, tensor in tensors], output_str=True)
    for path, body in (
        ("/begin_weight_update", {}),
        ("/update_weights_from_tensor", {"serialized_named_tensors": [payload], "flush_cache": True}),
        ("/end_weight_update", {}),
    ):
        urllib.request.urlopen(urllib.request.Request(url + path, json.dumps(body).encode(), headers), timeout=300).read()


def tree_cpu(pids: Sequence[int]) -> float:
    """CPU-seconds so far of these processes and all below them."""
    spent = 0.0
    for pid in pids:
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            times = process.cpu_times()
            spent += times.user + times.system
    return spent


async def measure(ways: list[Way], rounds: int, trainer: TrainerGroup, pids: Sequence[int], hosts: dict[str, Hosts]) -> None:
    for number in range(rounds + 1):
        for way in ways:
            await trainer.run_on_ranks(move)
            before = await hosts[way.engine].actors[0].bytes_read.remote()
            cpu, started = tree_cpu(pids), time.perf_counter()
            await way.run()
            seconds, spent = time.perf_counter() - started, tree_cpu(pids) - cpu
            way.read = await hosts[way.engine].actors[0].bytes_read.remote() - before
            if number == 0:  # warm-up; the only round that is checked
                await check(way, trainer, hosts[way.engine])
                continue
            way.seconds.append(seconds)
            way.cpu.append(spent)


async def check(way: Way, trainer: TrainerGroup, hosts: Hosts) -> None:
    if way.engine == "sglang":
        return  # publish compares digests with the server's own checksums where it verifies; SGLang's endpoint has answered
    expected = (await trainer.run_on_ranks(total))[0]
    for actor in hosts.actors:
        found = await actor.total.remote()
        if abs(found - expected) > 1e-6 * abs(expected):
            raise SystemExit(f"{way.name}: the engine holds other weights than the trainer ({found} and {expected})")


def make_ways(arguments: argparse.Namespace, folder: Path, trainer: TrainerGroup, hosts: dict[str, Hosts]) -> tuple[list[Way], list[WeightSync]]:
    ways: list[Way] = []
    syncs: list[WeightSync] = []
    versions = iter(range(1, 10**6))
    copies = {("torch", "tensor"): "1 + 1", ("torch", "broadcast"): "2 + 2", ("sglang", "tensor"): "1 + 1", ("sglang", "broadcast"): "2 + 3"}
    copies |= {("torch", "p2p"): "2 + 2", ("sglang", "p2p"): "2 + 2", ("views", "views"): "0 + 0"}
    for engine, group in hosts.items():
        if engine == "plain":
            continue
        # Engines of their own: once they serve from the trainer's memory, other ways of loading would write there.
        found = [("views", "never")] if engine == "views" else [("tensor", "never"), ("broadcast", "never"), ("p2p", "never"), ("p2p", "always")]
        for transport, verify in found:
            config = WeightSyncConfig.model_validate({"transport": transport, "bucket_mb": arguments.bucket_mb, "verify": verify})
            sync = WeightSync(config, folder / f"{engine}-{transport}-{verify}.jsonl", trainer, group)
            syncs.append(sync)

            async def publish(sync: WeightSync = sync) -> None:
                await sync.publish(next(versions))

            name = f"miles {transport}" + (", digests" if verify == "always" else "")
            ways.append(Way(name, engine, copies[engine, transport], publish))

    async def through_ray() -> None:
        saved = (await trainer.run_on_ranks(save_all))[0]
        await asyncio.gather(*(actor.load_saved.remote(saved) for actor in hosts["plain"].actors))

    ways.append(Way("torch.save through Ray", "plain", "3 + 3", through_ray))
    if "sglang" in hosts:

        async def sglangs_own() -> None:
            url, headers = await hosts["sglang"].actors[0].address.remote()
            await trainer.run_on_ranks(post_tensors, url, headers)

        ways.append(Way("SGLang update_weights_from_tensor", "sglang", "1 + 1", sglangs_own))
    return ways, syncs


def memory(pids: Sequence[int]) -> float:
    """MiB that these processes hold, pages that several map counted in parts."""
    return sum(psutil.Process(pid).memory_full_info().pss for pid in pids) / 2**20


def plain_copy(size: int) -> float:
    """Seconds, at best of five, into memory that was written before."""
    source, target = torch.ones(size // 4), torch.zeros(size // 4)
    found = []
    for _ in range(5):
        started = time.perf_counter()
        target.copy_(source)
        found.append(time.perf_counter() - started)
    return min(found)


def show(ways: list[Way], size: int) -> None:
    print(f"\n{'engine':8} {'way':36} {'MiB/engine':>10} {'read':>7} {'copies':>8} {'seconds':>9} {'CPU-s':>8} {'of baseline':>12}")
    for engine in ("torch", "sglang"):
        of_engine = [way for way in ways if (way.engine == "sglang") == (engine == "sglang")]
        if not of_engine:
            continue
        baseline = statistics.median(of_engine[-1].seconds)
        for way in of_engine:
            seconds, cpu = statistics.median(way.seconds), statistics.median(way.cpu)
            read = f"{way.read / size:.3f}x" if way.read else ""
            print(f"{engine:8} {way.name:36} {size / 2**20:10.1f} {read:>7} {way.copies:>8} {seconds:9.3f} {cpu:8.3f} {seconds / baseline:11.2f}x")
    print("\nmedians; copies: by the sender + by each engine; baseline: the last way of each engine")


async def bench(arguments: argparse.Namespace, folder: Path) -> None:
    hidden = max(32, round((arguments.params / (15 * LAYERS)) ** 0.5 / 32) * 32)
    path = make_tiny_model(folder / "model", alphabet="abcdefghijklmnopqrstuvwxyz", hidden=hidden, layers=LAYERS)
    model = ModelConfig.model_validate({"path": str(path)})
    trainer = TrainerGroup(
        model=model,
        trainer=TrainerConfig.model_validate({"ranks": arguments.ranks}),
        algorithm=None,
        checkpoint=CheckpointConfig(),  # type: ignore[call-arg]
        temperature=1.0,
        max_new_tokens=1,
        seed=0,
        total_steps=1,
    )
    options = {"num_cpus": 1, "max_concurrency": 100, "runtime_env": {"env_vars": worker_environment(1)}}
    hosts = {name: Hosts([ray.remote(TorchHost).options(**options).remote(model) for _ in range(arguments.engines)]) for name in ("views", "torch", "plain")}
    if arguments.sglang:
        hosts["sglang"] = Hosts([ray.remote(SGLangHost).options(**options).remote(model)])
    syncs: list[WeightSync] = []
    try:
        await trainer.start()
        ranks = await trainer.run_on_ranks(move)
        by_group = {name: [await actor.start.remote() for actor in group.actors] for name, group in hosts.items()}
        pids = [os.getpid(), *ranks, *(pid for group in by_group.values() for pid in group)]
        ways, syncs = make_ways(arguments, folder, trainer, hosts)
        specs = (await trainer.run_on_ranks(export_specs))[0]
        size = export_bytes(plan(0, specs, arguments.bucket_mb))
        before = memory([*ranks, *by_group["views"]])
        await ways[0].run()
        after = memory([*ranks, *by_group["views"]])
        await measure(ways, arguments.rounds, trainer, pids, hosts)
        show(ways, size)
        print(f"memory of {len(ranks)} ranks and {len(by_group['views'])} engines: {before:,.0f} MiB, after an update by views {after:,.0f} MiB")
        print(f"a plain copy of {size / 2**20:,.1f} MiB: {plain_copy(size):.3f} s")
    finally:
        for sync in syncs:
            await sync.close()
        await asyncio.gather(*(actor.close.remote() for group in hosts.values() for actor in group.actors))
        await trainer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--params", type=float, default=4e6, help="parameters of the model, about")
    parser.add_argument("--ranks", type=int, default=2, help="trainer ranks")
    parser.add_argument("--engines", type=int, default=1, help="torch engines")
    parser.add_argument("--rounds", type=int, default=7, help="updates by each way after a warm-up")
    parser.add_argument("--bucket-mb", type=float, default=64.0, help="weight_sync.bucket_mb")
    parser.add_argument("--sglang", action="store_true", help="also one SGLang server, where SGLang is installed")
    arguments = parser.parse_args()
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=max(150 * 2**20, int(arguments.params * 24)))
    try:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(bench(arguments, Path(folder)))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
