"""Weights & Biases, online or offline, with a deadline on everything that waits for a server."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles.tracking import deadline
from miles.tracking.config import TrackingConfig
from miles.tracking.redact import scrub
from miles.tracking.sinks import Cell, SinkError
from miles.tracking.wandb_records import last_step

INIT_SECONDS = 30.0
FINISH_SECONDS = 60.0
TEARDOWN_SECONDS = 5.0
_ID_FILE = "wandb_run_id"


class WandbSink:
    """One W&B run. Its id is kept in the run folder, so that a resumed run goes on as the same W&B run.

    W&B only takes steps that grow. A resumed run repeats the steps between its checkpoint and its end; those that W&B
    already has are left out, so its axis has neither gaps nor doubles.

    Raises:
        SinkError: wandb cannot be imported, the key is missing, or the server does not answer within INIT_SECONDS.
    """

    def __init__(self, config: TrackingConfig, folder: Path, run_config: dict[str, Any], resume_from: int | None) -> None:
        # W&B's reports about itself wait ten seconds at exit for a server that does not answer.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            import wandb
        except ImportError as error:
            raise SinkError(f"wandb cannot be imported ({error}); install it, or set tracking.wandb=disabled") from error
        if config.wandb == "online" and not has_key():
            raise SinkError("tracking.wandb is 'online', but there is no key: set WANDB_API_KEY, or use tracking.wandb=offline")
        self._wandb = wandb
        run_id = _run_id(folder, resume_from is not None)
        first_free = last_step(folder / "wandb", run_id) + 1 if config.wandb == "offline" else 0
        settings = wandb.Settings(
            init_timeout=INIT_SECONDS, finish_timeout=FINISH_SECONDS, finish_timeout_raises=True, silent=True, console="off",
            disable_git=True, save_code=False, x_disable_meta=True, x_disable_stats=True, x_save_requirements=False,
        )  # fmt: skip
        try:
            self._run = deadline.call(
                lambda: wandb.init(
                    project=config.project,
                    entity=config.entity,
                    dir=str(folder),
                    id=run_id,
                    name=folder.name,
                    resume="allow",
                    mode=config.wandb,
                    config=run_config,
                    settings=settings,
                ),
                INIT_SECONDS + 5,
            )
        except (TimeoutError, OSError, wandb.Error) as error:
            _end_service()
            raise SinkError(f"W&B did not start ({scrub(str(error))}); check the network and WANDB_BASE_URL, or use tracking.wandb=offline") from None
        self._first_free = max(first_free, int(self._run.starting_step))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if step >= self._first_free:
            self._run.log(metrics, step=step)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        if step >= self._first_free:
            self._run.log({name: self._wandb.Table(columns=list(columns), data=[list(row) for row in rows])}, step=step)

    def close(self) -> None:
        """Send what is left, for at most FINISH_SECONDS; what was not sent stays in the run folder for `wandb sync`."""
        try:
            deadline.call(self._run.finish, FINISH_SECONDS + 5)
        except (TimeoutError, OSError, self._wandb.Error) as error:
            _end_service()
            raise SinkError(f"W&B did not finish ({scrub(str(error))}); `wandb sync {self._run.dir}/..` sends the rest later") from None


def has_key() -> bool:
    """Whether W&B has a key to log in with: WANDB_API_KEY, or one that `wandb login` stored in a netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    netrc = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    return netrc.is_file() and "wandb" in netrc.read_text(encoding="utf-8", errors="replace")


def _run_id(folder: Path, resumed: bool) -> str:
    path = folder / _ID_FILE
    if resumed and path.exists():
        return path.read_text(encoding="utf-8").strip()
    run_id = secrets.token_hex(4)
    path.write_text(run_id + "\n", encoding="utf-8")
    return run_id


def _end_service() -> None:
    """End the wandb-core process that this process started: W&B's exit hook would wait for it without an end. Without the process the
    hook would print a traceback, so W&B is told now, where its complaint can be caught, and takes the hook away."""
    import psutil
    import wandb

    for child in psutil.Process().children():
        if child.name().startswith("wandb-core"):
            child.kill()
    with contextlib.suppress(OSError, SystemExit):  # SystemExit: W&B passes on that its process was killed, as it just was
        deadline.call(wandb.teardown, TEARDOWN_SECONDS)
