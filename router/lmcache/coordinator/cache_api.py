"""The coordinator's calls that act on what servers hold: prefetches, deletions, pins, quotas."""

from collections.abc import Callable
from urllib.parse import quote

import aiohttp
import msgspec
from aiohttp import web

from router.agent_client import AgentError
from router.lmcache.coordinator.calls import (
    GIB,
    DeleteCall,
    MalformedCallError,
    PrefetchCall,
    QuotaCall,
    QuotaConfigCall,
    TierOrAll,
    TokensCall,
    keys_of,
    page_of,
    read_call,
    tier_of,
)
from router.lmcache.coordinator.state import Coordinator
from router.lmcache.coordinator.usage import bytes_by_salt
from router.lmcache.server import LmcacheServer
from router.lmcache.wire import DeletedTold, ObjectKey, PrefetchStatus, check_salt
from warmroute_common.api_errors import BadRequestError, NotFoundError, UpstreamFailedError
from warmroute_common.http_server import as_json


class CacheApi:
    """Handlers of ``/cache`` and ``/quota``."""

    def __init__(self, coordinator: Coordinator, session: aiohttp.ClientSession) -> None:
        """``session`` reaches the servers."""
        self._coordinator = coordinator
        self._session = session

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.post("/cache/prefetches", self.prefetch),
            web.get("/cache/prefetches/{instance_id}/{request_id}", self.prefetch_status),
            web.post("/cache/delete", self.delete),
            web.post("/cache/pins", self.pin),
            web.delete("/cache/pins", self.unpin),
            web.get("/cache/pins", self.pins),
            web.get("/quota", self.quotas),
            web.get("/quota/config", self.quota_config),
            web.put("/quota/config", self.set_quota_config),
            web.get("/quota/{cache_salt}", self.quota),
            web.put("/quota/{cache_salt}", self.set_quota),
            web.delete("/quota/{cache_salt}", self.remove_quota),
        ]

    # --- what servers are told to do

    async def prefetch(self, request: web.Request) -> web.Response:
        """Pass a prefetch on to a server."""
        call = await read_call(request, PrefetchCall)
        body = msgspec.structs.asdict(call)
        name = body.pop("instance_id")
        server = self._server(name)
        try:
            told = await server.ask("POST", "/cache/prefetches", PrefetchStatus, body)
        except AgentError as error:
            raise UpstreamFailedError(f"prefetch submit to {name!r} failed: {error}") from None
        return as_json(
            {
                "instance_id": name,
                "request_id": told.request_id,
                "chunks": told.chunks,
                "status": told.status,
            }
        )

    async def prefetch_status(self, request: web.Request) -> web.Response:
        """Answer what a server says of a prefetch."""
        name, request_id = (request.match_info[each] for each in ("instance_id", "request_id"))
        server, path = self._server(name), f"/cache/prefetches/{quote(request_id, safe='')}"
        try:
            status, answer = await server.call("GET", path)
        except AgentError as error:
            raise UpstreamFailedError(f"prefetch status of {name!r} failed: {error}") from None
        return web.Response(status=status, body=answer, content_type="application/json")

    async def delete(self, request: web.Request) -> web.Response:
        """Have a server delete a prompt's chunks; of L2 those that are pinned only by force."""
        call = await read_call(request, DeleteCall)
        server, pins = self._server(call.instance_id), self._coordinator.pins
        chunks, keys = keys_of(call, self._coordinator.chunk_tokens)
        keys = self._coordinator.directory.in_all_groups(keys)
        in_l2, told = call.tier != "l1", DeletedTold()
        wanted = pins.unpinned(keys) if in_l2 and not call.force else keys
        if wanted:
            try:
                told = await server.delete(wanted, tier=call.tier, force=call.force)
            except AgentError as error:
                raise UpstreamFailedError(
                    f"delete at {call.instance_id!r} failed: {error}"
                ) from None
        if in_l2 and call.force:
            pins.drop(keys)
        return as_json(
            {
                "instance_id": call.instance_id,
                "requested": chunks,
                "affected": told.deleted,
                "skipped": told.skipped + len(keys) - len(wanted),
                "status": "deleted" if chunks else "noop",
            }
        )

    # --- what evictions and deletions leave alone

    async def pin(self, request: web.Request) -> web.Response:
        """Pin the keys of a prompt's chunks."""
        return await self._pin(request, self._coordinator.pins.pin, "pinned")

    async def unpin(self, request: web.Request) -> web.Response:
        """End `pin`, once."""
        return await self._pin(request, self._coordinator.pins.unpin, "unpinned")

    async def pins(self, request: web.Request) -> web.Response:
        """Answer a page of the pinned keys."""
        salt, model = (request.query.get(each, "") for each in ("cache_salt", "model_name"))
        return as_json(self._coordinator.pins.page(salt, model, page_of(request)))

    # --- how much of L2 a salt's keys may take (`eviction`)

    async def quotas(self, request: web.Request) -> web.Response:
        """Answer every salt's usage of a tier, and its quota."""
        limits, used = self._accounts(request)
        return as_json(
            {
                "total_gb": sum(used.values()) / GIB,
                "by_cache_salt": [_account(each, limits, used) for each in sorted(limits | used)],
            }
        )

    async def quota(self, request: web.Request) -> web.Response:
        """Answer one salt's usage of a tier, and its quota."""
        return as_json(_account(_salt(request), *self._accounts(request)))

    async def set_quota(self, request: web.Request) -> web.Response:
        """Set a salt's quota."""
        call = await read_call(request, QuotaCall)
        _check_l2(call.tier)
        salt = _salt(request)
        self._coordinator.quotas.set(salt, int(call.limit_gb * GIB))
        return as_json({"cache_salt": salt, "limit_gb": call.limit_gb, "status": "ok"})

    async def remove_quota(self, request: web.Request) -> web.Response:
        """Remove a salt's quota; the default one is its from then on."""
        _check_l2(tier_of(request, "l2"))
        salt = _salt(request)
        status = "removed" if self._coordinator.quotas.remove(salt) else "not_found"
        return as_json({"cache_salt": salt, "limit_gb": 0.0, "status": status})

    async def quota_config(self, request: web.Request) -> web.Response:
        """Answer the quota of salts that have none of their own."""
        _check_l2(tier_of(request, "l2"))
        limit_bytes = self._coordinator.quotas.default_bytes
        return as_json({"default_limit_gb": None if limit_bytes is None else limit_bytes / GIB})

    async def set_quota_config(self, request: web.Request) -> web.Response:
        """Set the quota of salts that have none of their own."""
        call = await read_call(request, QuotaConfigCall)
        _check_l2(call.tier)
        limit_gb = call.default_limit_gb
        self._coordinator.quotas.default_bytes = None if limit_gb is None else int(limit_gb * GIB)
        return as_json({"default_limit_gb": limit_gb})

    # --- parts of the above

    def _server(self, name: str) -> LmcacheServer:
        member = self._coordinator.members.get(name)
        if member is None:
            raise NotFoundError(f"no MP server registered with instance_id={name!r}")
        return LmcacheServer(self._session, member.url)

    async def _pin(
        self, request: web.Request, act: Callable[[list[ObjectKey]], None], status: str
    ) -> web.Response:
        call = await read_call(request, TokensCall)
        chunks, keys = keys_of(call, self._coordinator.chunk_tokens)
        act(keys)
        return as_json({"requested": chunks, "affected": len(keys), "status": status})

    def _accounts(self, request: web.Request) -> tuple[dict[str, int], dict[str, int]]:
        """Return the quotas that apply to the tier of a query, and the usage, in bytes by salt."""
        tier = tier_of(request, "l2")
        if tier == "all":
            # A key in both tiers would count twice.
            raise BadRequestError("tier 'all' has no usage accounting; only 'l1', 'l2'")
        limits = dict(self._coordinator.quotas.all()) if tier == "l2" else {}
        return limits, bytes_by_salt(self._coordinator.directory.totals, tier)


def _account(salt: str, limits: dict[str, int], used: dict[str, int]) -> dict[str, object]:
    return {
        "cache_salt": salt,
        "quota_limit_gb": limits.get(salt, 0) / GIB,
        "quota_exists": salt in limits,
        "usage_gb": used.get(salt, 0) / GIB,
    }


def _check_l2(tier: TierOrAll) -> None:
    if tier != "l2":
        raise BadRequestError(f"quotas apply to tier 'l2' only, not {tier!r}")


def _salt(request: web.Request) -> str:
    """Return the salt of a path; ``_default`` stands for none. Raises `MalformedCallError`."""
    salt = request.match_info["cache_salt"]
    try:
        check_salt(salt)
    except ValueError as error:
        raise MalformedCallError(str(error)) from None
    return "" if salt == "_default" else salt
