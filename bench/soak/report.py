"""A soak's result, for people and as JSON."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from bench.soak.run import Soaked
from bench.soak.settings import Settings
from bench.soak.watch import Sample

_SHOWN_EVERY_S: Final = 60.0


def table(done: Soaked) -> str:
    """Return verdicts, counts and the bad ends as lines."""
    lines = [
        f"{'holds' if each.holds else 'FAILS':<6} {each.what}: {each.found}"
        for each in done.verdicts
    ]
    lines += [
        f"{count:>7} {manner}, {'streamed' if streamed else 'whole'}: {outcome}"
        for (manner, streamed, outcome), count in sorted(done.ledger.counts.items())
    ]
    lines += [f"CPU of {name}: {cpu_s:.0f} s" for name, cpu_s in done.cpu_s.items()]
    return "\n".join([*lines, *done.ledger.bad])


def report(settings: Settings, done: Soaked) -> dict[str, Any]:
    """Return all that a soak has shown, ready for JSON."""
    ledger = done.ledger
    return {
        "what": "replicas in trouble, odd clients, reloads: what is lost, wrong or grows",
        "minutes": settings.minutes,
        "replicas": settings.replicas,
        "clients": settings.clients,
        "seed": settings.seed,
        "through": "envoy" if settings.by_envoy else "router",
        "holds": done.holds,
        "verdicts": [
            {"what": each.what, "holds": each.holds, "found": each.found} for each in done.verdicts
        ],
        "troubles": Counter(each.kind.value for each in ledger.troubles),
        "reloads": None if done.reloads is None else done.reloads.sent,
        "requests": [
            {
                "manner": manner.value,
                "streamed": streamed,
                "outcome": outcome.value,
                "count": count,
            }
            for (manner, streamed, outcome), count in sorted(ledger.counts.items())
        ],
        "bad": ledger.bad,
        "cpu_s": {name: round(cpu_s, 1) for name, cpu_s in done.cpu_s.items()},
        "processes": {
            name: [
                {
                    "minute": round(each.at_s / 60, 1),
                    "rss_mib": round(each.rss_bytes / 2**20, 1),
                    "own_mib": round(each.own_bytes / 2**20, 1),
                    "fds": each.fds,
                }
                for each in _once_a_minute(samples)
            ]
            for name, samples in done.watch.samples.items()
        },
    }


def _once_a_minute(samples: Sequence[Sample]) -> Iterator[Sample]:
    due_s = 0.0
    for each in samples:
        if each.at_s >= due_s:
            yield each
            due_s += _SHOWN_EVERY_S
