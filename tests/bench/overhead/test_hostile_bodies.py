"""The bench of hostile bodies."""

import asyncio
import json
import threading
import time

import pytest

from bench.overhead.cases import MODEL
from bench.overhead.hostile_bodies import KINDS, LoopTurns, main


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_is_json_of_about_its_size(kind: str) -> None:
    size = 256 << 10
    body = KINDS[kind](size)
    assert 0.9 * size < len(body) <= size
    if kind == "deep":
        assert body.count(b"[") == body.count(b"]")
    else:
        assert json.loads(body)["model"] == MODEL


async def test_turns_are_measured_in_cpu_time_and_by_the_clock() -> None:
    turns = LoopTurns()
    await asyncio.sleep(0.01)
    turns.take()
    until_s = time.thread_time() + 0.03
    while time.thread_time() < until_s:
        pass
    await asyncio.sleep(0.01)
    assert turns.take()["cpu"] >= 30
    lock = threading.Lock()
    lock.acquire()
    threading.Timer(0.05, lock.release).start()
    lock.acquire()
    await asyncio.sleep(0.01)
    found = turns.take()
    assert found["clock"] >= 45
    assert found["cpu"] < 30


def test_it_measures_a_router(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--kinds", "text", "--mib", "1", "--seconds", "1", "--per-s", "10"])
    [row] = capsys.readouterr().out.splitlines()[2:]
    assert row.startswith("| text | 1 | 400 |"), "it has more tokens than the model takes"
