"""Weight updates from the FSDP trainer into the real SGLang server."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles.core.model.config import ModelConfig
from miles.core.model.load import load_model
from rollout.config import RolloutConfig
from rollout.engines.contracts import Request, SamplingParams
from rollout.engines.sglang_engine import SGLangEngine
from tests.weight_sync.cast import Cast, publish
from tests.weight_sync.parts import export_tensors
from tests.weight_sync.processes import EngineProcesses, Process
from weight_sync.contracts import Bucket, GroupSpec, TensorSpec
from weight_sync.transaction import UpdateAborted, WeightSync
from weight_sync.transports.broadcast import Listener, join

pytestmark = pytest.mark.sglang
TRANSPORTS = ["tensor", "broadcast", "p2p", "delta"]


class OneServer:
    """The `Engines` of weight_sync over the session's server; raises at the call that `fail_at` counts down to."""

    engine_ids: Sequence[int] = (0,)

    def __init__(self, engine: SGLangEngine, fail_at: str = "", nth: int = 1) -> None:
        self._engine, self._fail_at, self._nth = engine, fail_at, nth

    async def call(self, engine_id: int, method: str, *args: Any) -> Any:
        if method == self._fail_at:
            self._nth -= 1
            if self._nth == 0:
                raise RuntimeError("injected")
        function = getattr(self._engine, method)
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        return await asyncio.to_thread(function, *args)


@pytest.fixture(scope="module")
def trainer(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cast]:
    made = Cast(tiny_model, tmp_path_factory.mktemp("ranks"), world=2, engines=0)
    yield made
    made.close()


def answer(engine: SGLangEngine) -> tuple[list[int], list[float], set[int]]:
    request = Request(request_id="probe", prompt=np.array([9, 10, 11]), sampling=SamplingParams(max_new_tokens=8, temperature=1.0, seed=3))
    made = asyncio.run(engine.generate([request]))[0]
    return made.tokens.tolist(), made.logprobs.tolist(), set(made.weight_versions.tolist())


def mismatch(engine: SGLangEngine, model_path: Path, trainer: Cast) -> float:
    """Largest difference between the server's log-probs and those of transformers with the trainer's exported tensors."""
    tokens, logprobs, _ = answer(engine)
    model = load_model(str(model_path))
    exported = asyncio.run(trainer.trainer.run_on_ranks(export_tensors))[0]
    model.load_state_dict({name: torch.from_numpy(array) for name, array in exported.items()})
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[9, 10, 11, *tokens]]), use_cache=False).logits[0, 2:-1]
    expected = torch.log_softmax(logits, -1)[torch.arange(len(tokens)), torch.tensor(tokens)]
    return float((expected - torch.tensor(logprobs)).abs().max())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_server_answers_with_the_trainers_weights_and_version(
    sglang_engine: SGLangEngine, trainer: Cast, tiny_model: Path, tmp_path: Path, transport: str
) -> None:
    trainer.train()
    version = sglang_engine.weights_version() + 1
    result = publish(WeightSync(trainer.config(transport, timeout_s=60.0), tmp_path / "journal", trainer.trainer, OneServer(sglang_engine)), version)
    assert result.digests_compared > 0
    assert mismatch(sglang_engine, tiny_model, trainer) < 1e-4
    assert answer(sglang_engine)[2] == {version}


@pytest.mark.parametrize("stage", ["weights_receive", "weights_prepared"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_whose_update_failed_half_way_answers_with_the_old_weights(
    sglang_engine: SGLangEngine, trainer: Cast, tiny_model: Path, tmp_path: Path, transport: str, stage: str
) -> None:
    journal, version = tmp_path / "journal", sglang_engine.weights_version() + 1
    config = trainer.config(transport, timeout_s=60.0)
    publish(WeightSync(config, journal, trainer.trainer, OneServer(sglang_engine)), version)
    before = mismatch(sglang_engine, tiny_model, trainer)
    trainer.train()
    with pytest.raises(UpdateAborted, match=f"engine 0 failed at {stage}"):
        publish(WeightSync(config, journal, trainer.trainer, OneServer(sglang_engine, stage, nth=2 if stage == "weights_receive" else 1)), version + 1)
    assert before < 1e-4 < mismatch(sglang_engine, tiny_model, trainer)
    assert answer(sglang_engine)[2] == {version}


@pytest.mark.full
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_killed_half_way_leaves_the_other_engine_on_the_old_weights(tiny_model: Path, tmp_path: Path, transport: str) -> None:
    server = SGLangEngine(ModelConfig(path=str(tiny_model)), RolloutConfig(engine="sglang", max_running=8), log_folder=tmp_path)
    cast = Cast(tiny_model, tmp_path, world=2, engines=1)
    engines = ServerAndTorch(server, cast.engines)
    try:
        asyncio.run(server.start())
        exported = cast.train()
        publish(WeightSync(cast.config(transport, timeout_s=60.0), tmp_path / "journal", cast.trainer, engines), 1)
        cast.train()
        engines.kill_at = "weights_receive"
        with pytest.raises(UpdateAborted, match="from version 1 to 2: engine 1 failed at weights_receive") as caught:
            publish(WeightSync(cast.config(transport, timeout_s=60.0), tmp_path / "journal", cast.trainer, engines), 2)
        assert list(caught.value.dead) == [1]
        assert cast.generating() == {0: 1}
        assert cast.held() == {0: exported}
    finally:
        asyncio.run(server.close())
        cast.close()


class ServerAndTorch:
    """Engine 0 is a torch engine's process, engine 1 an SGLang server that dies by SIGKILL before `kill_at`."""

    engine_ids: Sequence[int] = (0, 1)
    kill_at = ""

    def __init__(self, server: SGLangEngine, others: EngineProcesses) -> None:
        self._server, self._pid, self._others = OneServer(server), lambda: server.pid, others

    async def call(self, engine_id: int, method: str, *args: Any) -> Any:
        if engine_id == 0:
            return await self._others.call(0, method, *args)
        if method == self.kill_at:
            os.killpg(self._pid(), signal.SIGKILL)
        return await self._server.call(0, method, *args)


class SGLangsOwnGroup:
    """A member that joins as SGLang's `init_weights_update_group` does, and receives as its `flattened_bucket` format does."""

    def receive(self, port: int, sizes: list[int]) -> list[float]:
        from sglang.srt.utils import init_custom_process_group
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        group = init_custom_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=2, rank=1, group_name="g")
        bucket = FlattenedTensorBucket.empty([str(i) for i in range(len(sizes))], ["float32"] * len(sizes), [(size,) for size in sizes], "cpu")
        torch.distributed.broadcast(bucket.get_flattened_tensor(), src=0, group=group)
        return [float(value) for _, tensor in bucket.reconstruct_tensors() for value in tensor]


@pytest.mark.full
def test_sglangs_own_process_group_can_be_a_member() -> None:
    member = Process(SGLangsOwnGroup)
    try:
        listener = Listener("127.0.0.1", 60)
        with ThreadPoolExecutor(1) as pool:
            received = pool.submit(member.call, "receive", listener.port, [2, 3])
            group = join(GroupSpec("127.0.0.1", listener.port, 2, "g", "gloo", 60), 0, listener)
            bucket = Bucket(0, (TensorSpec("0", (2,), "float32"), TensorSpec("1", (3,), "float32")))
            group.send(bucket, [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0])])
            assert received.result(60) == [1, 2, 3, 4, 5]
        group.close()
    finally:
        member.kill()
