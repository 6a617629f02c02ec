"""What is not an agent's answer, or not one that can be used."""

import aiohttp
import pytest
from aiohttp import web

from router import agent_client
from router.agent_client import AgentClient, AgentError, HistoryGoneError
from tests.router.agent_server import AgentServer, serving
from warmroute_common.fleet_secret import FleetSecret


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (500, b'{"error": "no room"}', "500: no room"),
        (200, b"<html>", "the answer is not a InstanceInfo"),
        (200, b"{}", "the answer is not a InstanceInfo"),
        (404, b"not here", "404: not here"),
    ],
)
async def test_what_is_not_an_agents_answer_is_an_agent_error(
    status: int, body: bytes, problem: str
) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body)

    app = web.Application()
    app.router.add_get("/info", answer)
    async with serving(app) as url, aiohttp.ClientSession() as session:
        with pytest.raises(AgentError, match=problem):
            await AgentClient(session, url).info()


async def test_chunks_that_are_not_whole_blocks_are_refused() -> None:
    agent = AgentServer(block_tokens=48)
    async with serving(agent.app()) as url, aiohttp.ClientSession() as session:
        with pytest.raises(AgentError, match="chunks of 64 tokens are not whole blocks of 48"):
            await AgentClient(session, url).info()


async def test_events_of_another_incarnation_are_gone() -> None:
    agent = AgentServer()
    async with serving(agent.app()) as url, aiohttp.ClientSession() as session:
        with pytest.raises(HistoryGoneError):
            await AgentClient(session, url).events(0, "earlier", 0.0)


SECRET = FleetSecret("known-to-the-fleet-alone")


async def asked(answer: web.StreamResponse, secret: FleetSecret | None) -> str | None:
    """Ask an agent that answers so; return what it was shown."""
    shown: list[str | None] = []

    async def info(request: web.Request) -> web.StreamResponse:
        shown.append(request.headers.get("Authorization"))
        return answer

    app = web.Application()
    app.router.add_get("/info", info)
    async with serving(app) as url, aiohttp.ClientSession() as session:
        with pytest.raises(AgentError) as failed:
            await AgentClient(session, url, secret).info()
    assert len(shown) == 1
    return f"{shown[0]}; {failed.value}"


@pytest.mark.parametrize(
    ("secret", "words"),
    [
        (None, ["None; ", "401: show it (here: there is none)"]),
        (SECRET, [f"Bearer {SECRET.token}; ", "401: show it (here: another one is set)"]),
    ],
)
async def test_the_secret_is_shown_and_missed(secret: FleetSecret | None, words: list[str]) -> None:
    told = await asked(web.json_response({"error": "show it"}, status=401), secret)
    assert all(each in str(told) for each in words)


async def test_an_agent_that_sends_elsewhere_is_not_followed() -> None:
    answer = web.Response(status=307, headers={"Location": "http://127.0.0.1:1/"})
    assert "307" in str(await asked(answer, SECRET))


async def test_an_answer_is_read_up_to_a_bound() -> None:
    told = await asked(web.Response(body=b" " * (agent_client._MOST_BYTES + 1)), None)
    assert f"an answer of more than {8 << 20} bytes" in str(told)
