"""The router's coordinator compared with LMCache's: the same calls, the same answers."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from bench.lmcache.environment import is_installed, python
from cacheengine.launch.vllm_launch import free_ports
from router.launch.processes import ProcessGroup
from router.lmcache.controller import Controller
from router.lmcache.lmcache import Lmcache
from tests.router.agent_server import serving
from tests.router.conftest import (
    client,  # noqa: F401  (a fixture)
    eventually,  # noqa: F401  (a fixture)
    fleet,  # noqa: F401  (a fixture)
)
from tests.router.lmcache.helpers import (
    MODEL,
    make_fleet,
    transcript,
    transcript_tokens,
)

pytestmark = [pytest.mark.vllm, pytest.mark.lmcache, pytest.mark.timeout(300)]

TOKENS = {"model_name": MODEL, "world_size": 1, "token_ids": transcript_tokens()[:600]}
STORE = next(
    batch
    for each in transcript()
    if each["path"] == "/events"
    for batch in each["body"]["batches"]
    if batch["event_type"] == "store"
)
CALLS: list[tuple[str, str, Any]] = [
    *((each["method"], each["path"], each["body"]) for each in transcript()),
    *((each["method"], each["path"], each["body"]) for each in transcript()),  # all duplicates
    ("PUT", "/instances/mp0/heartbeat", None),
    ("PUT", "/instances/nobody/heartbeat", None),
    ("POST", "/directory/lookup", TOKENS),
    ("POST", "/directory/lookup", TOKENS | {"world_size": 2}),
    ("POST", "/directory/lookup", TOKENS | {"cache_salt": "tenant"}),
    ("POST", "/directory/lookup", {"keys": [STORE["entries"][0]["key"]]}),
    ("POST", "/directory/lookup", {}),
    ("POST", "/directory/blend-lookup", {"tokens_b64": "AAAAAA==", "model_name": MODEL}),
    ("POST", "/cache/prefetches", TOKENS | {"instance_id": "nobody"}),
    ("GET", "/cache/prefetches/nobody/job", None),
    ("POST", "/events", {"batches": [STORE | {"incarnation": 1}]}),
    ("POST", "/events", {"batches": [STORE | {"seq": 0}]}),
    ("POST", "/events", {"batches": [STORE | {"tier": "all"}]}),
    ("POST", "/events", {"batches": [STORE | {"incarnation": STORE["incarnation"] + 1}]}),
    ("POST", "/directory/lookup", TOKENS),
    ("DELETE", "/instances/mp0", None),
    ("POST", "/directory/lookup", TOKENS),
    ("GET", "/healthz", None),
]


@pytest.fixture(scope="module")
def stock_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A stock coordinator, as ``lmcache coordinator`` starts one."""
    if not is_installed():
        pytest.skip("LMCache's environment is not there: make test-lmcache installs it")
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    log = tmp_path_factory.mktemp("coordinator") / "coordinator.log"
    command = [str(python().with_name("lmcache")), "coordinator", "--host", "127.0.0.1"]
    with ProcessGroup() as group:
        group.start("coordinator", [*command, "--port", str(port)], None, log)
        group.wait_ready("coordinator", f"{url}/healthz", 120)
        yield url


@pytest.fixture
def ours(client: aiohttp.ClientSession) -> Lmcache:  # noqa: F811
    return Lmcache(make_fleet(), client)


@pytest.fixture
async def our_url(ours: Lmcache, client: aiohttp.ClientSession) -> AsyncIterator[str]:  # noqa: F811
    controller = Controller(
        list,
        client,
        limit_bytes=1 << 20,
        lmcache=ours,
    )
    async with serving(controller.api()) as url:
        yield url


def without_sizes(answer: Any) -> Any:
    """Return an answer without what placement does not need, and the router does not keep."""
    for found in answer.get("results", ()):
        found |= {"access_count": 0, "token_ids": []}
        found["placements"] = [each | {"size_bytes": 0} for each in found["placements"]]
    return answer


async def test_both_answer_alike(
    stock_url: str,
    our_url: str,
    client: aiohttp.ClientSession,  # noqa: F811
) -> None:
    for method, path, body in CALLS:
        answers: list[tuple[int, Any]] = []
        for url in (stock_url, our_url):
            async with client.request(method, url + path, json=body) as response:
                text = await response.text()
                answers.append((response.status, await response.json() if text else None))
        (status, expected), (ours, answer) = answers
        assert ours == status, (method, path, answer)
        if status < 400:
            assert answer == (expected and without_sizes(expected)), (method, path)
        else:
            assert list(answer) == list(expected or ()), (method, path)
