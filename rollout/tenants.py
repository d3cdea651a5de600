"""Engines of several tenants in one process: each has its own adapters, rewards and requests, on base weights that are there once.

Tenants are decoded apart, each in a batch of its own, so that no token of one depends on what another asks for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollout.actor import GroupResult, GroupTask, RolloutActor, RolloutSpec, actor_options

logger = logging.getLogger(__name__)

ANSWER_S = 30.0
"""A host that does not say that it lives within this time is taken for dead: it does so between whatever else it does."""


class TenantsHost:
    """Runs in its own process: a `RolloutActor` for each tenant, whose methods are called with the tenant's name first."""

    def __init__(self) -> None:
        self._base: Any = None
        self._tenants: dict[str, RolloutActor] = {}

    async def start(self, tenant: str, spec: RolloutSpec) -> str:
        """Bring the tenant's engine up, anew where there was one; returns the address of this actor's node."""
        from rollout.engines.torch_engine import load_base

        if tenant in self._tenants:
            await self._tenants.pop(tenant).close()
        if self._base is None:
            self._base = load_base(spec.model)
        self._tenants[tenant] = RolloutActor(spec, self._base)
        return await self._tenants[tenant].start()

    async def call(self, tenant: str, method: str, *args: Any) -> Any:
        return await self._tenants[tenant].call(method, *args)

    async def run_groups(self, tenant: str, tasks: Sequence[GroupTask]) -> AsyncIterator[GroupResult]:
        async for result in self._tenants[tenant].run_groups(tasks):
            yield result

    async def abort_groups(self, tenant: str, claim_ids: Sequence[int]) -> None:
        await self._tenants[tenant].abort_groups(claim_ids)

    async def close(self, tenant: str) -> None:
        if tenant in self._tenants:
            await self._tenants.pop(tenant).close()

    async def alive(self) -> None:
        """Answers, so that a caller knows that it can."""


@dataclass(frozen=True)
class Seat:
    """One tenant's part of a host, called as if it were a rollout actor of its own."""

    host: Any
    tenant: str
    spec: RolloutSpec

    @property
    def start(self) -> _Bound:
        return _Bound(self.host.start, (self.tenant, self.spec))

    def __getattr__(self, method: str) -> _Bound:
        return _Bound(getattr(self.host, method), (self.tenant,))


@dataclass(frozen=True)
class _Bound:
    method: Any
    first: tuple[Any, ...]

    def options(self, **options: Any) -> _Bound:
        return _Bound(self.method.options(**options), self.first)

    def remote(self, *args: Any) -> Any:
        return self.method.remote(*self.first, *args)


class Hosts:
    """The hosts of a run, one for each engine, by the engines' names."""

    def __init__(self) -> None:
        self._hosts: dict[str, Any] = {}

    def of(self, tenant: str) -> TenantActors:
        return TenantActors(self, tenant)

    def host(self, spec: RolloutSpec, place: PlacementGroupSchedulingStrategy) -> Any:
        if spec.name not in self._hosts:
            self._hosts[spec.name] = ray.remote(TenantsHost).options(scheduling_strategy=place, **actor_options(spec)).remote()
        return self._hosts[spec.name]

    async def bury(self, host: Any, name: str) -> None:
        """Let go of a host that is dead or hangs; one that lives stays, for the others' sake. Idempotent: each tenant finds a death on its own."""
        try:
            async with asyncio.timeout(ANSWER_S):
                await host.alive.remote()
        except (RayActorError, TimeoutError) as error:
            if self._hosts.get(name) is host:
                logger.warning("%s is started again for all tenants: %s", name, str(error).partition("\n")[0] or f"no answer within {ANSWER_S:g} s")
                ray.kill(self._hosts.pop(name))

    def close(self) -> None:
        for host in self._hosts.values():
            ray.kill(host)
        self._hosts.clear()


@dataclass(frozen=True)
class TenantActors:
    """See `rollout.fleet.Actors`: one tenant's seats. They end with their hosts."""

    hosts: Hosts
    tenant: str

    def spawn(self, spec: RolloutSpec, place: PlacementGroupSchedulingStrategy) -> Seat:
        return Seat(self.hosts.host(spec, place), self.tenant, spec)

    async def replace(self, actor: Seat, spec: RolloutSpec, place: PlacementGroupSchedulingStrategy) -> Seat:
        await self.hosts.bury(actor.host, spec.name)
        return self.spawn(spec, place)

    def end(self, actor: Seat) -> None:
        """`RolloutActor.close` has ended what was the tenant's."""
