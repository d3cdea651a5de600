"""Why an update failed, in one line that names the fault and not the machinery around it."""

from __future__ import annotations

import traceback

import pytest
from ray.exceptions import RayActorError, RayTaskError

from trainer.actor import TrainerError
from weight_sync.contracts import WeightSyncError
from weight_sync.parties import reason


def caught(raised: Exception, cause: Exception | None = None) -> tuple[str, Exception]:
    """The traceback of `raised`, and it."""
    try:
        raise raised from cause
    except Exception as error:  # noqa: BLE001 - it is the test's own
        return traceback.format_exc(), error


def of_rank(error: RayTaskError) -> TrainerError:
    """As the trainer's driver wraps it."""
    wrapped = TrainerError(f"trainer rank 1 of 2 failed:\n{error}")
    wrapped.__cause__ = error.cause if isinstance(error.cause, Exception) else error
    return wrapped


REMOTE = RayTaskError("run", *caught(ValueError("no room\nat all", 3)))
UNKNOWN = RayTaskError("run", "Traceback (most recent call last):\n  File x\nFooError: it stays there", None)
LATE = RayTaskError("run", *caught(WeightSyncError("bucket 3\nis not whole")))
ENGINE = RuntimeError("no answer to /pause_generation; it ended with code -9\n--- its log ---\n...")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("a\n\nb\nc"), "ValueError: a: b"),
        (TimeoutError(), "no answer in time"),
        (REMOTE.as_instanceof_cause(), "ValueError: ('no room\\nat all', 3)"),
        (of_rank(REMOTE), "trainer rank 1 of 2 failed: ValueError: ('no room\\nat all', 3)"),
        (of_rank(UNKNOWN), "trainer rank 1 of 2 failed: FooError: it stays there"),
        (caught(ENGINE, ConnectionResetError("by peer"))[1], "RuntimeError: no answer to /pause_generation; it ended with code -9: --- its log ---"),
        (of_rank(LATE), "bucket 3 is not whole"),
        (RayActorError(), "RayActorError: The actor experienced an error before finishing this task."),
    ],
)
def test_the_fault_itself_is_named_and_whose_it_was(error: Exception, said: str) -> None:
    assert reason(error) == said
