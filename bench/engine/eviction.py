"""Which eviction policy keeps what is asked for again, and which chunks are to be written to disk.

Replays chunk accesses against the engine's own index of the CPU pool, with
every policy and several pool sizes. A request asks for its chunks in order:
those that are there up to the first that is not are hits (only a prefix can
be used), and then those that are not there are stored, as after a prefill.

Two workloads: a trace in the form of the Mooncake release, where one line of
JSON is one request and every number of its ``hash_ids`` is a chunk; and a
generated one in which documents that are read once pass through while
conversations, a few of them much more often than the rest, come back.

Then the beginning of each workload is replayed against CPU RAM and a disk tier, with other rules of
what is written to the disk, and disks that are too slow to write everything
(`bench.engine.write_rules`). ``--agents`` adds a workload for that, in AIPerf's session form.

    python -m bench.engine.eviction --trace conversation_trace.jsonl --json eviction.json
"""

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bench.command import positive, shown_command, write_report
from bench.engine.write_rules import (
    Request,
    TieredCase,
    TieredResult,
    WriteRule,
    agents_requests,
    measure_tiers,
)
from bench.ttft import BenchError, machine
from bench.workloads.trace import read_agents
from cacheengine.residency.eviction_policies import DEFAULT_POLICY, POLICY_NAMES
from cacheengine.residency.pool_index import EntryState, PoolIndex

_CONVERSATIONS: Final = 400
_CONVERSATION_CHUNKS: Final = 12
_SCAN_CHUNKS: Final = 40
_SCAN_SHARE: Final = 0.4
_SKEW: Final = 0.8
"""Exponent of the popularity (Zipf) of the conversations."""

_TIERS: Final = ((1000, 10_000), (3000, 30_000))
"""Chunks in CPU RAM and on disk."""
_SMALL_DISK: Final = (1000, 3000)
_WRITABLE: Final = (None, 1 / 2, 1 / 4)
"""Which part of a workload's different chunks the disk can write in its time; None: all."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One workload against one policy in a pool of one size."""

    workload: str
    policy: str
    slots: int
    accesses: int
    hits: int
    """Accesses to chunks that were there, with all that come before them in the prompt."""
    hit_rate: float
    us_per_access: float
    """Median over the rounds; with the index's own bookkeeping."""


def read_trace(path: Path) -> list[Request]:
    """Return the requests of a trace; raise `BenchError` for a file that is none."""
    requests = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    requests.append(_hash_ids(line, f"--trace: {path}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--trace: {path}: {error}") from None
    if not any(requests):
        raise BenchError(f"--trace: {path} has no request with chunks in it")
    return chunk_keys(requests)


def _hash_ids(line: str, where: str) -> list[int]:
    try:
        ids = json.loads(line)["hash_ids"]
    except (ValueError, KeyError, TypeError):
        ids = None
    if not isinstance(ids, list) or not all(type(n) is int and 0 <= n < 2**256 for n in ids):
        raise BenchError(
            f'{where}: write one object a line, with "hash_ids": [whole numbers, 256 bits at most]'
        )
    return ids


def scan_heavy(requests: int, seed: int) -> list[Request]:
    """Return conversations that come back, and documents that do not, in random order."""
    chooser = random.Random(seed)
    weights = [1 / rank**_SKEW for rank in range(1, _CONVERSATIONS + 1)]
    unread = itertools.count(_CONVERSATIONS * _CONVERSATION_CHUNKS)
    made = []
    for _ in range(requests):
        if chooser.random() < _SCAN_SHARE:
            made.append(list(itertools.islice(unread, _SCAN_CHUNKS)))
        else:
            (which,) = chooser.choices(range(_CONVERSATIONS), weights)
            first = which * _CONVERSATION_CHUNKS
            made.append(list(range(first, first + _CONVERSATION_CHUNKS)))
    return chunk_keys(made)


def chunk_keys(requests: Iterable[Sequence[int]]) -> list[Request]:
    """Return the requests with keys as long as the engine's, one object for one number."""
    known: dict[int, bytes] = {}
    return [[known.setdefault(each, each.to_bytes(32)) for each in request] for request in requests]


def replay(requests: Iterable[Request], index: PoolIndex) -> int:
    """Return the hits of all requests, one after the other, on an index that starts empty."""
    return sum(_access(index, request) for request in requests)


def _access(index: PoolIndex, request: Request) -> int:
    """Use what is there, store what is not; return how many leading chunks were there."""
    hits = sum(1 for _ in itertools.takewhile(lambda key: index.ready(key) is not None, request))
    # Backwards, as the engine does: the end of a prefix is to leave before its beginning.
    index.touch(reversed(request))
    wanted = [key for key in dict.fromkeys(request) if index.get(key) is None]
    del wanted[index.num_slots :]
    lacking = len(wanted) - index.free_slots
    victims = index.victims(lacking, set(request))
    if len(victims) < lacking:
        return hits  # a prompt about as long as the pool: not stored
    for entry in victims:
        index.remove(entry)
    entries = [index.add(key, EntryState.STORING) for key in wanted]
    for entry in reversed(entries):
        index.publish(entry, now_s=0.0)
    return hits


def measure(
    workload: str,
    requests: Sequence[Request],
    policy: str,
    slots: int,
    *,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Result:
    """Replay a workload ``rounds`` times, each from an empty pool, and time it."""
    accesses = sum(len(request) for request in requests)
    took_s = []
    hits = 0
    for _ in range(rounds):
        index = PoolIndex(slots, policy)
        began_s = clock()
        hits = replay(requests, index)
        took_s.append(clock() - began_s)
        index.check()
    return Result(
        workload=workload,
        policy=policy,
        slots=slots,
        accesses=accesses,
        hits=hits,
        hit_rate=hits / accesses,
        us_per_access=statistics.median(took_s) / accesses * 1e6,
    )


def most_hits(requests: Sequence[Request]) -> float:
    """Return the hit rate of a pool in which everything has room."""
    slots = len({key for request in requests for key in request})
    hits = replay(requests, PoolIndex(slots, "LRU"))
    return hits / sum(len(request) for request in requests)


def table(results: Sequence[Result], limits: dict[str, float]) -> str:
    """Return the hit rates and times, a block for each workload."""
    lines = []
    for workload, limit in limits.items():
        mine = [each for each in results if each.workload == workload]
        slots = sorted({each.slots for each in mine})
        lines += [
            "",
            f"{workload}: {mine[0].accesses} accesses, at most {limit:.1%} can be hits",
            f"{'chunks in the pool':<20}" + "".join(f"{each:>18}" for each in slots),
        ]
        for policy in dict.fromkeys(each.policy for each in mine):
            row = {each.slots: each for each in mine if each.policy == policy}
            cells = (f"{row[n].hit_rate:>9.2%}{row[n].us_per_access:>6.2f} us" for n in slots)
            lines.append(f"{policy:<20}" + "".join(cells))
    return "\n".join(lines)


def tiered_cases(requests: Sequence[Request]) -> list[TieredCase]:
    """Return all rules on disks of all speeds, and all policies on fast disks."""
    accesses = sum(map(len, requests))
    distinct = len({key for request in requests for key in request})
    rules = [
        TieredCase(
            slots=slots,
            disk_chunks=disk_chunks,
            rule=rule,
            writes_per_access=None if share is None else share * distinct / accesses,
        )
        for slots, disk_chunks in (_SMALL_DISK, *_TIERS)
        for share in (_WRITABLE if (slots, disk_chunks) in _TIERS else (None,))
        for rule in WriteRule
    ]
    policies = [
        TieredCase(slots=slots, disk_chunks=disk_chunks, policy=policy, disk_policy=disk_policy)
        for slots, disk_chunks in (_SMALL_DISK, *_TIERS)
        for policy, disk_policy in itertools.product(POLICY_NAMES, repeat=2)
        if (policy, disk_policy) != (DEFAULT_POLICY, DEFAULT_POLICY)
    ]
    return rules + policies


Tiered = tuple[str, TieredCase, TieredResult]
"""A workload's name, a replica, and what was measured."""


def tiers_table(results: Sequence[Tiered]) -> str:
    """Return a line for each result."""
    lines = [
        "",
        f"{'RAM/disk':<13}{'policies':<10}{'disk writes':<12}"
        f"{'hits':>7}{'written':>9}{'after restart':>15}  rule",
    ]
    last = ""
    for workload, case, result in results:
        lines += [workload] if workload != last else []
        last = workload
        rate = case.writes_per_access
        lines.append(
            f"{case.slots:>6}/{case.disk_chunks:<6}{case.policy}/{case.disk_policy:<6}"
            f"{'all' if rate is None else f'{rate:.1%}':<12}{result.hits:>7.2%}"
            f"{result.writes:>9.2%}{result.kept_by_restart:>15.1%}  {case.rule}"
        )
    return "\n".join(lines)


def report(
    command: str, results: Sequence[Result], limits: dict[str, float], tiers: Sequence[Tiered]
) -> dict[str, object]:
    """Return every figure with the command and the machine, ready for JSON."""
    return {
        "what": "hit rate of the eviction policies, and of rules of what is written to disk",
        "command": command,
        "machine": machine(),
        "most_hits": limits,
        "results": [asdict(each) for each in results],
        "tiers": [
            {"workload": name, **asdict(case), **asdict(result)} for name, case, result in tiers
        ],
    }


def run(
    arguments: argparse.Namespace,
) -> tuple[list[Result], dict[str, float], list[Tiered]]:
    """Measure all that was asked for; return it, and the hit rates that nothing can exceed."""
    workloads: dict[str, Sequence[Request]] = {}
    if arguments.trace is not None:
        workloads[f"trace {arguments.trace.name}"] = read_trace(arguments.trace)
    workloads["scan-heavy, generated"] = scan_heavy(arguments.requests, arguments.seed)
    limits = {name: most_hits(requests) for name, requests in workloads.items()}
    results = [
        measure(name, requests, policy, slots, rounds=arguments.rounds)
        for name, requests in workloads.items()
        for slots in arguments.slots
        for policy in POLICY_NAMES
    ]
    if arguments.agents is not None:
        sessions = read_agents(arguments.agents)
        workloads[f"agents {arguments.agents.name}"] = agents_requests(sessions, arguments.seed)
    tiers = []
    for name, requests in workloads.items():
        first = requests[: arguments.tier_requests]
        tiers += [(name, case, measure_tiers(first, case)) for case in tiered_cases(first)]
    return results, limits, tiers


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.engine.eviction",
        description="Compare eviction policies, and what to write to disk.",
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="requests with hash_ids")
    parser.add_argument("--agents", type=Path, metavar="FILE", help="sessions of coding agents")
    parser.add_argument(
        "--slots",
        type=positive,
        nargs="+",
        default=[1000, 3000, 10000, 30000],
        metavar="N",
        help="pool sizes in chunks (default: %(default)s)",
    )
    parser.add_argument("--requests", type=positive, default=10000, help="to generate")
    parser.add_argument(
        "--tier-requests",
        type=positive,
        default=4000,
        help="the first of each workload, to replay with a disk tier (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=positive, default=3, help="repetitions, for the times")
    parser.add_argument("--seed", type=int, default=1, help="of the generated workload")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every figure there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON; return the exit code."""
    arguments = _arguments(argv)
    try:
        results, limits, tiers = run(arguments)
    except BenchError as error:
        print(f"bench.engine.eviction: {error}", file=sys.stderr)
        return 1
    print(table(results, limits))
    print(tiers_table(tiers))
    if arguments.json:
        command = shown_command("bench.engine.eviction", sys.argv[1:] if argv is None else argv)
        write_report(arguments.json, report(command, results, limits, tiers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
