"""SGLang servers as fixtures have them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from rollout.engines.sglang_engine import SGLangEngine


def started(engine: SGLangEngine) -> Iterator[SGLangEngine]:
    """Body of a fixture: the server, from its start to its end."""
    try:
        asyncio.run(engine.start())
        yield engine
    finally:
        asyncio.run(engine.close())
