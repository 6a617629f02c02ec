"""Endpoints of a fleet whose replicas come and go."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from router.config.settings import ReplicaConfig, RouterConfig
from router.fleet.fleet import Fleet
from router.gateway.endpoints import Endpoints
from tests.router.conftest import Wait
from tests.router.fleet.helpers import place


@asynccontextmanager
async def endpoints(*hosts: str) -> AsyncIterator[tuple[Fleet, Endpoints]]:
    urls = [f"http://{host}" for host in hosts]
    fleet = Fleet(RouterConfig(replicas=tuple(ReplicaConfig(url=url) for url in urls)))
    found = Endpoints(fleet)
    await found.start()
    try:
        yield fleet, found
    finally:
        await found.stop()


async def test_a_replica_that_joins_is_picked_once_its_endpoint_is_known(eventually: Wait) -> None:
    async with endpoints("10.0.0.1:80") as (fleet, found):
        assert found.eligible(None) is None
        replica = fleet.add(ReplicaConfig(url="http://10.0.0.2:80"))
        assert found.eligible(None) == ["10.0.0.1:80"]
        found.fleet_changed()
        await eventually(lambda: found.eligible(None) is None)
        assert found.at("10.0.0.2:80") is replica
        assert found.known(replica) == "10.0.0.2:80"


async def test_a_removed_replica_is_not_picked_and_its_requests_are_still_sent(
    eventually: Wait,
) -> None:
    """Picked just before, they know its endpoint; its slot tells nothing of the next one there."""
    async with endpoints("10.0.0.1:80", "10.0.0.2:80") as (fleet, found):
        replica = fleet.replicas["10.0.0.1:80"]
        ticket = fleet.start(place(fleet, None, bound_to=replica.id), 0.0)
        fleet.remove(replica.id)
        assert found.at("10.0.0.1:80") is None
        assert found.eligible(["10.0.0.1:80", "10.0.0.2:80"]) == ["10.0.0.2:80"]
        found.fleet_changed()
        fleet.add(ReplicaConfig(url="http://10.0.0.4:80"))
        await eventually(lambda: found.at("10.0.0.4:80") is not None)
        assert found.known(replica) == "10.0.0.1:80"
        ticket.finish(1.0, ok=True)
        for now_s in (1.0, 1000.0):
            fleet.tick(now_s)
        again = fleet.add(ReplicaConfig(url="http://10.0.0.3:80"))
        assert again.slot == replica.slot
        assert found.known(again) is None
        found.fleet_changed()
        await eventually(lambda: found.known(again) is not None)
        assert found.known(again) == "10.0.0.3:80"
        assert found.known(replica) is None
