"""What somebody who can only send requests tries: none of it works.

Against the router itself, and against a real Envoy whose picker runs, has stopped, or is
overloaded. Requests are raw bytes, since client libraries tidy up paths. What reached a replica is
read as the most lenient server could read it.
"""

import asyncio
import gzip
import importlib.util
import json
import posixpath
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import aiohttp
import pytest

from router.api.access import new_key, sha256_of
from router.config.settings import AccessConfig, AdmissionConfig, KeyConfig, RatesConfig
from router.fleet.replica import ReplicaState
from tests.router.conftest import ADMIN_TOKEN, Fleet, Running, run_router
from tests.router.gateway.conftest import CHAT, Gateway, chat
from tests.router.scripted import Scripted, chat_events, scripted, stream
from warmroute_common.admin_token import HEADER as ADMIN_HEADER

FRONTS = ("router", "envoy", "envoy-without-picker", "envoy-overloaded")
HARMLESS = {
    *("/classify", "/cohere/v2/chat", "/detokenize", "/generative_scoring", "/health"),
    *("/inference/v1/generate", "/invocations", "/ping", "/pooling", "/rerank", "/score"),
    *("/tokenize", "/tokenizer_info", "/version"),
}
"""Endpoints of vLLM that clients may reach, besides all below ``/v1/`` and ``/v2/``."""
OURS = [
    ("GET", "/metrics"),
    ("GET", "/replicas"),
    ("POST", "/replicas/one/drain"),
    ("POST", "/replicas/one/resume"),
    ("POST", "/explain"),
    ("GET", "/ui/state"),
    ("GET", "/waste"),
]
"""The router's own administration, for which one needs an admin key."""
IN_DISGUISE = {
    "X-HTTP-Method-Override": "POST",
    "X-Original-URL": "/sleep",
    "X-Rewrite-URL": "/sleep",
    "X-Forwarded-For": "127.0.0.1",
    "X-Forwarded-Prefix": "/sleep",
    "X-Envoy-Original-Path": "/sleep",
    "Forwarded": "for=127.0.0.1;host=localhost",
    "X-Real-Ip": "127.0.0.1",
    "X-Warmroute-Admin-Key": "wr-guessed",
}


def control_endpoints() -> list[tuple[str, str]]:
    """Return what vLLM offers, by its source and beyond, that clients must not reach."""
    found = {("POST", "/v1/load_lora_adapter"), ("GET", "/docs"), ("GET", "/openapi.json")}
    found |= {("POST", "/v1/unload_lora_adapter"), ("GET", "/metrics")}
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    decorator = re.compile(r"@router\.(get|post|put|delete)\(\s*\"([^\"]+)\"")
    for path in (Path(spec.origin).parent / "entrypoints").rglob("*.py"):
        for method, endpoint in decorator.findall(path.read_text()):
            if endpoint not in HARMLESS and not endpoint.startswith(("/v1/", "/v2/")):
                found.add((method.upper(), endpoint))
    return sorted(found)


CONTROL = control_endpoints()
NAMES = {path for _, path in CONTROL}


def spellings(path: str) -> list[str]:
    """Return a path in ways that some server or proxy takes for it."""
    name = path[1:]
    first = f"%{ord(name[0]):02x}{name[1:]}"
    return [
        *(path, f"{path}/", f"{path}?level=2", f"{path}#x", f"/{path}", f"/.{path}", f"{path}/."),
        *(f"/v1/..{path}", f"/v1/%2e%2e{path}", f"/v1/.%2e{path}", f"/v1/..%2f{name}"),
        *(f"/v1/models/../..{path}", f"/v1%2f..%2f{name}", f"/v1/x%2F..%2F..%2F{name}"),
        *(f"/v1/..;{path}", f"/v1/..\\{name}", f"/v1/..%5c{name}", f"/v1/%252e%252e/{name}"),
        *(f"/{first}", f"/v1/../{first}", f"{path};x=1", f"{path}%00", path.upper()),
        *(
            f"http://replica{path}",
            f"{CHAT}/../../..{path}",
            f"{CHAT}?x={path}",
            f"/v1/{name}/../{name}",
        ),
    ]


def read_leniently(target: str) -> str:
    """Return the path that a server sees which decodes twice and resolves all that it can."""
    path = unquote(unquote(target.partition("?")[0].partition("#")[0])).replace("\\", "/")
    path = "/".join(segment.partition(";")[0] for segment in path.split("/"))
    return posixpath.normpath("/" + path.strip("/\0")).lower()


@dataclass(kw_only=True)
class Front:
    """What clients connect to, and the replicas behind it."""

    name: str
    port: int
    router: Running
    replicas: tuple[Scripted, Scripted]

    async def send(self, request: bytes) -> int:
        """Send bytes on a connection of their own; return the status, 0 if it was closed."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request)
            await writer.drain()
            status_line = await asyncio.wait_for(reader.readline(), 20)
        except ConnectionError:
            return 0
        finally:
            writer.close()
        return int(status_line.split(b" ", 2)[1]) if status_line else 0

    async def ask(self, method: str, target: str, **headers: str) -> int:
        lines = [f"{method} {target} HTTP/1.1", "Host: replica", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        body = "{}" if method in ("POST", "PUT") else ""
        lines.append(f"Content-Length: {len(body)}")
        return await self.send("\r\n".join([*lines, "", body]).encode("latin-1"))

    def reached(self) -> list[str]:
        """Return the requests at replicas that one of them could take for a control endpoint."""
        seen = [each for replica in self.replicas for each in replica.seen]
        return [each.path for each in seen if read_leniently(each.path) in NAMES]

    def drained(self) -> list[str]:
        replicas = self.router.parts.fleet.replicas.values()
        return [each.id for each in replicas if each.state is ReplicaState.DRAINING]


MakeFront = Callable[[str], Awaitable[Front]]


@pytest.fixture
async def make_front(gateway: Gateway) -> MakeFront:
    async def make(name: str) -> Front:
        replicas = (gateway.one, gateway.two)
        config = gateway.config()
        if name == "router":
            router = await run_router(gateway.stack, replace(config, picker=None))
            port = urlsplit(router.url).port
            assert port is not None
            return Front(name=name, port=port, router=router, replicas=replicas)
        if name == "envoy-overloaded":
            # One request is as much as it sends, and it holds none.
            for each in replicas:
                each.will(stream(*chat_events("a"), gates=(asyncio.Event(),)))
            config = replace(
                config,
                policy="ttft",
                admission=AdmissionConfig(max_waiting=0),
                rates=RatesConfig(prefill_tokens_per_s=1.0),
            )
        router = await gateway.picker(config)
        await gateway.envoy(config)
        front = Front(name=name, port=config.port, router=router, replicas=replicas)
        if name == "envoy-without-picker":
            await router.picker.stop(0.0)
        if name == "envoy-overloaded":
            await overload(gateway, front)
        return front

    return make


async def overload(gateway: Gateway, front: Front) -> None:
    """Send chats that never end until one is refused."""
    session = await gateway.stack.enter_async_context(aiohttp.ClientSession())

    async def post() -> int:
        url = f"http://127.0.0.1:{front.port}{CHAT}"
        async with session.post(url, json=chat("hello " * 500, stream=True)) as answer:
            return answer.status

    tasks = [asyncio.create_task(post()) for _ in range(6)]

    async def end() -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    gateway.stack.push_async_callback(end)
    for first in asyncio.as_completed(tasks):
        if await first == 429:
            break
    else:
        pytest.fail("no request was refused")


@pytest.mark.parametrize("name", FRONTS)
async def test_no_control_endpoint_is_reached_under_any_spelling(
    make_front: MakeFront, name: str
) -> None:
    front = await make_front(name)
    assert len(CONTROL) > 20, "vLLM's endpoints were found"
    for method, path in CONTROL:
        for target in spellings(path):
            await front.ask(method, target)
    assert front.reached() == []


@pytest.mark.parametrize("name", FRONTS)
async def test_no_header_leads_to_a_control_endpoint(make_front: MakeFront, name: str) -> None:
    front = await make_front(name)
    for method, target in [("POST", "/sleep"), ("GET", "/v1/models"), ("POST", "/v1/files")]:
        await front.ask(method, target, **IN_DISGUISE)
    assert front.reached() == []


SMUGGLED = b"POST /sleep HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
CHUNKED = b"0\r\n\r\n" + SMUGGLED
TWO_READINGS = {
    "length and chunks": (b"Content-Length: %d\r\nTransfer-Encoding: chunked", CHUNKED),
    "chunks and length": (b"Transfer-Encoding: chunked\r\nContent-Length: %d", CHUNKED),
    "chunks, oddly": (b"Content-Length: %d\r\nTransfer-Encoding: xchunked", CHUNKED),
    "chunks, with a space": (b"Content-Length: %d\r\nTransfer-Encoding : chunked", CHUNKED),
    "chunks twice": (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity", CHUNKED),
    "two lengths": (b"Content-Length: 0\r\nContent-Length: %d", SMUGGLED),
    "a length with a sign": (b"Content-Length: +%d", SMUGGLED),
    "a folded header": (b"Content-Length: %d\r\nX: y\r\n Transfer-Encoding: chunked", CHUNKED),
    "a bare line feed": (b"Content-Length: %d\nTransfer-Encoding: chunked", CHUNKED),
}


@pytest.mark.parametrize("name", FRONTS)
async def test_no_request_hides_in_another(make_front: MakeFront, name: str) -> None:
    front = await make_front(name)
    requests = []
    for headers, body in TWO_READINGS.values():
        how = headers % len(body) if b"%d" in headers else headers
        head = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + how
        requests.append(head + b"\r\n\r\n" + body)
    # Envoy takes seconds for some of them.
    await asyncio.gather(*map(front.send, requests))
    assert front.reached() == []


@pytest.mark.parametrize("name", FRONTS)
async def test_nobody_administers_without_a_key(make_front: MakeFront, name: str) -> None:
    front = await make_front(name)
    for method, path in OURS:
        for target in spellings(path):
            status = await front.ask(method, target, **IN_DISGUISE)
            assert not 200 <= status < 300 or read_leniently(target).startswith("/v1"), target
    assert front.drained() == []


KEY, OTHER = new_key(), new_key()
BOUNDARY = "b"


def form(*parts: tuple[str, str]) -> bytes:
    """Return a multipart form of fields."""
    written = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in parts
    ]
    return ("".join(written) + f"--{BOUNDARY}--\r\n").encode()


JSON = "application/json"
FORM = f"multipart/form-data; boundary={BOUNDARY}"
PROMPT = '"messages":[{"role":"user","content":"hi"}]'
WAYS_TO_ANOTHER_MODEL: list[tuple[str, str, bytes]] = [
    (CHAT, JSON, f'{{"model":"dear",{PROMPT}}}'.encode()),
    (CHAT, JSON, f'{{"model":"m","model":"dear",{PROMPT}}}'.encode()),
    (CHAT, JSON, f'{{"model":"dear","model":"m",{PROMPT}}}'.encode()),
    (CHAT, JSON, f'{{"model":"m","mod\\u0065l":"dear",{PROMPT}}}'.encode()),
    (CHAT, JSON, f'\ufeff{{"model":"dear",{PROMPT}}}'.encode()),
    (CHAT, JSON, f'{{"model":"dear",{PROMPT}}}'.encode("utf-16")),
    (CHAT, JSON, f'[{{"model":"dear",{PROMPT}}}]'.encode()),
    (CHAT, JSON, f'{{"model":["m","dear"],{PROMPT}}}'.encode()),
    (CHAT, "text/plain", f'{{"model":"dear",{PROMPT}}}'.encode()),
    (CHAT + "?model=dear", JSON, f"{{{PROMPT}}}".encode()),
    ("/pooling", JSON, b'{"model":"m","model":"dear","input":"x"}'),
    ("/pooling", JSON, b'{"input":"x"}'),
    ("/v1/audio/transcriptions", FORM, form(("model", "m"), ("model", "dear"))),
    ("/v1/audio/transcriptions", FORM, form(("model", "dear"), ("model", "m"))),
    ("/v1/audio/transcriptions", FORM, form(('x"; name="model', "m"), ("model", "dear"))),
    ("/v1/audio/transcriptions", FORM, form(("model", "m")) + form(("model", "dear"))),
    (
        "/v1/audio/transcriptions",
        FORM.replace("=", '="') + '"; boundary=c',
        form(("model", "dear")),
    ),
    ("/v1/audio/transcriptions", "application/x-www-form-urlencoded", b"model=m&model=dear"),
    ("/v1/audio/transcriptions", "application/x-www-form-urlencoded", b"model=m&mod%65l=dear"),
]


def models_in(body: bytes) -> set[object]:
    """Return every model that a server could find in a body.

    Of equal members of a JSON object all servers that are known take the last.
    """
    found: set[object] = set()
    for encoding in ("utf-8-sig", "utf-16"):
        try:
            read = json.loads(body.decode(encoding))
        except ValueError:
            continue
        objects = read if isinstance(read, list) else [read]
        found.update(each["model"] for each in objects if "model" in each)
    text = body.decode("latin-1")
    found.update(re.findall(r'name="model"\r\n\r\n([^\r]*)', text))
    found.update(value for name, value in parse_qsl(text) if name == "model")
    return found


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(scripted())
        two = await stack.enter_async_context(scripted())
        yield Fleet(one=one, two=two, stack=stack)


def access(**limits: Any) -> AccessConfig:
    return AccessConfig(
        keys=(
            KeyConfig(name="ours", sha256=sha256_of(KEY), **limits),
            KeyConfig(name="theirs", sha256=sha256_of(OTHER)),
        )
    )


async def test_a_keys_client_gets_no_other_model(
    fleet: Fleet, stranger: aiohttp.ClientSession
) -> None:
    fleet.one.models = fleet.two.models = ["m", "dear"]
    router = await fleet.router(access=access(models=("m",)))
    for path, content_type, body in WAYS_TO_ANOTHER_MODEL:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": content_type}
        for data, encoding in ((body, {}), (gzip.compress(body), {"Content-Encoding": "gzip"})):
            async with stranger.post(
                router.url + path, data=data, headers=headers | encoding
            ) as answer:
                await answer.read()
    seen = [*fleet.one.seen, *fleet.two.seen]
    assert [each.body for each in seen if models_in(each.body) - {"m"}] == []


async def test_a_key_is_known_by_one_header_and_no_other(
    fleet: Fleet, stranger: aiohttp.ClientSession
) -> None:
    router = await fleet.router(access=access())
    guesses = [
        *({"Cookie": f"key={KEY}"}, {"Authorization": f"Basic {KEY}"}, {"Api-Key": KEY}),
        *({"Authorization": f"Bearer {KEY[:-1]}"}, {"Authorization": f"Bearer {KEY} x"}),
        *({"Authorization": f"Bearer {sha256_of(KEY)}"}, {"Authorization": "Bearer "}),
        *({"X-Forwarded-User": "ours"}, {"X-Warmroute-Key": "ours"}, {}),
    ]
    for headers in guesses:
        for target in (CHAT, f"{CHAT}?key={KEY}", f"{CHAT}?api_key={KEY}"):
            async with stranger.post(router.url + target, json=chat(), headers=headers) as answer:
                assert answer.status == 401, headers
    assert not fleet.one.seen and not fleet.two.seen


SESSION_FIELDS = ("user", "session_id", "prompt_cache_key")


async def test_a_foreign_session_is_neither_read_nor_moved(
    fleet: Fleet, stranger: aiohttp.ClientSession
) -> None:
    """Whatever name a client gives its own session, the other key's keeps its home."""
    router = await fleet.router(access=access(), policy="session")

    async def ask(key: str, name: str, **fields: str) -> dict[str, str]:
        headers = {"Authorization": f"Bearer {key}", "x-session-id": name}
        if key is OTHER:
            headers[ADMIN_HEADER] = ADMIN_TOKEN  # the test's own look at where it went
        async with stranger.post(router.url + CHAT, json=chat(**fields), headers=headers) as answer:
            assert answer.status == 200
            return {name.lower(): value for name, value in answer.headers.items()}

    home = (await ask(OTHER, "talk"))["x-warmroute-replica"]
    for guess in ("talk", "theirs/talk", "../theirs/talk", "theirs%2Ftalk", "ours/../theirs/talk"):
        for field in SESSION_FIELDS:
            told = await ask(KEY, guess, **{field: guess})
            assert not {each for each in told if each.startswith("x-warmroute-matched")}
            assert not {"x-warmroute-replica", "x-warmroute-reason"} & set(told)
    after = await ask(OTHER, "talk")
    assert (after["x-warmroute-replica"], after["x-warmroute-reason"]) == (home, "session-home")
