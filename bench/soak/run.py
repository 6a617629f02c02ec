"""One soak from start to end."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.soak import verdict
from bench.soak.clients.answers import Answers
from bench.soak.clients.client import Client, client_session
from bench.soak.clients.talk import Talk
from bench.soak.faults import schedule
from bench.soak.fleet import Replica, disturb
from bench.soak.front import Front
from bench.soak.ledger import Ledger
from bench.soak.reloads import Reloads
from bench.soak.settings import Settings
from bench.soak.verdict import Verdict
from bench.soak.watch import Watch
from cacheengine.launch.vllm_launch import free_ports
from router.launch.processes import ProcessGroup

_QUIET_S: Final = 15.0
_POLL_S: Final = 0.2
_REFUSED: Final = "configuration not reloaded, the old settings stay in use"
_BAD_WORDS: Final = ("Traceback", " ERROR ", "Task exception", "never retrieved")


@dataclass(kw_only=True)
class Soaked:
    """What a soak has shown."""

    verdicts: list[Verdict]
    ledger: Ledger
    watch: Watch
    reloads: Reloads | None
    """None where the router knows no reload."""
    cpu_s: dict[str, float] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether all holds that must."""
        return all(each.holds for each in self.verdicts)


async def soak(settings: Settings, directory: Path, say: Callable[[str], None]) -> Soaked:
    """Run a soak, its logs in ``directory``; raise `BenchError` or `ChildFailedError`."""
    with ProcessGroup() as group:
        ports = free_ports(2 * settings.replicas)
        replicas = [
            Replica(group, directory, number, (ports[2 * number], ports[2 * number + 1]))
            for number in range(settings.replicas)
        ]
        for each in replicas:
            each.start()
        told = [await each.ready() for each in replicas]
        front = Front(group, directory, by_envoy=settings.by_envoy)
        await front.start(replicas, told[0]["router_rates"])
        return await _soak(settings, replicas, front, say)


async def _soak(
    settings: Settings, replicas: list[Replica], front: Front, say: Callable[[str], None]
) -> Soaked:
    began_s = time.monotonic()
    ledger, watch = Ledger(), Watch(began_s=began_s)
    reloads = Reloads() if front.reloads_on_signal else None
    watching = [asyncio.create_task(watch.run(front.pids))]
    faults = schedule(
        seed=settings.seed,
        duration_s=settings.duration_s,
        replicas=settings.replicas,
        every_s=settings.fault_every_s,
    )
    if reloads is not None:
        reloading = reloads.run(
            front, replicas, seed=settings.seed, every_s=settings.reload_every_s, say=say
        )
        watching.append(asyncio.create_task(reloading))
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(disturb(faults, replicas, ledger, began_s=began_s, say=say))
            tasks.create_task(_clients(settings, front, ledger, began_s + settings.duration_s))
    finally:
        for each in watching:
            each.cancel()
    left, busy = await _left(front, replicas)
    for ended in await asyncio.gather(*watching, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended
    verdicts = [
        *verdict.of_requests(ledger),
        *verdict.of_processes(watch.samples, settings.settling_s),
        *verdict.of_the_end(left, busy),
        *verdict.of_logs(_bad_lines([front.log, *(log for each in replicas for log in each.logs)])),
        *_of_reloads(reloads, front),
    ]
    cpu_s = {**watch.cpu_s, "clients": time.process_time()}
    return Soaked(verdicts=verdicts, ledger=ledger, watch=watch, reloads=reloads, cpu_s=cpu_s)


async def _clients(settings: Settings, front: Front, ledger: Ledger, until_s: float) -> None:
    answers = Answers()
    async with client_session() as session, asyncio.TaskGroup() as tasks:
        for number in range(settings.clients):
            client = Client(
                url=front.url,
                talk=Talk(client=number, seed=settings.seed),
                answers=answers,
                ledger=ledger,
                until_s=until_s,
                session=session,
            )
            tasks.create_task(client.run())


async def _left(front: Front, replicas: list[Replica]) -> tuple[dict[str, float], list[str]]:
    """Return the router's counts and the busy replicas, once all is quiet or should be."""
    until_s = time.monotonic() + _QUIET_S
    while True:
        waiting = await front.metric("warmroute_table_entries", table="waiting")
        left = {**await front.metric("warmroute_in_flight"), **waiting}
        busy = [each.instance_id for each in replicas if not await each.is_idle()]
        is_quiet = not busy and not any(left.values())
        if is_quiet or time.monotonic() > until_s:
            return left, busy
        await asyncio.sleep(_POLL_S)


def _of_reloads(reloads: Reloads | None, front: Front) -> list[Verdict]:
    if reloads is None:
        return []
    refused = front.log.read_text(errors="replace").count(_REFUSED)
    return verdict.of_reloads(reloads.sent, reloads.seen, reloads.bad, refused)


def _bad_lines(logs: list[Path]) -> list[str]:
    return [
        f"{log.name}: {line}"
        for log in logs
        for line in log.read_text(errors="replace").splitlines()
        if any(word in line for word in _BAD_WORDS) and _REFUSED not in line
    ]
