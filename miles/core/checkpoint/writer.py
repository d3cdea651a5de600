"""Writes checkpoints with torch.distributed.checkpoint, in the background, and makes each appear whole or not at all.

Everything goes to `FOLDER.partial`; when all ranks have written and synced, rank 0 writes the manifest and renames. A process
killed before the rename leaves the checkpoints that were there, and a partial folder that nobody reads.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from miles.core.checkpoint import rng
from miles.core.checkpoint.rng import tensor_name as rng_name
from miles.core.checkpoint.store import MANIFEST, PARTIAL, CheckpointError, CheckpointStore, sync_folder, write_synced


class CheckpointWriter:
    """One per rank. Saves follow each other: a new one first waits for the one before.

    Background collectives have a gloo group of their own, since two threads may not share one. It is opened by the first save: a thread of
    its own polls each group of gloo.
    """

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._group: dist.ProcessGroup | None = None
        # Plain copies in CPU memory, made before `save` returns: training goes on while they are written.
        self._stager = DefaultStager(StagingOptions(use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, folder: Path, tensors: Mapping[str, Any], state: dict[str, Any], extra: dict[str, Any], *, keep: int | None, asynchronous: bool) -> None:
        """Write `tensors` (plain or DTensor), `state` and `extra` (JSON) to `folder`. Collective.

        Args:
            keep: after success, older checkpoints beside `folder` beyond this many are removed; None keeps all.
            asynchronous: return as soon as everything is copied; `wait` then says how it ended.
        Raises:
            ValueError: `folder` is a checkpoint already, or `extra` is not JSON.
            CheckpointError: this save (when synchronous) or the one before failed.
        """
        self.wait()
        if folder.exists():
            raise ValueError(f"checkpoint {folder} exists already; checkpoints are never overwritten")
        manifest = _manifest(self._world, state, extra)
        if self._world > 1 and self._group is None:
            self._group = dist.new_group(backend="gloo")
        staged = self._staged(tensors)
        # Each rank's own states, under its own name: torch.distributed.checkpoint stores plain tensors of one name once.
        staged[rng_name(self._rank)] = rng.capture()
        self._writing = self._thread.submit(self._write, folder, staged, manifest, keep)
        if not asynchronous:
            self.wait()

    def wait(self) -> None:
        """Until the save that was started last is on disk. Raises CheckpointError when it failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """End the thread, after the write that it may be in, and leave its group."""
        self._thread.shutdown(wait=True)
        self._stager.close()
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _write(self, folder: Path, tensors: dict[str, Any], manifest: str, keep: int | None) -> None:
        partial = folder.with_name(folder.name + PARTIAL)
        store = CheckpointStore(folder.parent, keep or 1)
        try:
            self._prepare(store, partial)
            # It returns on no rank before every rank has written and synced its files, and raises on all when one failed.
            self._put(tensors, partial)
            if self._rank == 0:
                write_synced(partial / MANIFEST, manifest)
                sync_folder(partial)
                partial.rename(folder)
                sync_folder(folder.parent)
                if keep is not None:
                    store.prune()
        except (OSError, RuntimeError, CheckpointException) as error:
            if self._rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(_explain(folder, error, store.latest_step())) from error

    def _staged(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Copies that training does not reach any more."""
        staged = self._stager.stage(dict(tensors))
        assert isinstance(staged, dict)
        return staged

    def _put(self, tensors: dict[str, Any], folder: Path) -> None:
        """Write and sync what was staged. Collective over `self._group`, on the writer's thread."""
        dcp.save(tensors, checkpoint_id=folder, process_group=self._group, no_dist=not dist.is_initialized())

    def _prepare(self, store: CheckpointStore, partial: Path) -> None:
        """Rank 0 makes the folder. It tells the others how that went, so that none waits for a rank that has given up."""
        problem: OSError | None = None
        if self._rank == 0:
            try:
                store.root.mkdir(parents=True, exist_ok=True)
                store.remove_leftovers()
                partial.mkdir()
            except OSError as error:
                problem = error
        if self._group is not None:
            failed = torch.tensor(int(problem is not None))
            dist.broadcast(failed, 0, self._group)
            if failed and problem is None:
                raise OSError(f"rank 0 could not make {partial}")
        if problem is not None:
            raise problem


def _manifest(world: int, state: dict[str, Any], extra: dict[str, Any]) -> str:
    try:
        return json.dumps({"format": 1, "world": world, "state": state, "extra": extra})
    except TypeError as error:
        raise ValueError(f"a checkpoint's extra state must be JSON: {error}") from error


def _explain(folder: Path, error: BaseException, latest: int | None) -> str:
    failures = error.failures.values() if isinstance(error, CheckpointException) else [(error, None)]
    causes = dict.fromkeys(_cause(failure) for failure, _ in failures)
    free = shutil.disk_usage(folder.parent).free / 2**20
    before = "there is none before it" if latest is None else f"the latest complete one is of step {latest} and is intact"
    return f"checkpoint {folder} could not be written: {'; '.join(causes)}; {free:,.0f} MiB are free there; {before}"


def _cause(error: BaseException) -> str:
    """torch reports a failed write as a wrong position in its archive; the operating system's error stands behind it."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, OSError):
        link = link.__cause__ or link.__context__
    return str(error if link is None else link)
