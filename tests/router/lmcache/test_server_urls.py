"""Which server belongs to which replica: by configuration, by host, or not clear."""

from typing import Any

import pytest

from router.config.settings import ReplicaConfig
from router.lmcache.coordinator import RegisteredServer
from router.lmcache.coordinator_protocol import ServerRegistration
from router.lmcache.server_monitor import server_urls


def server(name: str, ip: str, port: int = 8210) -> RegisteredServer:
    registration = ServerRegistration(ip=ip, http_port=port, instance_id=name)
    return RegisteredServer(
        instance_id=name, registration=registration, registered_wall_s=0.0, seen_s=0.0
    )


def replicas(*urls: str, **more: Any) -> dict[str, ReplicaConfig]:
    return {f"r{at}": ReplicaConfig(url=url, **more) for at, url in enumerate(urls)}


def test_the_configured_server_is_a_replicas() -> None:
    configured = replicas("http://one:8000", lmcache="http://other:8210")
    assert server_urls(configured, []) == ({"r0": "http://other:8210"}, [])


def test_one_server_and_one_replica_on_a_host_belong_together() -> None:
    urls, problems = server_urls(
        replicas("http://10.0.0.1:8000", "http://10.0.0.2:8000"),
        [server("mp0", "10.0.0.2"), server("mp1", "10.0.0.1")],
    )
    assert urls == {"r1": "http://10.0.0.2:8210", "r0": "http://10.0.0.1:8210"}
    assert problems == []


def test_this_machine_has_many_names() -> None:
    urls, _ = server_urls(replicas("http://localhost:8000"), [server("mp0", "127.0.0.1")])
    assert urls == {"r0": "http://127.0.0.1:8210"}


@pytest.mark.parametrize(
    ("urls", "ips", "why"),
    [
        (["http://a:1", "http://a:2"], ["a"], "r0, r1 are all at a"),
        (["http://a:1"], ["a", "a"], "is at a too"),
        (["http://a:1"], ["b"], "no replica's url names its host b"),
    ],
)
def test_an_unclear_server_is_reported(urls: list[str], ips: list[str], why: str) -> None:
    servers = [server(f"mp{at}", ip, 8210 + at) for at, ip in enumerate(ips)]
    found, problems = server_urls(replicas(*urls), servers)
    assert found == {}
    assert all(why in problem for problem in problems)
    assert problems[0].endswith(f"write 'lmcache: http://{ips[0]}:8210' at its replica")


def test_replicas_with_our_engine_have_no_server_of_lmcaches() -> None:
    ours = replicas("http://a:1", agent_url="http://a:2")
    assert server_urls(ours, [server("mp0", "a")]) == ({}, [])
