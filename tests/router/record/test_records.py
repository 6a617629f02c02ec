"""The record of a request, and its readers."""

import logging
import threading
from typing import Any

import orjson
import pytest
from prometheus_client import Counter

from router.config.settings import ReplicaConfig, RequestLogConfig, RouterConfig
from router.fleet.decision import Reason
from router.fleet.fleet import Fleet
from router.index.prompt_keys import KvTier
from router.record.metrics import Metrics
from router.record.records import (
    Cause,
    FailedTry,
    Outcome,
    RequestRecord,
    answer_headers,
)
from router.record.request_log import RequestLog, json_line, text_line
from router.record.uncached import Change, ChangeKind, PromptPart, Uncached, UncachedCause
from router.staging.stager import PrefetchOutcome, StagingResult
from tests.router.fleet.helpers import candidate, decision

TWO = RouterConfig(
    replicas=tuple(ReplicaConfig(url=f"http://{id}", instance_id=id) for id in ("one", "two"))
)


def ended(**known: Any) -> RequestRecord:
    return RequestRecord(
        request_id="r", endpoint="/v1/completions", started_s=100.0, ended_s=103.0, **known
    )


def test_times_are_counted_from_the_start() -> None:
    record = ended(first_byte_s=100.5)
    assert (record.ttft_s, record.total_s) == (0.5, 3.0)
    assert ended().ttft_s is None


@pytest.mark.parametrize(
    ("known", "tpot_s"),
    [
        ({"answer_tokens": 6}, 0.5),
        ({"answer_tokens": 1}, None),
        ({"answer_tokens": None}, None),
        ({"answer_tokens": 6, "streamed": False}, None),
        ({"answer_tokens": 6, "outcome": Outcome.CUT}, None),
        ({"answer_tokens": 6, "first_byte_s": None}, None),
    ],
)
def test_time_per_output_token_counts_from_the_first_one(
    known: dict[str, Any], tpot_s: float | None
) -> None:
    whole = {"first_byte_s": 100.5, "streamed": True, "outcome": Outcome.OK}
    assert ended(**whole | known).tpot_s == tpot_s


def test_a_plain_end_is_one_line() -> None:
    line = text_line(
        ended(
            outcome=Outcome.OK,
            status=200,
            replica_id="one",
            reason="longest-match",
            prompt_tokens=10,
            matched_tokens={KvTier.GPU: 8, KvTier.CPU: 0},
            first_byte_s=100.25,
        )
    )
    assert line == (
        "/v1/completions status=200 replica=one reason=longest-match prompt_tokens=10 "
        "matched=gpu:8 ttft_ms=250 total_ms=3000 id=r"
    )


@pytest.mark.parametrize(
    "known",
    [
        {"outcome": Outcome.CUT, "error": "broke\noff"},
        {
            "outcome": Outcome.OK,
            "failed_tries": [FailedTry(replica_id="one", cause=Cause.CUT, detail="x")],
        },
    ],
)
def test_trouble_is_a_warning(caplog: pytest.LogCaptureFixture, known: dict[str, object]) -> None:
    request_log = RequestLog(RequestLogConfig())
    request_log.start()
    caplog.set_level(logging.WARNING, "warmroute.requests")
    request_log.write(ended(outcome=Outcome.OK))
    request_log.write(ended(**known))
    request_log.stop()
    (line,) = caplog.records
    assert line.levelname == "WARNING"
    assert "\n" not in line.getMessage(), "what others sent cannot forge lines"


def test_the_first_end_is_the_one() -> None:
    record = ended()
    assert record.outcome is Outcome.FAILED, "as long as none is noted"
    record.end(Outcome.CUT, error="broke off")
    record.end(Outcome.CLIENT_GONE)
    assert (record.outcome, record.error) == (Outcome.CUT, "broke off")


def test_the_headers_tell_of_the_decision() -> None:
    record = ended(held_s=0.02)
    picked = candidate("one", matched=8, prefill_s=0.5)
    record.decided(decision(picked, reason=Reason.ONLY_REPLICA))
    assert answer_headers(record) == {
        "x-request-id": "r",
        "x-warmroute-replica": "one",
        "x-warmroute-reason": "only-replica",
        "x-warmroute-prompt-tokens": "100",
        "x-warmroute-predicted-ttft-ms": "500.0",
        "x-warmroute-held-ms": "20.0",
        "x-warmroute-retries": "0",
        "x-warmroute-matched-gpu": "8",
        "x-warmroute-matched-cpu": "0",
        "x-warmroute-matched-disk": "0",
        "x-warmroute-matched-remote": "0",
    }


CHANGE = Change(
    kind=ChangeKind.BEGINNING, place="messages[0].content", at_token=16, turn=4, since_turn=2
)
UNCACHED = Uncached(
    parts=(
        PromptPart(90, UncachedCause.CHANGED, CHANGE),
        PromptPart(97, UncachedCause.NEW),
        PromptPart(100, UncachedCause.SHORT),
    ),
    prompt_tokens=100,
    cached_tokens=20,
    is_reported=True,
)


def test_why_tokens_were_computed_is_told_but_not_to_tenants() -> None:
    record = ended(uncached=UNCACHED, replica_id="one")
    assert (
        answer_headers(record)["x-warmroute-uncached"]
        == "changed=70 (messages[0].content);new=7;short=3"
    )
    assert "x-warmroute-uncached" not in answer_headers(record, is_tenant=True)
    assert "uncached=changed:70,new:7,short:3" in text_line(record)
    logged = orjson.loads(json_line(record, 0.0))["uncached"]
    assert logged["tokens"] == {"changed": 70, "new": 7, "short": 3}
    assert "in each turn since turn 2" in logged["why"][0]["words"]


async def test_why_tokens_were_computed_is_counted_for_a_bounded_number_of_models() -> None:
    metrics = Metrics(Fleet(TWO))
    answered: dict[str, Any] = {"uncached": UNCACHED, "status": 200, "first_byte_s": 101.0}
    for _ in range(2):
        metrics.observe(ended(**answered, model="m", key="team"))
    metrics.observe(ended(uncached=UNCACHED, model="no replica answers for it"))
    for number in range(200):
        metrics.observe(ended(**answered, model=f"m{number}"))
    lines = (await metrics.render()).decode().splitlines()
    name = "warmroute_uncached_tokens_total"
    assert f'{name}{{cause="changed",key="team",model="m"}} 140.0' in lines
    assert f'{name}{{cause="new",key="none",model="other"}} 966.0' in lines
    assert len([each for each in lines if each.startswith(name)]) == 65 * 3


async def test_every_end_is_counted() -> None:
    fleet = Fleet(TWO)
    fleet.up("one")
    fleet.index.max_keys = 3
    fleet.index.add(0, KvTier.GPU, range(5))
    fleet.replicas["one"].waiting, fleet.replicas["one"].decoding = 2, 1
    metrics = Metrics(fleet, lambda: {"index": 7}, kv_behind_s=lambda: 1.5)
    metrics.observe(
        ended(
            outcome=Outcome.OK,
            status=200,
            replica_id="one",
            reason="retry",
            prompt_tokens=10,
            matched_tokens={KvTier.GPU: 8},
            prepared=StagingResult(
                prefetch=PrefetchOutcome(asked=5, promoted=4, pending=1, promoted_bytes=4096),
                waited_s=0.2,
            ),
            streamed=True,
            cached_tokens=6,
            answer_tokens=5,
            first_byte_s=101.0,
            failed_tries=[
                FailedTry(replica_id="two", cause=Cause.CONNECT, detail="x"),
                FailedTry(replica_id="two", cause=Cause.LOCAL, detail="y"),
            ],
        )
    )
    metrics.observe(ended(outcome=Outcome.REFUSED, status=400))
    metrics.observe(ended(outcome=Outcome.CLIENT_GONE))
    lines = (await metrics.render()).decode().splitlines()
    for line in (
        'warmroute_failed_tries_total{cause="connect",replica="two"} 1.0',
        'warmroute_failed_tries_total{cause="local",replica="none"} 1.0',
        'warmroute_matched_tokens_total{replica="one",tier="gpu"} 8.0',
        'warmroute_cached_tokens_total{replica="one"} 6.0',
        'warmroute_ttft_seconds_sum{replica="one",streamed="true"} 1.0',
        'warmroute_tpot_seconds_sum{replica="one"} 0.5',
        'warmroute_prefetch_wait_seconds_sum{replica="one"} 0.2',
        'warmroute_prefetch_chunks_total{replica="one",result="promoted"} 4.0',
        'warmroute_prefetch_bytes_total{replica="one"} 4096.0',
        'warmroute_replica_up{replica="one",state="up"} 1.0',
        'warmroute_replica_up{replica="two",state="unknown"} 0.0',
        'warmroute_in_flight{replica="one"} 3.0',
        'warmroute_table_entries{table="index"} 7.0',
        "warmroute_index_max_keys 3.0",
        "warmroute_kv_events_behind_seconds 1.5",
        "warmroute_index_evicted_keys_total 2.0",
        'warmroute_requests_total{endpoint="/v1/completions",outcome="refused",replica="none",'
        'status="400"} 1.0',
        'warmroute_requests_total{endpoint="/v1/completions",outcome="client-gone",replica="none",'
        'status="none"} 1.0',
    ):
        assert line in lines


async def test_a_replica_that_has_left_and_comes_again_is_counted_anew() -> None:
    fleet = Fleet(TWO)
    metrics = Metrics(fleet)
    answered = ended(outcome=Outcome.OK, status=200, replica_id="one", prompt_tokens=10)
    metrics.observe(answered)
    fleet.remove("one")
    assert b'replica="one"' not in (await metrics.render())
    fleet.add(ReplicaConfig(url="http://one", instance_id="one"))
    metrics.observe(answered)
    assert b'warmroute_prompt_tokens_total{replica="one"} 10.0' in (await metrics.render())


async def test_prediction_errors_and_measured_rates_are_gauges() -> None:
    fleet = Fleet(TWO)
    known = fleet.replicas["one"]
    for observed_s in (1.0, 1.1, 2.0):
        known.errors.note(1.0, observed_s)
    known.rates.note_copy(8 * 10**9, 1.0)
    lines = (await Metrics(fleet).render()).decode().splitlines()
    found = {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if "#" not in line
    }
    told = {name: value for name, value in found.items() if "prediction" in name or "rate" in name}
    assert told == {
        'warmroute_ttft_prediction_error_ratio{quantile="0.5",replica="one"}': pytest.approx(0.1),
        'warmroute_ttft_prediction_error_ratio{quantile="0.9",replica="one"}': pytest.approx(1.0),
        'warmroute_ttft_prediction_error_ratio{quantile="0.99",replica="one"}': pytest.approx(1.0),
        'warmroute_ttft_prediction_error_seconds{quantile="0.5",replica="one"}': pytest.approx(0.1),
        'warmroute_ttft_prediction_error_seconds{quantile="0.9",replica="one"}': pytest.approx(1.0),
        'warmroute_ttft_prediction_error_seconds{quantile="0.99",replica="one"}': pytest.approx(
            1.0
        ),
        'warmroute_ttft_prediction_bias{replica="one"}': pytest.approx(1.1),
        'warmroute_measured_rate{part="peer",replica="one"}': pytest.approx(8e9),
    }


async def test_metrics_are_rendered_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """All series but the gauges are read there too; what is counted meanwhile may be in or not."""
    threads: list[bool] = []
    fleet = Fleet(TWO)
    metrics = Metrics(fleet)
    metrics.observe(ended(outcome=Outcome.OK, status=200, replica_id="one", prompt_tokens=10))
    samples = Counter._multi_samples

    def multi_samples(counter: Counter) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return samples(counter)

    monkeypatch.setattr(Counter, "_multi_samples", multi_samples)
    page = await metrics.render()
    assert threads and not any(threads)
    assert b'warmroute_prompt_tokens_total{replica="one"} 10.0' in page
    assert b'warmroute_replica_up{replica="one",state="unknown"} 0.0' in page
