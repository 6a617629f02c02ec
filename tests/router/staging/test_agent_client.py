"""What is not an agent's answer, or not one that can be used."""

import aiohttp
import pytest
from aiohttp import web

from router.staging.agent_client import AgentClient, AgentError, HistoryGone
from tests.router.staging.agent_server import AgentServer, serving


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
        with pytest.raises(HistoryGone):
            await AgentClient(session, url).events(0, "earlier", 0.0)
