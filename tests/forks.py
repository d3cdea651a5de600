"""Processes of the tests, forked from one server that has imported what they need: a fork costs milliseconds, the imports six seconds.

Multiprocessing has one such server in a process, so whoever starts processes first decides what it imports: it must be the same list for all.
"""

from __future__ import annotations

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pytest", "trainer.fsdp.backend", "trainer.rendezvous", "tests.weight_sync.parts"])
