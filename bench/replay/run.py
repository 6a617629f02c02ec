"""One contender against one workload, on a fleet of its own that starts empty."""

import asyncio
import gc
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson
import uvloop

from bench.processes import session_usage
from bench.record import Record, add_truth
from bench.replay.bound import REPLICA, no_queue
from bench.replay.cases import Case, Work, machine_of
from bench.replay.client import Client, Prompts, Telling, always, ask_oracle, client_session
from bench.replay.contenders.contender import CannotRunError, Contender, Running, start
from bench.replay.figures import Figures, figures
from bench.replay.fleet import Fleet, FleetOptions, running_fleet
from bench.replay.report import Costly
from bench.workloads.session import Session, prompt_tokens
from bench.workloads.texts import Texts


@dataclass(frozen=True, kw_only=True)
class Run:
    """What became of one contender."""

    figures: Figures
    records: Sequence[Record] = ()


@dataclass(kw_only=True)
class CaseResult:
    """All contenders in one case."""

    case: Case
    work: Work
    runs: dict[str, Run] = field(default_factory=dict)
    costly: list[Costly] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return it without the records."""
        return {
            "case": asdict(self.case),
            "requests": self.work.requests,
            "requests_not_reported": self.work.not_reported,
            "prompt_tokens": prompt_tokens(self.work.sessions),
            "offered": self.work.summary(),
            "contenders": [asdict(each.figures) for each in self.runs.values()],
            "costliest": [asdict(each) for each in self.costly],
        }


def run_contender(
    contender: Contender, work: Work, options: FleetOptions, logs: Path | None
) -> Run:
    """Start fleet and contender, send the workload, end both; raise `BenchError` for the fleet.

    A contender that cannot be run is told of in its figures.
    """
    with tempfile.TemporaryDirectory() as made:
        directory = logs or Path(made)
        with running_fleet(options, directory) as (group, fleet):
            try:
                running = start(contender, group, fleet, directory)
            except CannotRunError as error:
                return Run(figures=Figures(contender=contender.name, why_not=str(error)))
            before_s = _cpu_s(running.pid)
            replay = _replay(contender, running, work.sessions, fleet)
            sent, truth = uvloop.run(replay)
            cpu_s = None if before_s is None else (_cpu_s(running.pid) or before_s) - before_s
    records = work.measured(sent)
    return Run(
        figures=figures(
            contender.name,
            records,
            replicas=options.replicas,
            fleet_tokens_per_s=options.fleet_tokens_per_s,
            router_cpu_s=cpu_s,
            truth=truth,
        ),
        records=records,
    )


def run_bound(work: Work, options: FleetOptions) -> Run:
    """Return what one replica with an infinite cache and no queue would do."""
    machine = machine_of(options)
    records = work.measured(no_queue(work.sessions, machine.rates, machine.shape))
    found = figures(REPLICA, records, replicas=1, fleet_tokens_per_s=options.fleet_tokens_per_s)
    return Run(figures=found, records=records)


async def _replay(
    contender: Contender, running: Running, sessions: Sequence[Session], fleet: Fleet
) -> tuple[list[Record], list[dict[str, Any]]]:
    """Send the workload; return the records with the fleet's truth, and that of each replica."""
    async with client_session(fleet.speed) as http:
        choose = always(running.url) if running.url else ask_oracle(http, fleet.control_url)
        prompts = Prompts(
            texts=Texts(fleet.options.seed),
            model=fleet.model,
            sends_token_ids=contender.sends_token_ids,
            needs_token_ids=running.url is None,
        )
        client = Client(
            http, prompts, choose, speed=fleet.speed, telling=_telling(contender, running)
        )
        with _without_garbage_collection():
            records = await client.run(sessions)
        # The fleet writes its log when a request is over there, a moment after the client.
        await asyncio.sleep(0.2)
        truth, log = [
            orjson.loads(await (await http.get(f"{fleet.control_url}/{name}")).read())
            for name in ("truth", "requests")
        ]
    add_truth(records, log)
    return records, truth


def _telling(contender: Contender, running: Running) -> Telling:
    path = contender.finish_path
    url = None if path is None or running.url is None else running.url + path
    return Telling(header=contender.session_header, finish_url=url)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Keep the client from stopping to look for cycles: up to 0.1 s, taken for a router's."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _cpu_s(pid: int | None) -> float | None:
    """Return the CPU seconds of a contender, which leads a session; None without a process."""
    return None if pid is None else session_usage(pid).cpu_s
