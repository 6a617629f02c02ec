"""What tests here share."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import openai
import pytest

from router.fleet.decision import Decision, Prefiller
from router.fleet.fleet import Fleet as RouterFleet
from router.fleet.replica import Replica
from router.scheduling.request_scheduler import PlacementRequest, RequestScheduler
from router.scheduling.scorer import ReservedWork
from tests.router.conftest import Running

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def openai_client(router: Running) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="mine", max_retries=0)


Choose = Callable[[Decision, RouterFleet], Replica | None]
"""Which replica prefills for a decision's; None: none."""


def prefilling_at(
    monkeypatch: pytest.MonkeyPatch,
    choose: Choose,
    decoder: Callable[[], str] | None = None,
    moves_to: str | None = None,
) -> None:
    """Let each decision have the prefiller that ``choose`` names, as the scheduler would.

    ``decoder`` names the replica that all requests go to, if it is given, and ``moves_to`` the one
    that is better when the first leg has ended.
    """
    place = RequestScheduler.place

    def places(
        scheduler: RequestScheduler,
        request: PlacementRequest,
        now_s: float,
        reserved: ReservedWork | None = None,
    ) -> Decision:
        if request.former is not None:
            request = replace(request, among=[moves_to or request.former.replica_id])
        elif decoder is not None and decoder() not in request.exclude:
            request = replace(request, among=[decoder()])
        alone = replace(request, may_split=False)
        decision = place(scheduler, alone, now_s, reserved)
        replica = choose(decision, scheduler.fleet) if request.may_split else None
        if replica in (None, decision.picked.replica) or replica.id in request.exclude:
            return decision
        picked = decision.picked
        prefiller = Prefiller(replica=replica, work=picked.work, cost=picked.cost, pull_bytes=0.0)
        return replace(decision, picked=replace(picked, prefiller=prefiller))

    monkeypatch.setattr(RequestScheduler, "place", places)
