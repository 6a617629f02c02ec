"""The soak of the router: nothing may be lost, wrong or growing.

Simulated replicas, each a process, behind a real `warmroute serve`, or behind a real Envoy that
asks a `warmroute picker`. Every 20 seconds there is a fault (`bench.soak.fleet.ReplicaFault`), and
every minute the configuration is rewritten and reloaded. Clients hold conversations, a third of
their answers not streamed. Some clients leave, read slowly or not at all, send their bodies slowly
or never to the end. Every byte of every answer is compared.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.soak.answers import Answers
from bench.soak.clients import (
    Client,
    Conversations,
    Ledger,
    Outcome,
    client_session,
    send_poison,
)
from bench.soak.faulty_proxy import (
    COMMENTED,
    COMMENTS_ONLY,
    ERROR_FIRST,
    ERROR_LATER,
    RESET,
)
from bench.soak.fleet import OF_PROXY, Front, Reloads, Replica, ReplicaFault, replica_faults
from bench.soak.harness import (
    LongRun,
    Result,
    Verdict,
    Watch,
    at_least_one,
    bad_lines,
    due,
    none_of,
    of_processes,
    samples_json,
)
from cacheengine.launch.vllm_launch import free_ports
from router.launch.processes import ProcessGroup

_QUIET_S: Final = 15.0
_POLL_S: Final = 0.2
_SERVES_AGAIN_S: Final = 10.0
"""After flapping: a probe comes every two seconds, and a breaker opens for five."""
_RECOVERS_S: Final = 3.0
"""Between the end of one fault and the next: the router polls replicas every two seconds."""
FULL: Final = "times that the router could open no files"
_KILLED: Final = "replicas killed by poison requests"
_MOST_KILLED: Final = 2
_EFFECTS: Final = {
    ReplicaFault.POISON: (_KILLED,),
    ReplicaFault.FLAP: (RESET,),
    ReplicaFault.COMMENTS: (COMMENTED, COMMENTS_ONLY),
    ReplicaFault.STREAM_ERRORS: (ERROR_FIRST, ERROR_LATER),
    ReplicaFault.NO_FILES: (FULL,),
}
"""What must be seen of a fault, or it has shown nothing."""
_REFUSED: Final = "configuration not reloaded, the old settings stay in use"


@dataclass(frozen=True, kw_only=True)
class RouterSoak(LongRun):
    """Simulated replicas behind the router. Raises ValueError for impossible settings."""

    minutes: float = 30.0
    replicas: int = 4
    clients: int = 64
    """They ask at the same time, each one request after the other."""
    seed: int = 1
    by_envoy: bool = False
    """Whether an Envoy carries the requests, and the router is its picker."""
    fault_every_s: float = 20.0
    reload_every_s: float = 60.0

    def __post_init__(self) -> None:
        if self.replicas < 4:
            raise ValueError("--replicas must be 4 or more: three of them may be away at a time")


async def soak_router(settings: RouterSoak, directory: Path, say: Callable[[str], None]) -> Result:
    """Run a soak, its logs in ``directory``; raise `BenchError` or `ChildFailedError`."""
    with ProcessGroup() as group:
        ports = iter(free_ports(3 * settings.replicas))
        replicas = [
            Replica(group, directory, number, (next(ports), next(ports), next(ports)))
            for number in range(settings.replicas)
        ]
        try:
            for each in replicas:
                each.start()
            ready = [await each.ready() for each in replicas]
            front = Front(group, directory, by_envoy=settings.by_envoy)
            await front.start(replicas, ready[0]["router_rates"])
            return await _soak(settings, replicas, front, say)
        finally:
            for each in replicas:
                each.proxy.close()
                each.proxy.end_connections()


async def _soak(
    settings: RouterSoak, replicas: list[Replica], front: Front, say: Callable[[str], None]
) -> Result:
    began_s = time.monotonic()
    ledger, watch, reloads = Ledger(), Watch(began_s=began_s), Reloads()
    reloading = reloads.run(
        front, replicas, seed=settings.seed, every_s=settings.reload_every_s, say=say
    )
    beside = [asyncio.create_task(watch.run(front.pids)), asyncio.create_task(reloading)]
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                _inject_faults(settings, replicas, front, ledger, began_s=began_s, say=say)
            )
            tasks.create_task(_clients(settings, front, ledger, began_s + settings.duration_s))
    finally:
        for each in beside:
            each.cancel()
    left, busy = await _left(front, replicas)
    for ended in await asyncio.gather(*beside, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended
    logs = [front.log, *(log for each in replicas for log in each.logs)]
    refused = front.log.read_text(errors="replace").count(_REFUSED)
    effects = sum((each.proxy.effects for each in replicas), Counter({FULL: front.times_full}))
    verdicts = [
        *of_requests(ledger),
        *of_faults(ledger, effects),
        *of_processes(watch.samples, settings.settling_s),
        *of_the_end(left, busy),
        none_of("no traceback in a log", bad_lines(logs, allowed=_REFUSED)),
        *of_reloads(reloads.sent, reloads.seen, reloads.bad, refused),
    ]
    return _result(settings, verdicts, ledger, watch, reloads, effects=effects)


async def _inject_faults(
    settings: RouterSoak,
    replicas: Sequence[Replica],
    front: Front,
    ledger: Ledger,
    *,
    began_s: float,
    say: Callable[[str], None],
) -> None:
    """Inject one fault after the other: only a poison request hits two replicas at a time."""
    faults = replica_faults(
        seed=settings.seed,
        duration_s=settings.duration_s,
        replicas=settings.replicas,
        every_s=settings.fault_every_s,
    )
    async for fault in due(faults, began_s, say):
        match fault.kind:
            case ReplicaFault.POISON:
                await _poison(replicas, front, ledger)
            case ReplicaFault.NO_FILES:
                await _no_files(replicas, front, ledger, fault.lasts_s)
            case _:
                replica = replicas[fault.target]
                if fault.kind in OF_PROXY and replica not in front.replicas:
                    replica = front.replicas[0]
                    say(
                        f"its replica gets no requests: {replica.instance_id} has the fault instead"
                    )
                with ledger.fault(replica.number, fault.kind):
                    async with replica.faulty(fault.kind):
                        await asyncio.sleep(fault.lasts_s)
                if fault.kind is ReplicaFault.FLAP:
                    await _serves_again(front, replica, ledger)
        await asyncio.sleep(_RECOVERS_S)
        # On a busy machine it takes longer until replicas that were started again get requests.
        for each in front.replicas:
            await _may_serve(front, each)


async def _poison(replicas: Sequence[Replica], front: Front, ledger: Ledger) -> None:
    with ledger.fault(None, ReplicaFault.POISON) as period:
        for each in replicas:
            each.killed = period.replicas
        number = len(ledger.poisoned) + 1
        ledger.poisoned.append(await send_poison(front.url, number, period.replicas))
        killed = [replicas[number] for number in period.replicas]
        for each in killed:
            each.start()
        for each in killed:
            await each.ready()


async def _no_files(
    replicas: Sequence[Replica], front: Front, ledger: Ledger, lasts_s: float
) -> None:
    since = front.log.stat().st_size
    with ledger.fault(None, ReplicaFault.NO_FILES), ExitStack() as closing:
        for each in replicas:
            closing.enter_context(each.proxy.closing())
        async with front.no_files():
            await asyncio.sleep(lasts_s)
    ledger.called_down += front.called_down(since)


async def _serves_again(front: Front, replica: Replica, ledger: Ledger) -> None:
    """Wait until the router may send requests to a replica; note one to which it does not."""
    if not await _may_serve(front, replica):
        ledger.put_out.append(replica.instance_id)


async def _may_serve(front: Front, replica: Replica) -> bool:
    """Wait for some time until the router may send requests to a replica; return whether it may."""
    until_s = time.monotonic() + _SERVES_AGAIN_S
    while not await front.serves(replica):
        if time.monotonic() > until_s:
            return False
        await asyncio.sleep(_POLL_S)
    return True


async def _clients(settings: RouterSoak, front: Front, ledger: Ledger, until_s: float) -> None:
    answers = Answers()
    async with client_session() as session, asyncio.TaskGroup() as tasks:
        for number in range(settings.clients):
            client = Client(
                url=front.url,
                conversations=Conversations(client=number, seed=settings.seed),
                answers=answers,
                ledger=ledger,
                until_s=until_s,
                session=session,
                by_envoy=settings.by_envoy,
            )
            tasks.create_task(client.run())


async def _left(front: Front, replicas: list[Replica]) -> tuple[dict[str, float], list[str]]:
    """Return the router's counts and the busy replicas, when all is quiet or should be."""
    until_s = time.monotonic() + _QUIET_S
    while True:
        waiting = await front.metric("warmroute_table_entries", table="waiting")
        left = {**await front.metric("warmroute_in_flight"), **waiting}
        busy = [each.instance_id for each in replicas if not await each.is_idle()]
        is_quiet = not busy and not any(left.values())
        if is_quiet or time.monotonic() > until_s:
            return left, busy
        await asyncio.sleep(_POLL_S)


# --- Verdicts ---


def of_requests(ledger: Ledger) -> list[Verdict]:
    """Return the verdicts on how requests have ended."""
    wanted = {
        "no request lost that could be retried": Outcome.LOST,
        "no wrong byte": Outcome.WRONG,
        "no answer cut without reason": Outcome.UNEXPLAINED,
        "no request held whose body never comes": Outcome.HELD,
    }
    found = {what: ledger.total(outcome) for what, outcome in wanted.items()}
    return [
        *(Verdict(what=what, holds=not count, found=str(count)) for what, count in found.items()),
        at_least_one("answers that came whole", ledger.total(Outcome.WHOLE)),
        at_least_one("faults of replicas", len(ledger.faults)),
    ]


def of_faults(ledger: Ledger, effects: Mapping[str, int]) -> list[Verdict]:
    """Return the verdicts on what faults must lead to, and what not.

    ``effects`` says how often each of `_EFFECTS` was seen.
    """
    kinds = {each.kind for each in ledger.faults}
    many = [each for each in ledger.poisoned if len(each.killed) > _MOST_KILLED]
    unclear = [each for each in ledger.poisoned if each.status not in (502, 503) or not each.text]
    expected = [effect for kind in kinds for effect in _EFFECTS.get(kind, ())]
    found = {**effects, _KILLED: sum(len(each.killed) for each in ledger.poisoned)}
    return [
        none_of("a poison request kills two replicas at most", [*map(str, many)]),
        none_of("each poison request gets a clear error", [*map(str, unclear)]),
        none_of("a replica with flapping connections serves soon again", ledger.put_out),
        none_of("no replica called down by a router without files", ledger.called_down),
        *(at_least_one(effect, found.get(effect, 0)) for effect in expected),
    ]


def of_the_end(in_flight: Mapping[str, float], busy: Sequence[str]) -> list[Verdict]:
    """Return the verdicts on what is left when all clients have gone."""
    left = {name: count for name, count in in_flight.items() if count}
    return [
        Verdict(what="in-flight counts zero at the end", holds=not left, found=str(left or 0)),
        none_of("no replica computes for a client that has gone", busy),
    ]


def of_reloads(sent: int, seen: int, bad: int, refused: int) -> list[Verdict]:
    """Return whether each new configuration was used, and each invalid one refused."""
    return [
        Verdict(what="configurations used", holds=seen == sent, found=f"{seen} of {sent}"),
        Verdict(what="invalid ones refused", holds=refused == bad, found=f"{refused} of {bad}"),
    ]


def _result(
    settings: RouterSoak,
    verdicts: list[Verdict],
    ledger: Ledger,
    watch: Watch,
    reloads: Reloads,
    *,
    effects: Mapping[str, int],
) -> Result:
    cpu_s = {**watch.cpu_s, "clients": time.process_time()}
    counts = sorted(ledger.counts.items())
    report: dict[str, Any] = {
        "what": "faulty replicas, odd clients, reloads: what is lost, wrong or grows",
        "minutes": settings.minutes,
        "replicas": settings.replicas,
        "clients": settings.clients,
        "seed": settings.seed,
        "through": "envoy" if settings.by_envoy else "router",
        "faults": Counter(each.kind.value for each in ledger.faults),
        "effects": effects,
        "poisoned": [
            {"killed": [*each.killed], "status": each.status, "text": each.text}
            for each in ledger.poisoned
        ],
        "reloads": reloads.sent,
        "requests": [
            {
                "manner": manner.value,
                "streamed": streamed,
                "outcome": outcome.value,
                "count": count,
            }
            for (manner, streamed, outcome), count in counts
        ],
        "bad": ledger.bad,
        "cpu_s": {name: round(seconds, 1) for name, seconds in cpu_s.items()},
        "processes": {name: samples_json(each) for name, each in watch.samples.items()},
    }
    lines = [
        *(
            f"{count:>7} {manner}, {'streamed' if streamed else 'whole'}: {outcome}"
            for (manner, streamed, outcome), count in counts
        ),
        *(f"CPU of {name}: {seconds:.0f} s" for name, seconds in cpu_s.items()),
        *ledger.bad,
    ]
    return Result(verdicts=verdicts, report=report, lines=lines)
