"""Updates of adapters alone into the real SGLang server. rsLoRA, whose scaling SGLang itself does not know."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from miles.core.model.config import LoraConfig, ModelConfig
from miles.core.model.load import load_model
from rollout.config import RolloutConfig
from rollout.engines.contracts import Generation, Request, SamplingParams
from rollout.engines.scoring import ScoreRequest
from rollout.engines.sglang_engine import SGLangEngine
from tests.conformance.test_weight_sync_sglang import TRANSPORTS, OneServer, answer
from tests.lora_cases import stir
from tests.sglang_servers import started
from tests.weight_sync.cast import Cast, publish
from tests.weight_sync.parts import scores
from weight_sync.transaction import PublishResult, UpdateAborted, WeightSync

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]
LORA = LoraConfig(rank=4, alpha=6, rslora=True)


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    config = RolloutConfig(engine="sglang", max_running=8, timeout_s=60)
    yield from started(SGLangEngine(ModelConfig(path=str(tiny_model)), config, log_folder=tmp_path_factory.mktemp("sglang"), lora=LORA))


@pytest.fixture(scope="module")
def trainer(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cast]:
    made = Cast(tiny_model, tmp_path_factory.mktemp("ranks"), world=2, engines=0, lora=LORA)
    yield made
    made.close()


def update(server: OneServer, trainer: Cast, journal: Path, version: int, transport: str = "tensor") -> PublishResult:
    """Adapters that no version had before, sent to the server."""
    asyncio.run(trainer.trainer.run_on_ranks(stir, 0.3 + 0.05 * version))
    return publish(WeightSync(trainer.config(transport, timeout_s=60.0, bucket_mb=0.005), journal, trainer.trainer, server), version)


def mismatch(server: SGLangEngine, trainer: Cast) -> float:
    """Largest difference between the server's log-probs and the trainer's."""
    tokens, logprobs, _ = answer(server)
    return float(np.abs(np.array(asyncio.run(trainer.trainer.run_on_ranks(scores, tokens))[0]) - logprobs).max())


def test_the_server_begins_as_the_base_and_follows_the_trainers_adapters(server: SGLangEngine, trainer: Cast, tiny_model: Path, tmp_path: Path) -> None:
    tokens, logprobs, versions = answer(server)
    with torch.no_grad():
        logits = load_model(str(tiny_model))(input_ids=torch.tensor([[9, 10, 11, *tokens]]), use_cache=False).logits[0, 2:-1]
    base = torch.log_softmax(logits, -1)[torch.arange(len(tokens)), torch.tensor(tokens)]
    assert versions == {0}
    assert float((base - torch.tensor(logprobs)).abs().max()) < 1e-5
    for transport in TRANSPORTS:
        version = server.weights_version() + 1
        result = update(OneServer(server), trainer, tmp_path / transport, version, transport)
        assert mismatch(server, trainer) < 2e-5, transport
        assert answer(server)[2] == {version}
        if transport != "delta":  # whose records are compressed
            assert result.bytes == 4 * 2 * LORA.rank * (128 + 2 * 96 + 128 + 3 * (64 + 256))


@pytest.mark.parametrize("stage", ["weights_receive", "weights_prepared", "weights_commit"])
def test_a_server_whose_update_failed_answers_with_the_old_adapters(server: SGLangEngine, trainer: Cast, tmp_path: Path, stage: str) -> None:
    version = server.weights_version() + 1
    update(OneServer(server), trainer, tmp_path / "journal", version)
    before = answer(server)
    if stage == "weights_commit":  # all of the new adapter is in the server by then
        with pytest.raises(UpdateAborted):
            update(Refuses(server), trainer, tmp_path / "journal", version + 1)
    else:
        with pytest.raises(UpdateAborted, match=f"engine 0 failed at {stage}"):
            update(OneServer(server, stage), trainer, tmp_path / "journal", version + 1)
    assert mismatch(server, trainer) > 1e-3
    assert answer(server)[2] == {version}
    np.testing.assert_allclose(scored_again(server, before[0]), before[1], rtol=0, atol=2e-5)


class Refuses(OneServer):
    """Fails once it has said that everything is there."""

    async def call(self, engine_id: int, method: str, *args: object) -> object:
        answer = await super().call(engine_id, method, *args)
        if method == "weights_prepared":
            raise RuntimeError("injected")
        return answer


def scored_again(server: SGLangEngine, tokens: list[int]) -> list[float]:
    """The log-probs of an earlier answer's tokens."""
    request = ScoreRequest(tokens=np.array([9, 10, 11, *tokens]), start=3, top_k=0)
    return asyncio.run(server.score([request]))[0].logprobs.tolist()


def test_a_request_that_runs_across_an_update_goes_on_with_the_new_adapters(server: SGLangEngine, trainer: Cast, tmp_path: Path) -> None:
    version = server.weights_version() + 1
    asyncio.run(trainer.trainer.run_on_ranks(stir, 0.9))
    sync = WeightSync(trainer.config("tensor", timeout_s=60.0, pause="in_place"), tmp_path / "journal", trainer.trainer, OneServer(server))

    async def run() -> Generation:
        sampling = SamplingParams(max_new_tokens=200, temperature=1.0)
        running = asyncio.ensure_future(server.generate([Request(request_id="long", prompt=np.array([9, 10, 11]), sampling=sampling)]))
        await asyncio.sleep(0.3)
        await sync.publish(version)
        await sync.close()
        return (await running)[0]

    made = asyncio.run(run())
    versions = made.weight_versions.tolist()
    assert sorted(set(versions)) == [version - 1, version]
    assert versions == sorted(versions)
    assert mismatch(server, trainer) < 2e-5
