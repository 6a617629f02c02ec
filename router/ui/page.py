"""The page at ``/ui``: its files, and its state as JSON (``GET /ui/state``).

``warmroute top`` shows the same state in a terminal.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from aiohttp import web

from router.fleet.fleet import Fleet
from router.fleet.replica import Replica
from router.index.prompt_keys import KvTier
from router.record.records import RequestRecord
from router.record.request_log import record_fields
from router.record.time_account import TimeAccount, told_of
from router.ui.recent import KEPT, KEPT_SPILLS, SLICE_S, SLICES, Durations, Recent, Sums, Tokens
from warmroute_common.api_errors import NotFoundError
from warmroute_common.http_server import as_json

_MODELS: Final = 100
"""Most model names that are shown: a replica may have thousands of adapters."""


def state(
    fleet: Fleet, recent: Recent, *, waiting: int, now_s: float, wall_s: float
) -> dict[str, Any]:
    """Return what the page shows. Pure. ``waiting`` counts the requests held in the router.

    ``now_s`` and ``wall_s`` are the same moment: in seconds of `time.monotonic`, and since 1970.
    """
    recent.pass_time(now_s)
    models = sorted({name for each in fleet.replicas.values() for name in each.models or ()})
    ago_s = wall_s - now_s
    return {
        "now": wall_s,
        "started": recent.began_s + ago_s,
        "window_s": SLICES * SLICE_S,
        "policy": fleet.config.policy,
        "models": models[:_MODELS],
        "totals": _totals(fleet, recent, waiting, now_s),
        "replicas": [
            _replica(each, fleet, recent.window, now_s) for each in fleet.replicas.values()
        ],
        "requests": [_request(n, each, ago_s) for n, each in reversed(recent.requests)],
        "ttft": {"slice_s": SLICE_S, "slices": [*_slices(recent, ago_s)]},
        "sessions": _sessions(fleet, recent, ago_s),
    }


def _totals(fleet: Fleet, recent: Recent, waiting: int, now_s: float) -> dict[str, Any]:
    window, tokens = recent.window, recent.window.all_tokens
    return {
        "requests": recent.count,
        "requests_per_s": recent.requests_per_s(now_s),
        "waiting": waiting,
        "in_flight": sum(each.in_flight for each in fleet.replicas.values()),
        "prompt_tokens": tokens.prompt,
        "matched_tokens": _by_tier(tokens.matched),
        "warmth": tokens.warmth,
        "cold": _quantiles(window.cold),
        "warm": _quantiles(window.warm),
        "tpot": _quantiles(window.tpot),
        "index_keys": len(fleet.index),
        "index_max_keys": fleet.index.max_keys,
    }


def _replica(replica: Replica, fleet: Fleet, window: Sums, now_s: float) -> dict[str, Any]:
    tokens = window.tokens.get(replica.id, Tokens())
    sent = replica.waiting - replica.fetching
    # The queue model runs one prefill at a time. Requests of other routers are counted apart.
    prefilling = min(sent, 1)
    return {
        "id": replica.id,
        "url": replica.config.public_url,
        "state": str(replica.state),
        "note": _note(replica, now_s),
        "told_by": [*_told_by(replica)],
        "models": len(replica.models) if replica.models is not None else None,
        "queued": sent - prefilling,
        "fetching": replica.fetching,
        "prefilling": prefilling,
        "decoding": replica.decoding,
        "others": replica.others_waiting + replica.others_running,
        "tiers": _tiers(replica, fleet.index.held(replica.slot)),
        "believed_keys": fleet.index.believed(replica.slot),
        "prompt_tokens": tokens.prompt,
        "matched_tokens": _by_tier(tokens.matched),
        "warmth": tokens.warmth,
        "homes": fleet.sessions.at_home().get(replica.serial, 0),
    }


def _note(replica: Replica, now_s: float) -> str | None:
    """Return what a person should know about a replica besides its figures."""
    if (why := replica.why_idle(now_s)) is not None:
        return why
    if replica.shape_problem is not None:
        return replica.shape_problem
    if replica.tokens_differ:
        return "it tokenizes prompts differently from the router: matched by text"
    return None


def _told_by(replica: Replica) -> Iterable[str]:
    if replica.has_events:
        yield "KV events"
    if replica.has_agent:
        yield "agent"
    if replica.lmcache_keys is not None:
        yield "LMCache"


def _tiers(replica: Replica, held: Mapping[KvTier, int]) -> dict[str, dict[str, Any]]:
    """Return for each tier its known keys and tokens, and how full it is."""
    shape = replica.key_shape
    found = {}
    for tier in KvTier:
        keys = held.get(tier, 0)
        per_key = 0 if shape is None else shape.block_tokens
        if shape is not None and tier is not KvTier.GPU:
            per_key = shape.chunk_tokens
        capacity = _capacity_tokens(replica, tier)
        found[str(tier)] = {
            "keys": keys,
            "tokens": keys * per_key if per_key else None,
            "capacity_tokens": capacity,
            "full": min(1.0, keys * per_key / capacity) if capacity and per_key else None,
        }
    return found


def _capacity_tokens(replica: Replica, tier: KvTier) -> int | None:
    if tier is KvTier.GPU:
        capacity = replica.queue.capacity_tokens
    else:
        capacity = replica.capacity_bytes.get(tier, 0) / replica.kv_bytes_per_token
    return int(capacity) if capacity >= 1 and isfinite(capacity) else None


def _request(number: int, record: RequestRecord, ago_s: float) -> dict[str, Any]:
    predicted_s = record.predicted_ttft_s
    return {
        "number": number,
        "id": record.request_id,
        "ended": record.ended_s + ago_s,
        "endpoint": record.endpoint,
        "replica": record.replica_id,
        "reason": record.reason,
        "home": record.home,
        "prompt_tokens": record.prompt_tokens,
        "matched_tokens": _by_tier(record.matched_tokens),
        "uncached": [] if record.uncached is None else record.uncached.lines(),
        "predicted_s": None if predicted_s is None else predicted_s + (record.held_s or 0.0),
        "ttft_s": record.ttft_s,
        "tpot_s": record.tpot_s,
        "total_s": record.total_s,
        "streamed": record.streamed,
        "tries": 1 + len(record.failed_tries),
        "outcome": str(record.outcome),
        "status": record.status,
    }


def _slices(recent: Recent, ago_s: float) -> Iterable[dict[str, Any]]:
    for each in recent.slices:
        if each.sums.cold.count or each.sums.warm.count:
            yield {
                "began": each.began_s + ago_s,
                "cold": _quantiles(each.sums.cold),
                "warm": _quantiles(each.sums.warm),
            }


def _sessions(fleet: Fleet, recent: Recent, ago_s: float) -> dict[str, Any]:
    spills = islice(reversed(recent.spills), KEPT_SPILLS)
    return {
        "count": len(fleet.sessions),
        "max": fleet.sessions.max_sessions,
        "turns": recent.window.turns,
        "spills": recent.window.spills,
        "last_spills": [
            {"ended": each.ended_s + ago_s, "home": each.home, "replica": each.replica_id}
            for each in spills
        ],
    }


def _quantiles(times: Durations) -> dict[str, Any] | None:
    if not times.count:
        return None
    return {
        "count": times.count,
        "p50_s": times.quantile_s(0.5),
        "p90_s": times.quantile_s(0.9),
    }


def _by_tier(tokens: Mapping[KvTier, int]) -> dict[str, int]:
    return {str(tier): tokens.get(tier, 0) for tier in KvTier}


_DIRECTORY: Final = Path(__file__).parent / "static"

FILES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "/ui": "index.html",
        **{
            f"/ui/{name}": name
            for name in (
                *("style.css", "icon.svg"),
                *("main.js", "elements.js", "words.js", "fleet.js", "requests.js"),
                *("chart.js", "sessions.js", "explain.js"),
            )
        },
    }
)
"""The page's files by their paths. They contain no data and need no key."""

_HEADERS: Final = {
    # Scripts, styles and data only from the router, and nothing inline: a model's name that
    # contains a script cannot run in the page.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Revalidated each time, so that a new version's page is shown at once.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, kw_only=True)
class Page:
    """Handlers of the page."""

    fleet: Fleet
    recent: Recent
    waiting: Callable[[], int]
    """Returns how many requests are held in the router."""

    async def state(self, request: web.Request) -> web.Response:
        """``GET /ui/state``."""
        shown = state(
            self.fleet,
            self.recent,
            waiting=self.waiting(),
            now_s=time.monotonic(),
            wall_s=time.time(),
        )
        answer = as_json(shown)
        answer.headers["Cache-Control"] = "no-store"
        return answer

    async def request(self, request: web.Request) -> web.Response:
        """``GET /requests/ID``: what is known of a request that has ended, and in words why it took
        as long as it did.

        Only the router that has carried the request knows it.
        """
        request_id = request.match_info["id"]
        record = self.recent.find(request_id)
        if record is None:
            raise NotFoundError(
                f"no request '{request_id}' has ended here among the last {KEPT:,}; look for it in "
                "the request log, or ask the router that carried it"
            )
        ended_s = record.ended_s + time.time() - time.monotonic()
        account = TimeAccount(record)
        found = account.most_unexpected
        answer = as_json(
            {
                "record": record_fields(record, ended_s),
                "parts": [asdict(each) for each in account.parts],
                "most_unexpected": None if found is None else found.name,
                "why": told_of(record),
            }
        )
        answer.headers["Cache-Control"] = "no-store"
        return answer

    async def file(self, request: web.Request) -> web.StreamResponse:
        """One of `FILES`."""
        return web.FileResponse(_DIRECTORY / FILES[request.path], headers=_HEADERS)
