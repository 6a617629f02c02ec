"""The request log: lines of real requests, and lines that cannot be written."""

import asyncio
import io
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.config.loading import router_config
from router.config.settings import RequestLogConfig
from router.index.prompt_keys import KvTier
from router.record.records import Cause, FailedTry, Outcome, RequestRecord
from router.record.request_log import FIELDS, RequestLog, json_line
from router.staging.stager import CopyOutcome, PrefetchOutcome, StagingResult
from tests.router.conftest import Fleet
from tests.router.scripted import CHAT_ANSWER, json_answer
from warmroute_common.config_reader import ConfigError

SECRET = "the prompt's own words"


def ended(**known: Any) -> RequestRecord:
    times = {"started_s": 100.0, "ended_s": 103.0}
    return RequestRecord(**{"request_id": "r", "endpoint": "/v1/completions", **times, **known})


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_request_is_one_object_and_has_no_word_of_its_prompt(
    fleet: Fleet, client: aiohttp.ClientSession, tmp_path: Path
) -> None:
    path = tmp_path / "requests.jsonl"
    router = await fleet.router(request_log=RequestLogConfig(format="json", path=str(path)))
    fleet.one.will(json_answer(CHAT_ANSWER))
    body = {"model": "m", "messages": [{"role": "user", "content": SECRET}]}
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"X-Request-Id": "mine", "traceparent": trace}
    async with client.post(f"{router.url}/v1/chat/completions", json=body, headers=headers) as sent:
        assert sent.status == 200
    async with client.post(f"{router.url}/v1/chat/completions", data=SECRET) as refused:
        assert refused.status == 400
    await router.record(2)
    await router.runner.cleanup()
    text = path.read_text()
    assert SECRET not in text and "own words" not in text
    first, second = written(path)
    assert list(first) == list(second) == ["time", *FIELDS]
    told = {
        "request_id": "mine",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "method": "POST",
        "path": "/v1/chat/completions",
        "model": "m",
        "priority": "normal",
        "status": 200,
        "outcome": "ok",
        "replica": "one",
        "reason": "round-robin",
        "cached_tokens": 8,
        "output_tokens": 1,
        "failed_tries": [],
        "streamed": False,
    }
    assert first | told == first
    assert first["total_s"] >= first["ttft_s"] > 0 and first["time"].endswith("Z")
    assert (second["status"], second["outcome"], second["replica"]) == (400, "refused", None)


def test_every_field_of_a_record_that_went_through_all() -> None:
    record = ended(
        outcome=Outcome.CUT,
        error="broke\noff",
        matched_tokens={KvTier.DISK: 64},
        prepared=StagingResult(
            prefetch=PrefetchOutcome(asked=5, promoted=4, pending=1, promoted_bytes=4096),
            copy=CopyOutcome(asked=2, source_id="two", arrived=2, moved_bytes=9),
            waited_s=0.2,
        ),
        failed_tries=[FailedTry(replica_id="two", cause=Cause.CONNECT, detail="x" * 5000)],
    )
    line = json_line(record, 0.0)
    assert "\n" not in line
    told = json.loads(line)
    assert told["time"] == "1970-01-01T00:00:00.000Z"
    assert told["prefetch"]["result"] == "late" and told["prefetch"]["promoted_bytes"] == 4096
    assert told["copy"] == {
        "result": "in-time",
        "from": "two",
        "asked_chunks": 2,
        "arrived_chunks": 2,
        "moved_bytes": 9,
        "error": None,
    }
    assert told["matched_tokens"] == {"gpu": 0, "cpu": 0, "disk": 64, "remote": 0}
    (tried,) = told["failed_tries"]
    assert (tried["replica"], tried["cause"], len(tried["detail"])) == ("two", "connect", 1000)
    assert (told["staged_s"], told["total_s"], told["error"]) == (0.2, 3.0, "broke\noff")


def test_bytes_that_are_no_text_are_written_all_the_same(tmp_path: Path) -> None:
    for form in ("json", "text"):
        path = tmp_path / form
        request_log = RequestLog(RequestLogConfig(format=form, path=str(path)))
        request_log.start()
        request_log.write(ended(request_id="\udcff", model="\udcff", error="\udcff"))
        request_log.stop()
        assert (path.read_text().count("\n"), request_log.dropped) == (1, 0)


async def test_a_file_that_was_moved_away_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    request_log = RequestLog(RequestLogConfig(path=str(path)))
    request_log.start()
    request_log.write(ended())
    await _until_written(path)
    path.rename(tmp_path / "log.1")
    request_log.write(ended())
    request_log.stop()
    assert path.read_text().count("id=r") == (tmp_path / "log.1").read_text().count("id=r") == 1


async def _until_written(path: Path) -> None:
    async with asyncio.timeout(20):
        while not path.read_text():  # noqa: ASYNC110  (another thread writes)
            await asyncio.sleep(0.005)


def test_what_cannot_be_written_as_fast_is_dropped_and_counted(tmp_path: Path) -> None:
    """A pipe that nobody reads blocks the thread that writes, and no one else."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    request_log = RequestLog(RequestLogConfig(format="json", path=str(path)), most_waiting=10)
    request_log.start()
    many = 5_000  # some 500 bytes each: a pipe takes 64 KiB
    for _ in range(many):
        request_log.write(ended())
    assert request_log.dropped > 0
    read = bytearray()
    ending = threading.Thread(target=request_log.stop)
    ending.start()
    os.set_blocking(reader, True)
    while chunk := os.read(reader, 1 << 16):
        read += chunk
    ending.join()
    os.close(reader)
    assert read.count(b"\n") + request_log.dropped == many


def test_writing_that_fails_is_counted_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    request_log = RequestLog(RequestLogConfig(format="json"))
    request_log.start()
    for _ in range(3):
        request_log.write(ended())
    request_log.stop()
    assert request_log.dropped == 3
    (said,) = [each.getMessage() for each in caplog.records]
    assert said == "the request log cannot be written: [Errno 28] No space left on device"


def test_json_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    request_log = RequestLog(RequestLogConfig(format="json"))
    request_log.start()
    request_log.write(ended())
    request_log.stop()
    assert json.loads(capsys.readouterr().out)["request_id"] == "r"


def test_a_file_that_cannot_be_is_an_error_at_the_start(tmp_path: Path) -> None:
    def settings(path: str) -> Any:
        replicas = [{"url": "http://127.0.0.1:1"}]
        given = {"replicas": replicas, "request_log": {"path": path}}
        return router_config(given, path="router.yaml", base=tmp_path)

    assert settings("log").request_log.path == str(tmp_path / "log")
    assert settings("-").request_log.path == "-"
    with pytest.raises(
        ConfigError, match=r"request_log.path: the directory .*/nowhere does not exist;"
    ):
        settings("nowhere/log")
    with pytest.raises(ConfigError, match="is a directory; name a file in it"):
        settings(".")
    taken = RequestLog(RequestLogConfig(path=str(tmp_path)))
    with pytest.raises(ConfigError, match="cannot be written"):
        taken.start()


async def test_dropped_lines_are_a_metric(fleet: Fleet, client: aiohttp.ClientSession) -> None:
    router = await fleet.router()
    async with client.get(f"{router.url}/metrics") as response:
        assert 'warmroute_records_dropped_total{where="request_log"} 0.0' in await response.text()
