"""What prefetch before forward is worth: time to first token of prefixes that lie on disk alone.

Two real replicas and two routers, one of them without prefetch, as in
`make demo`. Every combination of: the file's pages in the page cache or
dropped; the replica idle or busy with other prompts; prefetch on or off. The
two routers take turns, so that both see the same machine.

    python -m bench.prefetch --rounds 5 --json bench/results/prefetch.json
"""

import argparse
import itertools
import json
import statistics
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import openai

from bench.demo import ANSWER_TOKENS, Round, Stage, say, start
from bench.local import CannotStart
from bench.text import real_text
from bench.tiers import NotThere, ReplicaTiers
from bench.ttft import BenchError, ask, machine
from router.processes import ChildFailed, ProcessGroup

_BUSY_REQUESTS: Final = 2
_BUSY_PROMPT_TOKENS: Final = 1500
_BUSY_ANSWER_TOKENS: Final = 64


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured answer."""

    page_cache: str
    replica_is: str
    prefetch: str
    ttft_s: float
    headers: dict[str, str]


def measure(stage: Stage, arguments: argparse.Namespace) -> Iterator[Sample]:
    """Yield samples of every combination, ``--rounds`` of each."""
    text = Round(stage, tokens=arguments.tokens, seed=arguments.seed)
    holder = text.compute()
    yield from (
        _sample(stage, text, holder, page_cache, load, prefetch)
        for _, load, page_cache, prefetch in itertools.product(
            range(arguments.rounds), ("idle", "busy"), ("kept", "dropped"), ("on", "off")
        )
    )


def _sample(
    stage: Stage, text: Round, holder: ReplicaTiers, page_cache: str, load: str, prefetch: str
) -> Sample:
    url = stage.router_url if prefetch == "on" else stage.plain_router_url
    text.leave_on_disk(holder, url, drop_page_cache=page_cache == "dropped")
    if load == "busy":
        with _busy(stage, holder):
            answer = _ask(stage, text, url)
    else:
        answer = _ask(stage, text, url)
    return Sample(
        page_cache=page_cache,
        replica_is=load,
        prefetch=prefetch,
        ttft_s=answer.ttft_s,
        headers={k: v for k, v in answer.headers.items() if k.startswith("x-warmroute-")},
    )
