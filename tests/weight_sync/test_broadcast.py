"""The process group of the broadcast transport, apart from any trainer."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from weight_sync.contracts import Bucket, GroupSpec, TensorSpec, WeightSyncError
from weight_sync.transports.broadcast import Listener, MemberLeft, join

BUCKET = Bucket(0, (TensorSpec("a", (2, 3), "bfloat16"), TensorSpec("none", (0,), "bfloat16"), TensorSpec("b", (), "bfloat16")))


def spec(listener: Listener, world_size: int, timeout_s: float = 20.0, backend: str = "gloo") -> GroupSpec:
    return GroupSpec("127.0.0.1", listener.port, world_size, "group", backend, timeout_s)


def test_what_is_sent_arrives_in_shape_and_dtype() -> None:
    listener = Listener("127.0.0.1", 20.0)
    sent = {"a": torch.randn(2, 3).bfloat16(), "none": torch.zeros(0).bfloat16(), "b": torch.tensor(-0.0).bfloat16()}
    with ThreadPoolExecutor(1) as pool:
        receiver = pool.submit(join, spec(listener, 2), 1)
        sender = join(spec(listener, 2), 0, listener)
        received = pool.submit(receiver.result(20).receive, BUCKET)
        sender.send(BUCKET, sent.values())
        arrived = received.result(20)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in arrived.items()} == {name: (t.shape, t.dtype) for name, t in sent.items()}
    assert all(torch.equal(arrived[name].view(torch.int16), sent[name].view(torch.int16)) for name in sent)
    receiver.result().close()
    sender.close()


def test_a_member_that_never_comes_is_an_error_at_the_deadline() -> None:
    listener = Listener("127.0.0.1", 1.0)
    with pytest.raises(WeightSyncError, match=r"rank 0 could not join group 'group' of 2 at 127\.0\.0\.1:\d+ within 1 s"):
        join(spec(listener, 2, timeout_s=1.0), 0, listener)


def test_a_store_that_is_not_there_is_an_error() -> None:
    port = Listener("127.0.0.1", 1.0).port  # closed again at once
    with pytest.raises(WeightSyncError, match="rank 1 could not join"):
        join(GroupSpec("127.0.0.1", port, 2, "group", "gloo", 1.0), 1)


def test_a_member_that_left_cannot_receive() -> None:
    listener = Listener("127.0.0.1", 20.0)
    alone = join(spec(listener, 1), 0, listener)
    alone.close()
    alone.close()
    with pytest.raises(WeightSyncError, match="has left the group"):
        alone.receive(BUCKET)


def test_a_sender_that_leaves_frees_those_who_wait() -> None:
    listener = Listener("127.0.0.1", 20.0)
    with ThreadPoolExecutor(1) as pool:
        receiver = pool.submit(join, spec(listener, 2), 1)
        sender = join(spec(listener, 2), 0, listener)
        received = pool.submit(receiver.result(20).receive, BUCKET)
        sender.close()
        with pytest.raises(MemberLeft, match="bucket 0: a member left"):
            received.result(10)
    receiver.result().close()


def test_an_unknown_backend_is_refused() -> None:
    listener = Listener("127.0.0.1", 20.0)
    with pytest.raises(WeightSyncError, match="backend 'mpi'; valid: gloo, nccl"):
        join(spec(listener, 1, backend="mpi"), 0, listener)


def test_each_listener_has_a_port_of_its_own_on_loopback_alone() -> None:
    listeners = [Listener("127.0.0.1", 20.0) for _ in range(8)]
    ports = {listener.port for listener in listeners}
    listening = {line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"}
    assert len(ports) == 8
    assert {f"0100007F:{port:04X}" for port in ports} <= listening
