"""How long the router's decision takes, and how much memory, by the size of the fleet.

``python -m bench.discrete.scale``: no sockets, no replicas: `router.fleet.Fleet` is given what
fleets of growing size would have told it, and is asked where prompts should go.

Every replica holds the system prompt on its GPU; each holds the documents of its own
sessions in its tiers, and every tenth document lies on several replicas. Half of the
replicas have work before them. Asked for are prompts of 16k tokens (blocks of 16, chunks
of 256): some of known documents, some new.
"""

import argparse
import gc
import random
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.command import positive, write_report
from bench.ttft import machine, percentile
from replay.requests import ModelPrompt
from router.config.cost_weights import DEFAULT_WEIGHTS
from router.config.settings import IndexConfig, ReplicaConfig, RouterConfig, SessionConfig
from router.fleet.fleet import Fleet
from router.index.prompt_keys import KeyShape, KvTier, PromptKeyCache
from router.scheduling.request_scheduler import PlacementRequest, RequestScheduler
from warmroute_common.keys import HashScheme

_BLOCK_TOKENS = 16
_BLOCKS_PER_CHUNK = 16
_SYSTEM_BLOCKS = 64
_PROMPT_BLOCKS = 1024
_WARM_UP = 50


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured at one fleet size; times in microseconds."""

    replicas: int
    sessions: int
    index_keys: int
    place_p50_us: float
    place_p99_us: float
    place_new_p50_us: float
    """Of prompts that no replica knows beyond the system prompt."""
    keys_p50_us: float
    """Of making the prompt's 64-bit keys and chunk keys, once a request; not in the others."""
    start_p50_us: float
    finish_p50_us: float
    index_bytes_per_key: float
    session_bytes: float


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        prog="bench.discrete.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--replicas",
        type=positive,
        nargs="+",
        default=[8, 64, 256, 1000],
        metavar="N",
        help="sizes of fleets (default: 8 64 256 1000)",
    )
    for name, default, text in (
        ("--sessions", 1_000_000, "sessions in the table"),
        ("--index-keys", 4_000_000, "keys in the prefix index"),
        ("--decisions", 1_000, "decisions timed"),
    ):
        parser.add_argument(
            name, type=positive, default=default, metavar="N", help=f"{text} (default: {default:,})"
        )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="JSON",
        default=Path("bench/results/scale.json"),
        help="write every figure there (default: %(default)s)",
    )
    options = parser.parse_args()
    rows = []
    for replicas in options.replicas:
        row = measure(replicas, options.sessions, options.index_keys, options.decisions)
        print_row(row)
        rows.append(row)
        gc.collect()
    write_report(options.out, {"machine": machine(), "rows": [asdict(row) for row in rows]})


def measure(replicas: int, sessions: int, index_keys: int, decisions: int) -> Row:
    """Fill a fleet of this many replicas and time its decisions."""
    chooser = random.Random(replicas)
    before_bytes = _resident_bytes()
    fleet = make_fleet(replicas, index_keys, sessions)
    documents = fill_index(fleet, index_keys, chooser)
    index_bytes = _resident_bytes() - before_bytes
    fill_sessions(fleet, sessions, replicas)
    scheduler = RequestScheduler(fleet)
    session_bytes = _resident_bytes() - before_bytes - index_bytes
    for each in list(fleet.replicas.values())[::2]:
        each.queue.join(chooser.uniform(0.1, 5.0), 0.0)
    known: list[float] = []
    new: list[float] = []
    keys: list[float] = []
    starts: list[float] = []
    finishes: list[float] = []
    gc.freeze()
    for number in range(decisions + _WARM_UP):
        is_known = number % 4 != 0
        prompt = _prompt(chooser.choice(documents) if is_known else 10**9 + number)
        began = time.perf_counter()
        keys_of_prompt = PromptKeyCache(prompt)
        keys_of_prompt.of(next(iter(fleet.replicas.values())).shape, {})
        made = time.perf_counter()
        session = f"session-{chooser.randrange(sessions):024d}"
        decision = scheduler.place(PlacementRequest(keys=keys_of_prompt, session=session), 0.0)
        placed = time.perf_counter()
        ticket = fleet.start(decision, 0.0)
        started = time.perf_counter()
        ticket.finish(0.0, ok=False)
        finished = time.perf_counter()
        if number < _WARM_UP:
            continue
        (known if is_known else new).append(placed - made)
        keys.append(made - began)
        starts.append(started - placed)
        finishes.append(finished - started)
    gc.unfreeze()
    both = known + new
    return Row(
        replicas=replicas,
        sessions=len(fleet.sessions),
        index_keys=len(fleet.index),
        place_p50_us=_us(both, 50),
        place_p99_us=_us(both, 99),
        place_new_p50_us=_us(new, 50),
        keys_p50_us=_us(keys, 50),
        start_p50_us=_us(starts, 50),
        finish_p50_us=_us(finishes, 50),
        index_bytes_per_key=index_bytes / len(fleet.index),
        session_bytes=session_bytes / sessions,
    )


def make_fleet(replicas: int, index_keys: int, sessions: int) -> Fleet:
    """Return a fleet of which nothing is known yet."""
    configs = tuple(
        ReplicaConfig(url=f"http://r{slot}:1", instance_id=f"r{slot}", agent_url="x")
        for slot in range(replicas)
    )
    fleet = Fleet(
        RouterConfig(
            replicas=configs,
            index=IndexConfig(max_keys=2 * index_keys + 100_000),
            sessions=SessionConfig(max_sessions=sessions),
        )
    )
    shape = KeyShape(
        scheme=HashScheme(), block_tokens=_BLOCK_TOKENS, blocks_per_chunk=_BLOCKS_PER_CHUNK
    )
    for name, each in fleet.replicas.items():
        fleet.up(name)
        each.shape, each.has_events, each.incarnation = shape, True, "model"
        each.transfer_port = 1
    return fleet


def fill_index(fleet: Fleet, index_keys: int, chooser: random.Random) -> list[int]:
    """Give the replicas documents until there are this many keys; return the documents."""
    slots = [each.slot for each in fleet.replicas.values()]
    system = _blocks(0)[:_SYSTEM_BLOCKS]
    for slot in slots:
        fleet.index.add(slot, KvTier.GPU, system)
    documents = []
    number = 0
    while len(fleet.index) < index_keys:
        number += 1
        documents.append(number)
        blocks = _blocks(number)[: chooser.randrange(128, _PROMPT_BLOCKS)]
        chunks = blocks[_BLOCKS_PER_CHUNK - 1 :: _BLOCKS_PER_CHUNK]
        holders = chooser.sample(slots, min(len(slots), 8 if number % 10 == 0 else 1))
        for slot in holders:
            if number % 3:
                fleet.index.add(slot, KvTier.GPU, blocks)
            fleet.index.add(slot, KvTier.CPU, chunks[: len(chunks) // 2])
            fleet.index.add(slot, KvTier.DISK, chunks)
    return documents


def fill_sessions(fleet: Fleet, sessions: int, replicas: int) -> None:
    """Give every session a home."""
    for number in range(sessions):
        fleet.sessions.note(f"session-{number:024d}", number % replicas, 0.0)


def print_row(row: Row) -> None:
    """Show one fleet size."""
    if row.replicas > DEFAULT_WEIGHTS.max_candidates:
        weighed = f"{DEFAULT_WEIGHTS.max_candidates} scored"
    else:
        weighed = "all weighed in full"
    print(
        f"{row.replicas:5d} replicas ({weighed}): decision p50 {row.place_p50_us:.0f} us, "
        f"p99 {row.place_p99_us:.0f} us (new prompts p50 {row.place_new_p50_us:.0f} us); "
        f"keys {row.keys_p50_us:.0f} us, start {row.start_p50_us:.0f} us, "
        f"finish {row.finish_p50_us:.0f} us; {row.index_bytes_per_key:.0f} bytes a key, "
        f"{row.session_bytes:.0f} a session",
        flush=True,
    )


def _prompt(document: int) -> ModelPrompt:
    """Return a prompt of the system's blocks and a document's."""
    keys = [number.to_bytes(8, "big") for number in _blocks(document)]
    return ModelPrompt(keys, len(keys), _PROMPT_BLOCKS * _BLOCK_TOKENS)


def _blocks(document: int) -> list[int]:
    first = (document << 12) + (1 << 40)
    own = [_spread(first + at) for at in range(_PROMPT_BLOCKS - _SYSTEM_BLOCKS)]
    return [_spread(at) for at in range(_SYSTEM_BLOCKS)] + own


def _spread(number: int) -> int:
    """Return a key that looks like a hash: neighbours in a prompt are none in a dictionary."""
    return (number * 0x9E3779B97F4A7C15 + 0x1234567) & (1 << 64) - 1


def _us(seconds: Sequence[float], percent: int) -> float:
    return 1e6 * percentile(seconds, percent / 100) if seconds else 0.0


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main()
