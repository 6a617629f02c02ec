"""Replicas as the Kubernetes API reports them, by its own protocol over a real socket."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from blockbuster import blockbuster_ctx

from router.config.settings import DiscoveredConfig, KubernetesConfig, ReplicaConfig
from router.membership.kubernetes import KubernetesWatch
from router.membership.membership import Source
from tests.router.conftest import Wait
from tests.router.membership.kubernetes_api import Api, endpoint, kubernetes_api, slice_of


class Told:
    """What was named last."""

    def __init__(self) -> None:
        self.replicas: list[ReplicaConfig] = []
        self.count = 0

    def name(self, source: Source, replicas: Iterable[ReplicaConfig], *, part: str = "") -> None:
        assert source is Source.KUBERNETES
        self.replicas, self.count = list(replicas), self.count + 1

    @property
    def urls(self) -> set[str]:
        return {each.url for each in self.replicas}


@asynccontextmanager
async def watching(api: Api, **config: Any) -> AsyncIterator[Told]:
    told = Told()
    asked = {"service": "vllm", "namespace": "here", "api_url": api.url} | config
    watch = KubernetesWatch(
        KubernetesConfig(**asked), DiscoveredConfig(), told.name, first_pause_s=0.01
    )
    with blockbuster_ctx("router"):
        task = asyncio.create_task(watch.run())
        try:
            yield told
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with kubernetes_api() as api:
        yield api


def at(*hosts: str, port: int = 8000) -> set[str]:
    return {f"http://{host}:{port}" for host in hosts}


async def test_endpoints_are_listed_then_watched(api: Api, eventually: Wait) -> None:
    await api.put(slice_of("a", endpoint("10.0.0.1", "pod-1")))
    async with watching(api) as told:
        await eventually(lambda: told.urls == at("10.0.0.1"))
        assert told.replicas[0].name == "pod-1"
        await api.put(slice_of("b", endpoint("10.0.0.2"), endpoint("10.0.0.3")))
        await eventually(lambda: told.urls == at("10.0.0.1", "10.0.0.2", "10.0.0.3"))
        await api.put(slice_of("b", endpoint("10.0.0.3")))
        await eventually(lambda: told.urls == at("10.0.0.1", "10.0.0.3"))
        await api.delete("b")
        await eventually(lambda: told.urls == at("10.0.0.1"))
    assert api.lists == 1
    assert {each["labelSelector"] for each in api.asked} == {"kubernetes.io/service-name=vllm"}


async def test_ready_ones_join_and_ending_ones_leave(api: Api, eventually: Wait) -> None:
    await api.put(
        slice_of("a", endpoint("10.0.0.1"), endpoint("10.0.0.2", ready=False), endpoint("10.0.0.3"))
    )
    async with watching(api) as told:
        await eventually(lambda: told.urls == at("10.0.0.1", "10.0.0.3"))
        await api.put(
            slice_of(
                "a",
                endpoint("10.0.0.1", ready=False),  # busy, it may be: the router asks it itself
                endpoint("10.0.0.2"),
                endpoint("10.0.0.3", ready=False, serving=True, terminating=True),
            )
        )
        await eventually(lambda: told.urls == at("10.0.0.1", "10.0.0.2"))


async def test_a_pod_with_addresses_of_both_families_is_one_replica(
    api: Api, eventually: Wait
) -> None:
    await api.put(slice_of("six", endpoint("fd00::1", "pod-1"), family="IPv6"))
    await api.put(slice_of("four", endpoint("10.0.0.1", "pod-1")))
    await api.put(slice_of("alone", endpoint("fd00::2", "pod-2"), family="IPv6"))
    async with watching(api) as told:
        await eventually(lambda: told.urls == {"http://10.0.0.1:8000", "http://[fd00::2]:8000"})


@pytest.mark.parametrize(
    ("ports", "config", "port"),
    [
        ({"metrics": 9, "http": 8001}, {}, 8001),
        ({"only": 8002}, {}, 8002),
        ({"a": 1, "b": 2}, {"port": 8003}, 8003),
        ({"a": 1, "b": 2}, {}, None),
    ],
)
async def test_which_port_is_the_replicas(
    api: Api, eventually: Wait, ports: dict[str, int], config: dict[str, int], port: int | None
) -> None:
    await api.put(slice_of("a", endpoint("10.0.0.1"), ports=ports))
    async with watching(api, **config) as told:
        await eventually(lambda: told.count > 0)
        assert told.urls == (set() if port is None else at("10.0.0.1", port=port))


async def test_after_a_cut_nothing_is_missed(api: Api, eventually: Wait) -> None:
    await api.put(slice_of("a", endpoint("10.0.0.1")))
    async with watching(api) as told:
        await eventually(lambda: api.watches == 1)
        await api.cut()
        await api.put(slice_of("a", endpoint("10.0.0.2")))
        await eventually(lambda: told.urls == at("10.0.0.2"))


@pytest.mark.parametrize("by_status", [True, False])
async def test_a_version_that_is_gone_is_listed_anew(
    api: Api, eventually: Wait, by_status: bool
) -> None:
    api.gone_by_status = by_status
    await api.put(slice_of("a", endpoint("10.0.0.1")))
    await api.put(slice_of("b", endpoint("10.0.0.9")))
    async with watching(api) as told:
        await eventually(lambda: api.watches == 1)
        # Between a list and the watch that continues from it.
        listed = api.lists
        api.refused_with = 500
        await api.cut()
        await eventually(lambda: len(api.asked) > 3)
        del api.slices["b"]
        await api.put(slice_of("a", endpoint("10.0.0.2")))
        assert told.urls == at("10.0.0.1", "10.0.0.9"), "they stay while the API is away"
        api.refused_with = 200
        await eventually(lambda: told.urls == at("10.0.0.2"))
        assert api.lists > listed


@pytest.mark.parametrize("by_status", [True, False])
async def test_a_watch_from_a_version_that_is_gone(
    api: Api, eventually: Wait, by_status: bool
) -> None:
    """The first list is outdated before its watch begins."""
    api.gone_by_status = by_status
    await api.put(slice_of("a", endpoint("10.0.0.1")))
    api.oldest = api.version + 1
    async with watching(api) as told:
        await eventually(lambda: api.lists >= 3)
        assert told.urls == at("10.0.0.1")
        assert api.watches == 0
        api.oldest = api.version
        await eventually(lambda: api.watches == 1)
        await api.put(slice_of("a", endpoint("10.0.0.2")))
        await eventually(lambda: told.urls == at("10.0.0.2"))


async def test_a_bookmark_changes_nothing_but_the_version(api: Api, eventually: Wait) -> None:
    await api.put(slice_of("a", endpoint("10.0.0.1")))
    async with watching(api) as told:
        await eventually(lambda: api.watches == 1)
        count = told.count
        await api.bookmark()
        await api.put(slice_of("a", endpoint("10.0.0.2")))
        await eventually(lambda: told.urls == at("10.0.0.2"))
        assert told.count == count + 1


async def test_refusals_are_said_once(
    api: Api, eventually: Wait, caplog: pytest.LogCaptureFixture
) -> None:
    async with watching(api, namespace="elsewhere"):
        await eventually(lambda: api.lists >= 4)
    (said,) = [each.getMessage() for each in caplog.records]
    assert "elsewhere/endpointslices answers 403" in said


async def test_the_token_is_read_anew(api: Api, eventually: Wait, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    async with watching(api, token_file=str(token)) as told:
        await eventually(lambda: api.watches == 1)
        token.write_text("second\n")
        await api.cut()
        await eventually(lambda: api.watches == 2)
        assert told.urls == set()
    assert (api.tokens[0], api.tokens[-1]) == ("Bearer first", "Bearer second")


async def test_a_selector_is_asked_for_as_it_is(api: Api, eventually: Wait) -> None:
    async with watching(api, service=None, selector="app=vllm,tier=gpu"):
        await eventually(lambda: api.watches == 1)
    assert {each["labelSelector"] for each in api.asked} == {"app=vllm,tier=gpu"}
