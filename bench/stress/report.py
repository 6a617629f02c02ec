"""A stress's result, for people and as JSON."""

from typing import Any, Final

from bench.soak.watch import Sample
from bench.stress.inside.lock import Durations
from bench.stress.run import Stressed
from bench.stress.settings import CHUNK_BYTES, SMALL_DISK_BYTES, STORE_BYTES, Settings
from bench.stress.verdict import Locks

_SHARES: Final = {"p50_us": 0.5, "p99_us": 0.99, "p99.9_us": 0.999}
_SHOWN_CALLS: Final = 20
_SHOWN_SAMPLES: Final = 24


def table(done: Stressed) -> str:
    """Return verdicts, the calls that held a lock longest, and the agents' answers as lines."""
    lines = [
        f"{'holds' if each.holds else 'FAILS':<6} {each.what}: {each.found}"
        for each in done.verdicts
    ]
    lines += [
        f"{each['longest_ms']:>8.2f} ms, of them {each['of_it_cpu_ms']:.2f} computed, longest hold "
        f"by {each['call']}; {each['over_1_ms']} over 1 ms"
        for each in _calls(done.locks)
    ]
    lines += [
        f"{life.name}: CPU {sum(life.watch.cpu_s.values()):.0f} s, own memory in MiB by minutes: "
        + ", ".join(f"{each['minute']}: {each['own_mib']}" for each in _samples(life.samples))
        for life in done.lives
    ]
    lines += [f"{done.counts[name]}" for name in ("counts", "transfer")]
    lines += [f"{count:>7} {what}: {end}" for (what, end), count in sorted(done.answers.items())]
    return "\n".join([*lines, *done.wrong])


def report(settings: Settings, done: Stressed) -> dict[str, Any]:
    """Return all that a stress has shown, ready for JSON."""
    return {
        "what": "engines, their disks and their store in trouble: wrong bytes, leaks, long holds",
        "minutes": settings.minutes,
        "engines": settings.engines,
        "seed": settings.seed,
        "slots": settings.slots,
        "disk_chunks": settings.disk_chunks,
        "chunk_bytes": CHUNK_BYTES,
        "store_bytes": STORE_BYTES,
        "small_disk_bytes": SMALL_DISK_BYTES,
        "requests_per_s": settings.requests_per_s,
        "controls_per_s": settings.controls_per_s,
        "holds": done.holds,
        "verdicts": [
            {"what": each.what, "holds": each.holds, "found": each.found} for each in done.verdicts
        ],
        "troubles": {kind.value: count for kind, count in done.troubles.items()},
        "damaged": {kind.value: count for kind, count in done.damaged.items()},
        "lock": {
            "held": _durations(done.locks.held),
            "of_it_computed": _durations(done.locks.computed),
            "waited_for_by_the_scheduler": _durations(done.locks.waited_by_main),
            "waited_for_by_others": _durations(done.locks.waited),
            "calls": _calls(done.locks),
        },
        "counts": done.counts,
        "calls_of_agents": [
            {"call": what, "ended": end, "count": count}
            for (what, end), count in sorted(done.answers.items())
        ],
        "wrong": done.wrong,
        "processes": {
            life.name: {
                "cpu_s": round(sum(life.watch.cpu_s.values()), 1),
                "samples": _samples(life.samples),
            }
            for life in done.lives
        },
    }


def _durations(durations: Durations) -> dict[str, Any]:
    quantiles = {
        name: round(durations.quantile_ns(share) / 1e3, 1) for name, share in _SHARES.items()
    }
    return {
        "count": durations.counts.total(),
        **quantiles,
        "longest_us": round(durations.longest_ns / 1e3, 1),
    }


def _calls(locks: Locks) -> list[dict[str, Any]]:
    """Return the calls that held a lock longest, the longest first."""
    longest = sorted(locks.by_call.items(), key=lambda each: -each[1].longest_ns)
    return [
        {
            "call": call,
            "over_1_ms": each.count,
            "longest_ms": round(each.longest_ns / 1e6, 3),
            "of_it_cpu_ms": round(each.cpu_ns / 1e6, 3),
        }
        for call, each in longest[:_SHOWN_CALLS]
    ]


def _samples(samples: list[Sample]) -> list[dict[str, float]]:
    every = max(1, len(samples) // _SHOWN_SAMPLES)
    return [
        {
            "minute": round(each.at_s / 60, 1),
            "rss_mib": round(each.rss_bytes / 2**20, 1),
            "own_mib": round(each.own_bytes / 2**20, 1),
            "fds": each.fds,
        }
        for each in samples[::every]
    ]
