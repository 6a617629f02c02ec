"""Watches the replicas' LMCache servers: holds a connection to each, and asks it every second.

Every ten seconds it reads the speeds that the servers measure, for the replicas' cost models.

A server that has ended is forgotten at once: nothing is prefetched there and its KV does not count.
Its vLLM does not notice for up to two LMCache heartbeats of 10 s each, and requests hang there
meanwhile (22.7 s were measured). So the replica gets no new requests for that long, if another
replica is up. The end must be known before the next request: a killed process closes the held
connection, which shows within milliseconds.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from router.config.settings import ReplicaConfig
from router.fleet.cost_model import CostPart
from router.fleet.counter_speeds import CounterSpeeds, SpeedCounters
from router.fleet.fleet import Fleet
from router.fleet.replica import ReplicaState
from router.index.lmcache_keys import LMCACHE_HASH
from router.lmcache.coordinator import Coordinator, LiveServer, RegisteredServer
from router.lmcache.key_directory import LOCAL_BACKENDS
from router.lmcache.server_client import (
    LmcacheServerClient,
    LmcacheServerError,
    LmcacheServerTimeoutError,
)
from warmroute_common.addresses import server_key
from warmroute_common.tasks import all_set, end_all

log = logging.getLogger("warmroute.lmcache")

_EVERY_S: Final = 1.0
_ANSWER_S: Final = 2.0
_METRICS_EVERY_CHECKS: Final = 10
_MAX_MISSES: Final = 5
"""Consecutive late answers after which a server counts as ended."""
UNNOTICED_S: Final = 22.0
"""How long vLLM may believe that an ended server is alive."""


@dataclass(eq=False)
class _Watched:
    """The URL of a replica's server; kept for a while after the server has ended."""

    url: str
    server: LiveServer | None = None
    """None while no usable server answers."""
    misses: int = 0
    """Consecutive late answers."""
    lost_s: float = -inf
    """When a server last ended here, until it is back."""
    connection: asyncio.Task[None] | None = None
    """Holds a connection to the server."""
    checks: int = 0
    speeds: CounterSpeeds = field(default_factory=CounterSpeeds)


@dataclass(eq=False)
class _Paused:
    """Whether a replica gets no new requests because its server has ended."""

    until_s: float | None = None
    hangs: asyncio.Future[None] | None = None
    """Done when the replica begins to hang: requests that wait for its answer wait for this too."""


class ServerMonitor:
    """Runs between `start` and `stop`."""

    def __init__(
        self,
        fleet: Fleet,
        coordinator: Coordinator,
        session: aiohttp.ClientSession,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._coordinator = coordinator
        self._session = session
        self._clock = clock
        self._urls: dict[str, str] = {}
        """URL of each replica's server."""
        self._watched: dict[str, _Watched] = {}
        """By URL."""
        self._paused: dict[str, _Paused] = {}
        """By replica."""
        self._logged: set[str] = set()
        """Problems that were logged and still exist."""
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Ask every server once, then keep watching in the background."""
        await self.check_all()
        self._task = asyncio.create_task(self._run(), name="lmcache-monitor")

    async def stop(self) -> None:
        tasks = [self._task, *(each.connection for each in self._watched.values())]
        await end_all([each for each in tasks if each is not None])

    def hung(self, replica_id: str) -> asyncio.Future[None] | None:
        """Return a future that is done when a replica begins to hang while another one is up.

        None if the replica has no server.
        """
        name = self._fleet.replicas[replica_id].id
        if name not in self._urls:
            return None
        paused = self._paused.setdefault(name, _Paused())
        if paused.hangs is None:
            paused.hangs = asyncio.get_running_loop().create_future()
        return paused.hangs

    def servers_changed(self) -> None:
        """Check now: a server has registered or left, or a replica has joined."""
        self._changed.set()

    def left(self, replica_id: str) -> None:
        """Forget a replica that is about to leave the fleet."""
        self._urls.pop(replica_id, None)
        self._paused.pop(replica_id, None)
        self._coordinator.replica_servers.left(replica_id)

    async def check_all(self) -> None:
        """Ask every server, and assign the servers that answer to their replicas."""
        configs = {name: each.config for name, each in self._fleet.replicas.items()}
        urls, problems = server_urls(configs, self._coordinator.servers.all())
        self._urls = urls
        watched = {url: self._watched.setdefault(url, _Watched(url)) for url in urls.values()}
        answers = await asyncio.gather(*map(self._check, watched.values()))
        found = dict(zip(watched, answers, strict=True))
        self._log({*problems, *(each for each in answers if isinstance(each, str))})
        lost = {url for url in list(self._watched) if self._is_lost(url, found.get(url))}
        for name, config in configs.items():
            replica = self._fleet.replicas.get(name)
            if replica is None or replica.config is not config:
                continue  # it left during the calls; another replica may have its name now
            server = found.get(urls.get(name, ""))
            self._coordinator.replica_servers.assign(
                name, server if isinstance(server, LiveServer) else None
            )
            if urls.get(name) in lost:
                self._pause(name)
        self._end_pauses()

    async def _run(self) -> None:
        while True:
            await all_set([self._changed], _EVERY_S)
            self._changed.clear()
            try:
                self._coordinator.expire(self._clock())
                await self.check_all()
            except Exception:  # otherwise the task would end without a trace
                log.exception("checking the LMCache servers failed")

    def _is_lost(self, url: str, answer: LiveServer | str | None) -> bool:
        """Record an answer; return whether a server has stopped answering with it."""
        watched, now_s = self._watched[url], self._clock()
        before, watched.server = watched.server, answer if isinstance(answer, LiveServer) else None
        lost = before is not None and watched.server is None
        if before is not None and lost:
            self._coordinator.lost(before.instance_id)
            watched.lost_s = now_s
        self._keep_connection(watched)
        if answer is None and now_s - watched.lost_s >= UNNOTICED_S:
            del self._watched[url]
        return lost

    def _log(self, problems: set[str]) -> None:
        """Log each problem once for as long as it lasts."""
        for problem in problems - self._logged:
            log.warning("%s", problem)
        self._logged = problems

    async def _check(self, watched: _Watched) -> LiveServer | str:
        """Return the server at a URL, or why there is no usable one."""
        client, known = LmcacheServerClient(self._session, watched.url), watched.server
        watched.checks += 1
        try:
            async with asyncio.timeout(_ANSWER_S):
                if known is None:
                    found = await self._learn(client, watched)
                elif self._lacks_model(watched.url):
                    # Its vLLM may register after the router has found the server.
                    found = known
                    found.world_sizes.update((await client.status()).world_sizes())
                elif watched.checks % _METRICS_EVERY_CHECKS == 0:
                    self._note_speeds(watched, known, await client.metrics())
                    found = known
                else:
                    await client.health()
                    found = known
        except (LmcacheServerTimeoutError, TimeoutError):
            # A busy server may be slow; the port of an ended process refuses at once.
            watched.misses += 1
            if known is not None and watched.misses < _MAX_MISSES:
                return known
            return f"LMCache server {watched.url} does not answer within {_ANSWER_S:g} s"
        except LmcacheServerError:
            return f"LMCache server {watched.url} does not answer"
        watched.misses = 0
        return found

    def _note_speeds(self, watched: _Watched, server: LiveServer, metrics: str) -> None:
        """Report the speeds that a server has measured to the replicas that use it."""
        servers = self._coordinator.replica_servers
        if not metrics:
            return  # otherwise all that was measured before would count as new next time
        counters = server_counters(servers.shared_backends(server.instance_id))
        speeds = watched.speeds.read(metrics, counters)
        for name in [each for each, url in self._urls.items() if url == watched.url]:
            _, ranks = servers.model_of(name) or ("", 1)
            for part, per_second, measured_on in speeds:
                # Each rank loads its own part at the same time; L2 reads are of all ranks' parts.
                total = per_second * ranks if part is CostPart.LOAD else per_second
                self._fleet.replicas[name].rates.report(part, total, measured_on)

    def _lacks_model(self, url: str) -> bool:
        """Whether a replica's model is not yet known at its server."""
        servers = self._coordinator.replica_servers
        return any(servers.model_of(name) is None for name, at in self._urls.items() if at == url)

    async def _learn(self, client: LmcacheServerClient, watched: _Watched) -> LiveServer | str:
        instance_id, status = await asyncio.gather(client.instance_id(), client.status())
        url = client.base_url
        if status.hash_algorithm != LMCACHE_HASH:
            return (
                f"LMCache server {url} hashes chunks with {status.hash_algorithm}, so its chunks "
                f"cannot be matched: start it with --hash-algorithm {LMCACHE_HASH}"
            )
        log.info("LMCache server %s answers at %s", instance_id, url)
        if self._clock() - watched.lost_s < UNNOTICED_S:
            log.warning(
                "LMCache server %s is back before its vLLM may have noticed that it had ended: "
                "that vLLM would store and find nothing there (LMCache 0.5); stop the server for "
                "%g s, or restart that vLLM",
                instance_id,
                UNNOTICED_S,
            )
        watched.lost_s = -inf
        self._coordinator.expect(instance_id, self._clock())
        self._coordinator.chunk_tokens = status.chunk_size
        return LiveServer(
            url=url,
            instance_id=instance_id,
            chunk_tokens=status.chunk_size,
            world_sizes=status.world_sizes(),
        )

    def _keep_connection(self, watched: _Watched) -> None:
        if watched.server is None:
            if watched.connection is not None:
                watched.connection.cancel()
        elif watched.connection is None or watched.connection.done():
            watched.connection = asyncio.create_task(self._hold_connection(watched.url))

    async def _hold_connection(self, url: str) -> None:
        """Hold a connection until the server closes it, then check the server."""
        began_s, parts = self._clock(), urlsplit(url)
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
            try:
                await reader.read(1)
            finally:
                writer.close()
        # A server that closes every connection early has not ended: do not check at each close.
        if self._clock() - began_s > _EVERY_S:
            self._changed.set()

    def _pause(self, name: str) -> None:
        """Give a replica no new requests for `UNNOTICED_S` while another replica is up."""
        log.warning(
            "%s gets no new requests for %g s, because its LMCache server has ended",
            name,
            UNNOTICED_S,
        )
        paused = self._paused.setdefault(name, _Paused())
        paused.until_s = self._clock() + UNNOTICED_S
        self._fleet.rest(name, True)
        others = [each for each in self._fleet.replicas.values() if each.id != name]
        if any(each.state is ReplicaState.UP and not each.rests for each in others):
            if paused.hangs is not None:
                paused.hangs.set_result(None)
            paused.hangs = None

    def _end_pauses(self) -> None:
        for name, each in self._paused.items():
            if each.until_s is not None and each.until_s <= self._clock():
                each.until_s = None
                self._fleet.rest(name, False)


def server_counters(shared: Collection[str]) -> tuple[SpeedCounters, ...]:
    """Return the counters of a server's speeds; ``shared`` are the backends that it shares.

    From ``lmcache/v1/mp_observability/subscribers/metrics`` of 0.5.6:

    - Loads (``phase_timing.py``): bytes and seconds of the copies to the GPU alone. On CPUs, which
      have no such copies, the speed of whole loads (``l0_l1_throughput.py``); on GPUs that one
      includes the wait for vLLM's own work, and would make loading look slow under load.
    - Reads from L2 (``l2_throughput.py``): the mean of the reads' speeds, from order to end. The
      adapter's queue makes reads at the same time look slower than the disk is, and small reads
      from the page cache count as much as large ones. There is no counter of bytes or of seconds.

    A server with ``--otlp-endpoint`` or ``--disable-metrics`` exports nothing here.
    """
    disk = "|".join(sorted(LOCAL_BACKENDS - set(shared)))
    l2_loads = "lmcache_mp_l2_load_throughput_GB_per_second"
    return (
        SpeedCounters(
            part=CostPart.LOAD,
            amount="lmcache_mp_transfer_phase_bytes_total",
            time="lmcache_mp_transfer_phase_elapsed_seconds_total",
            labels='direction="h2d",phase="staging"',
        ),
        SpeedCounters.of_histogram(
            CostPart.LOAD, "lmcache_mp_l0_l1_load_throughput_GB_per_second", 'device="cpu"'
        ),
        SpeedCounters.of_histogram(CostPart.DISK, l2_loads, f'l2_name="({disk})"'),
        SpeedCounters.of_histogram(CostPart.REMOTE, l2_loads, f'l2_name="(?!({disk}|p2p)")'),
    )


def server_urls(
    replicas: Mapping[str, ReplicaConfig], servers: Sequence[RegisteredServer]
) -> tuple[dict[str, str], list[str]]:
    """Return the URL of each replica's LMCache server, and problems for the log.

    A replica's server is the one in its ``lmcache`` setting. Without that, it is the server on the
    replica's host, if that host has one server and one such replica. Other replicas are left out.
    """
    urls = {name: each.lmcache for name, each in replicas.items() if each.lmcache is not None}
    configured = {server_key(url) for url in urls.values()}
    problems: list[str] = []
    # By host: every second all servers are compared with all replicas.
    replicas_at: dict[str, list[str]] = {}
    for name, each in replicas.items():
        if each.lmcache is None and each.agent_url is None:
            replicas_at.setdefault(_host(each.url), []).append(name)
    servers_at: dict[str, list[str]] = {}
    for server in servers:
        servers_at.setdefault(_host(server.url), []).append(server.instance_id)
    for server in servers:
        if server_key(server.url) in configured:
            continue
        host = _host(server.url)
        here = replicas_at.get(host, [])
        others = [each for each in servers_at[host] if each != server.instance_id]
        if len(here) == 1 and not others:
            urls[here[0]] = server.url
        elif replicas_at:
            problems.append(_unclear(server, here, others))
    return urls, problems


def _host(url: str) -> str:
    return server_key(url)[1]


def _unclear(server: RegisteredServer, here: Sequence[str], others: Sequence[str]) -> str:
    host = urlsplit(server.url).hostname
    if not here:
        why = f"no replica's url names its host {host}"
    elif others:
        why = f"{', '.join(others)} is at {host} too"
    else:
        why = f"{', '.join(here)} are all at {host}"
    return (
        f"the replica of LMCache server '{server.instance_id}' is not clear: {why}; "
        f"write 'lmcache: {server.url}' at its replica"
    )
