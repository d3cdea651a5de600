"""Packed rows under FSDP2 on real processes: gradients equal those of one process that scores every rank's rows."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.forks import CONTEXT


def _rank(rank: int, world: int, store: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from miles.core.model.fused_loss import even_parts
    from miles.core.model.packed import packed_logprobs, packed_loss
    from tests.core.model.architectures import every_target, pack, random_model, random_rows

    def batch(of_rank: int) -> tuple[torch.Tensor, ...]:
        """The last rank of several has nothing to score."""
        tokens_T, positions_T, sequence_T = pack(random_rows([5 + of_rank, 17, 1, 9], seed=of_rank))
        targets_N = every_target(positions_T)
        return tokens_T, positions_T, sequence_T, targets_N[:0] if of_rank == world - 1 > 0 else targets_N

    def backward(model: torch.nn.Module, of_rank: int, share: float, fused: bool = False) -> None:
        where = batch(of_rank)
        if fused:
            parts = even_parts(len(where[-1]), 6)
            (share * packed_loss(model, *where, lambda _, *scores: sum(s.sum() for s in scores), parts, temperature=0.7, chunk=6, entropy=True)).backward()
            return
        logprobs_N, entropy_N = packed_logprobs(model, *where, 0.7, 6, entropy=True)
        (share * (logprobs_N.sum() + entropy_N.sum())).backward()

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    for tied in (True, False):
        for checkpointed, fused in product((False, True), repeat=2):
            whole, sharded = (random_model(dtype=torch.float64, tie_word_embeddings=tied) for _ in range(2))
            if checkpointed:
                sharded.gradient_checkpointing_enable({"use_reentrant": False})
                sharded.train()
            for module in (*sharded.model.layers, sharded):
                fully_shard(module, mesh=mesh)
            for of_rank in range(world):
                backward(whole, of_rank, 1 / world)
            backward(sharded, rank, 1.0, fused)
            expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
            for name, parameter in sharded.named_parameters():
                gap = (parameter.grad.full_tensor() - expected[name]).abs().max() / expected[name].abs().max()
                assert gap < 1e-12, f"{world} ranks, tied {tied}, checkpointed {checkpointed}, fused {fused}: {name} differs by {gap}"
    dist.destroy_process_group()


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2, 4])
def test_gradients_under_fsdp_equal_those_of_one_process(world: int, tmp_path: Path) -> None:
    context = mp.start_processes(_rank, (world, str(tmp_path / "store")), nprocs=world, join=False, start_method=CONTEXT.get_start_method())
    try:
        while not context.join(timeout=120):
            pass
    finally:
        for process in context.processes:
            process.kill()
