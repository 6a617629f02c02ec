"""Prometheus metrics: a reader of `RequestRecord`, and gauges read when scraped."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple
from types import MappingProxyType
from typing import Any, Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from router.fleet.breaker import Circuit
from router.fleet.fleet import Fleet
from router.fleet.replica import ReplicaState
from router.fleet.scaling import Scaling
from router.record.records import Cause, RequestRecord
from router.record.usage_totals import UsageTotals
from router.staging.stager import StagingResult

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS_S: Final = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
_TPOT_BUCKETS_S: Final = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_OVERHEAD_BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_QUANTILES: Final = ("0.5", "0.9", "0.99")
_NO_REPLICA: Final = "none"
_REMOVED: Final = "removed"
"""The replica of a request that ended after its replica had left the fleet."""
_NO_KEY: Final = "none"
_NO_MODEL: Final = "none"
_NO_PRIORITY: Final = "none"

_COUNTERS: Final = {
    "requests": ("Requests by how they ended", ["endpoint", "replica", "status", "outcome"]),
    "decisions": ("Why a replica was chosen", ["reason"]),
    "failed_tries": ("Tries at a replica that another had to make good", ["replica", "cause"]),
    "prompt_tokens": ("Tokens in prompts", ["replica"]),
    "matched_tokens": (
        "Prompt tokens that the router believed to be cached, by tier",
        ["replica", "tier"],
    ),
    "cached_tokens": ("Prompt tokens that replicas said were cached", ["replica"]),
    "uncached_tokens": (
        "Prompt tokens that were computed, by why they were not cached: new, short (less than a "
        "block), changed (by the client), evicted, elsewhere (held by another replica), declined",
        ["model", "key", "cause"],
    ),
    "response_bytes": ("Bytes of bodies passed on to clients", ["replica"]),
    "admission_rejected": (
        "Requests answered with 429, by why and by their class",
        ["cause", "priority"],
    ),
    "prefetch_chunks": (
        "Chunks asked for before forwarding, by what became of them in time",
        ["replica", "result"],
    ),
    "prefetch_bytes": ("Bytes promoted before forwarding", ["replica"]),
    # Results are those of `router.staging.stager.StagingTiming`: in-time, late, failed.
    "prefetches": (
        "Prefetches that requests waited for, by how they ended (in-time, late, failed); "
        "impossible: the replica takes none, and reads its slow tiers when it gets to the request",
        ["replica", "result"],
    ),
    "copies": ("Copies of other replicas' KV, by how they ended", ["replica", "result"]),
    "remote_prefills": (
        "Prompts that a replica was to prefill for another one, by how that ended (done, failed)",
        ["replica", "result"],
    ),
    "copy_bytes": ("Bytes copied from other replicas before forwarding", ["replica"]),
}
"""What each tells, and its labels."""

_HISTOGRAMS: Final = {
    "ttft_seconds": (
        "From accepting a request to its first byte (not streamed: to the headers)",
        ["replica", "streamed"],
        _TTFT_BUCKETS_S,
    ),
    "tpot_seconds": (
        "Time per output token after the first one, of streamed answers (without `usage`: per "
        "event)",
        ["replica"],
        _TPOT_BUCKETS_S,
    ),
    "request_seconds": ("From accepting a request to its end", ["replica"], _TTFT_BUCKETS_S),
    "read_prompt_seconds": ("Template and tokens", [], _OVERHEAD_BUCKETS_S),
    "place_seconds": ("Keys, match and costs", [], _OVERHEAD_BUCKETS_S),
    "admission_wait_seconds": (
        "How long requests were held until a replica could soon begin with them, by class",
        ["priority"],
        _TTFT_BUCKETS_S,
    ),
    "retry_wait_seconds": (
        "How long requests that were tried again waited between their tries",
        [],
        _TTFT_BUCKETS_S,
    ),
    "remote_prefill_seconds": (
        "How long a replica took to prefill a prompt for another one",
        ["replica"],
        _TTFT_BUCKETS_S,
    ),
    "prefetch_wait_seconds": (
        "How long requests were held back for their prefetch or copy",
        ["replica"],
        _OVERHEAD_BUCKETS_S,
    ),
}

_GAUGES: Final = {
    "replica_up": ("1 if requests may go there", ["replica", "state"]),
    "breaker_closed": (
        "1 while a replica's circuit breaker is closed; 0 while it is open (requests go there only "
        "if no other replica can answer) or half open (they do one at a time)",
        ["replica", "state"],
    ),
    "in_flight": ("Requests under way at a replica", ["replica"]),
    "ttft_prediction_error_ratio": (
        "How far TTFTs were from the prediction, as a part of it (0.1: 10%), "
        "over the replica's last 256 streamed answers",
        ["replica", "quantile"],
    ),
    "ttft_prediction_error_seconds": (
        "How far TTFTs were from the prediction, in seconds, over the same answers",
        ["replica", "quantile"],
    ),
    "ttft_prediction_bias": (
        "Median of observed / predicted TTFT: above 1 they come later than predicted",
        ["replica"],
    ),
    "measured_rate": (
        "What a replica measured that it does per second: tokens (prefill), bytes (load, disk, "
        "remote, peer), tokens x context tokens (attention), tokens x decodes (decode), tokens of "
        "one answer (output)",
        ["replica", "part"],
    ),
    "tokens_exact": (
        "1 if a model's prompts are matched by exact tokens, the router's own or those that "
        "replicas tell; 0 if its tokenizer is missing, or its tokens differ from a replica's or "
        "are not confirmed",
        ["model"],
    ),
    "kv_events_known": (
        "1 while a replica's KV events tell what its GPU holds; 0 if they do not come, are not "
        "understood, or are of one data-parallel rank of several. None if it publishes none",
        ["replica"],
    ),
    "answers_without_kv_event": (
        "Answered prompts with new blocks since a replica's last KV event of blocks",
        ["replica"],
    ),
    "table_entries": ("Entries in the router's bounded tables", ["table"]),
    "index_max_keys": ("Entries that the prefix index may have", []),
    "scaling_demand_replicas": (
        "Load of a model, in replicas that it would keep busy without a pause, by resource: "
        "prefill (time), kv_memory, decode (answers at once)",
        ["model", "resource"],
    ),
    "scaling_replicas": ("Replicas of a model that are up", ["model"]),
    "scaling_without_replica": (
        "Requests that wait since no replica of their model is up",
        ["model"],
    ),
    "scaling_predicted_wait_seconds": (
        "How long the next request for a model would wait; +Inf if no replica is up",
        ["model"],
    ),
    "scaling_utilization": (
        "Utilization of what binds a model's replicas, with one replica fewer (-1), as many as are "
        "up (+0) and one more (+1)",
        ["model", "change"],
    ),
    "scaling_usual_wait_seconds": (
        "Predicted mean wait at the replicas under the present load, with as many replicas; +Inf "
        "if work comes faster than it is done",
        ["model", "change"],
    ),
    "kv_events_behind_seconds": (
        "For how long the router has not caught up with its replicas' KV events; 0 if it has",
        [],
    ),
}


_LMCACHE: Final = (
    "Event batches of LMCache's servers: applied, duplicates, stale, unknown (from a server that "
    "has not registered), malformed; gaps between batches; servers_lost (ended), silent (no "
    "heartbeats); chunks missing that were to be prefetched; prefetches not_ready (no vLLM has "
    "registered); servers asked what they hold of a prompt; keys evicted from the full directory. "
    "Of LMCache inside vLLM: "
    "worker_applied (chunks that came or went), "
    "worker_late (told before), messages worker_unknown (not registered), worker_malformed, "
    "worker_refused; worker_gaps between them, worker_synced (full syncs done), worker_silent"
)

_RELOADS: Final = (
    "How often the configuration was read again: applied, or refused since it could not be used"
)
_OPENINGS: Final = "How often a replica's circuit breaker has opened, since its requests failed"

_REFUSED: Final = (
    "Requests that their key was refused for: key (none that is known), expired, admin (not the "
    "administration's), model (may not be asked), requests, tokens (used up for the moment), "
    "budget (used up for the day), parallel (too many under way)"
)

_EVICTED: Final = (
    "Keys that the prefix index dropped because it was full: what replicas hold of them is not "
    "matched any more"
)

_DROPPED: Final = (
    "Records of requests that were not written: request_log (they came too fast, or writing "
    "failed), refusals (more than 10 in a second were not admitted)"
)


_TOLD: Final = (
    "Prompts that the router could not tokenize exactly, by what came of asking a replica: "
    "answered, remembered (from an equal prompt), refused, late, failed, not-asked (no replica "
    "could be asked). All but the first two were matched by their text"
)
_ASKED_S: Final = "How long replicas took to tell a prompt's tokens, or not to"


class AskedReplicas(Protocol):
    """What replicas were asked for tokens (`router.prompt.replica_tokenizer.ReplicaTokenizer`)."""

    asked: int
    asked_s: float

    @property
    def counts(self) -> Mapping[str, int]:
        """Questions, by how they ended."""


class _Collected(Collector):
    """Metrics as they were when they were read."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Return them."""
        return self._metrics


class Metrics(Collector):
    """All of the router's metrics, in a registry of their own."""

    def __init__(
        self,
        fleet: Fleet,
        sizes: Callable[[], dict[str, int]] = dict,
        lmcache: Mapping[str, int] = MappingProxyType({}),
        refused: Mapping[tuple[str, str], int] = MappingProxyType({}),
        reloads: Mapping[str, int] = MappingProxyType({}),
        *,
        dropped: Callable[[], dict[str, int]] = dict,
        inexact: Callable[[], Mapping[str, str | None]] = dict,
        asked: AskedReplicas | None = None,
        kv_behind_s: Callable[[], float] = float,
        scaling: Scaling | None = None,
        usage: UsageTotals | None = None,
    ) -> None:
        """``sizes`` tells how many entries each bounded table holds, by its name; ``lmcache`` is
        read at each scrape: what was counted of LMCache's servers, by a word for each. So are
        ``refused``: requests by key and what they were refused for; ``reloads``: how often
        the configuration was read again, by what came of it; ``dropped``: records of
        requests that could not be told, by where; ``inexact``: for each model why its tokens are
        not exact, or None; ``asked``: what replicas were asked for tokens; ``kv_behind_s``:
        `KvReceiver.behind_s`; ``scaling``; and ``usage``: what keys have used.
        """
        self._fleet = fleet
        self._sizes = sizes
        self._lmcache = lmcache
        self._refused = refused
        self._reloads = reloads
        self._dropped = dropped
        self._inexact = inexact
        self._asked = asked
        self._kv_behind_s = kv_behind_s
        self._scaling = scaling
        self._usage = UsageTotals() if usage is None else usage
        registry = self._registry = CollectorRegistry()
        self._rendering = asyncio.Lock()
        self._counters = {
            name: Counter(f"warmroute_{name}", text, labels, registry=registry)
            for name, (text, labels) in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(f"warmroute_{name}", text, labels, buckets=buckets, registry=registry)
            for name, (text, labels, buckets) in _HISTOGRAMS.items()
        }
        self._children: dict[tuple[str, ...], Any] = {}
        """Series by metric and labels: to find one by its labels costs more than to count."""
        self._shown = {_NO_REPLICA, _REMOVED}
        """Replicas that have series."""

    def observe(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        replica = self._label(record.replica_id)
        status = str(record.status) if record.status is not None else "none"
        self._count("requests", record.endpoint, replica, status, record.outcome)
        if not record.is_admitted:
            return
        for each in record.failed_tries:
            at_fault = None if each.cause is Cause.LOCAL else each.replica_id
            self._count("failed_tries", self._label(at_fault), each.cause)
            if each.is_prefill:
                self._count("remote_prefills", self._label(at_fault), "failed")
        if (leg := record.first_leg) is not None:
            self._count("remote_prefills", self._label(leg.replica_id), "done")
            self._time("remote_prefill_seconds", leg.seconds, self._label(leg.replica_id))
        priority = record.priority or _NO_PRIORITY
        if record.reason is not None:
            self._count("decisions", record.reason)
        if record.rejected is not None:
            self._count("admission_rejected", record.rejected, priority)
        self._count("prompt_tokens", replica, by=record.prompt_tokens)
        for tier, count in record.matched_tokens.items():
            self._count("matched_tokens", replica, tier, by=count)
        self._count("cached_tokens", replica, by=record.cached_tokens)
        if record.uncached is not None:
            model, key = self._usage.model_of(record) or _NO_MODEL, record.key or _NO_KEY
            for cause, count in record.uncached.tokens().items():
                self._count("uncached_tokens", model, key, cause, by=count)
        self._count("response_bytes", replica, by=record.response_bytes)
        self._time("read_prompt_seconds", record.read_s)
        self._time("place_seconds", record.place_s)
        self._time("admission_wait_seconds", record.held_s, priority)
        self._time("retry_wait_seconds", record.retry_wait_s)
        self._time("ttft_seconds", record.ttft_s, replica, str(record.streamed).lower())
        self._time("tpot_seconds", record.tpot_s, replica)
        self._time("request_seconds", record.total_s, replica)
        self._observe_preparation(record.prepared, replica)
        known = self._fleet.replicas.get(replica)
        if known is not None and known.reads_late(record.matched_tokens):
            self._count("prefetches", replica, "impossible")

    async def render(self) -> bytes:
        """Return the text that Prometheus scrapes, without the replicas that have left.

        The text is made in a thread: for hundreds of replicas that takes long.
        """
        async with self._rendering:
            self._forget(self._shown - {*self._fleet.replicas, _NO_REPLICA, _REMOVED})
            shown = CollectorRegistry()
            shown.register(_Collected(self.collect()))
            shown.register(self._registry)
            return await asyncio.to_thread(generate_latest, shown)

    def collect(self) -> Iterable[Metric]:
        """Return the gauges, read from the fleet at each scrape and not stored."""
        gauges = {
            name: GaugeMetricFamily(f"warmroute_{name}", text, labels=labels)
            for name, (text, labels) in _GAUGES.items()
        }

        openings = CounterMetricFamily("warmroute_breaker_openings", _OPENINGS, labels=["replica"])

        def show(name: str, value: float, *labels: str) -> None:
            gauges[name].add_metric(labels, value)

        for each in self._fleet.replicas.values():
            show("replica_up", each.state is ReplicaState.UP, each.id, each.state)
            show(
                "breaker_closed", each.breaker.state is Circuit.CLOSED, each.id, each.breaker.state
            )
            openings.add_metric([each.id], each.breaker.openings)
            show("in_flight", each.in_flight, each.id)
            fault = each.events_fault()
            if each.has_events or fault is not None:
                show("kv_events_known", fault is None, each.id)
                show("answers_without_kv_event", each.untold, each.id)
            for part, per_second in each.rates.measured().items():
                show("measured_rate", per_second, each.id, part.name.lower())
            if (errors := each.errors.figures()) is not None:
                show("ttft_prediction_bias", errors.bias, each.id)
                for unit, values in (("ratio", errors.ratio), ("seconds", errors.seconds)):
                    for quantile, value in zip(_QUANTILES, astuple(values), strict=True):
                        show(f"ttft_prediction_error_{unit}", value, each.id, quantile)
        for model, why in self._inexact().items():
            show("tokens_exact", why is None, model)
        self._show_scaling(show)
        show("index_max_keys", self._fleet.index.max_keys)
        show("kv_events_behind_seconds", self._kv_behind_s())
        evicted = CounterMetricFamily("warmroute_index_evicted_keys", _EVICTED)
        evicted.add_metric([], self._fleet.index.evicted)
        for table, count in self._sizes().items():
            show("table_entries", count, table)
        lmcache_events = CounterMetricFamily("warmroute_lmcache", _LMCACHE, labels=["what"])
        for what, count in self._lmcache.items():
            lmcache_events.add_metric([what], count)
        refused = CounterMetricFamily("warmroute_access_refused", _REFUSED, labels=["key", "cause"])
        for labels, count in self._refused.items():
            refused.add_metric(labels, count)
        reloads = CounterMetricFamily("warmroute_config_reloads", _RELOADS, labels=["result"])
        for result, count in self._reloads.items():
            reloads.add_metric([result], count)
        dropped = CounterMetricFamily("warmroute_records_dropped", _DROPPED, labels=["where"])
        for where, count in self._dropped().items():
            dropped.add_metric([where], count)
        others = (openings, evicted, lmcache_events, refused, reloads, dropped)
        return [*gauges.values(), *others, *self._usage.collect(), *self._replica_tokenizing()]

    def _show_scaling(self, show: Callable[..., None]) -> None:
        for load in () if self._scaling is None else self._scaling.loads(time.monotonic()):
            show("scaling_replicas", load.replicas, load.model)
            show("scaling_without_replica", load.without_replica, load.model)
            show("scaling_predicted_wait_seconds", load.predicted_wait_s, load.model)
            for resource, demand in load.demand.items():
                show("scaling_demand_replicas", demand, load.model, resource)
            for size in load.sizes:
                change = f"{size.replicas - load.replicas:+d}"
                show("scaling_utilization", size.utilization, load.model, change)
                show("scaling_usual_wait_seconds", size.usual_wait_s, load.model, change)

    def _replica_tokenizing(self) -> Iterable[Metric]:
        if self._asked is None:
            return
        told = CounterMetricFamily("warmroute_replica_tokenize_results", _TOLD, labels=["result"])
        for result, count in self._asked.counts.items():
            told.add_metric([result], count)
        yield told
        yield SummaryMetricFamily(
            "warmroute_replica_tokenize_seconds",
            _ASKED_S,
            count_value=self._asked.asked,
            sum_value=self._asked.asked_s,
        )

    def _label(self, replica_id: str | None) -> str:
        if replica_id is None:
            return _NO_REPLICA
        replica = self._fleet.replicas.find(replica_id)
        label = _REMOVED if replica is None or replica.is_removed else replica.id
        self._shown.add(label)
        return label

    def _forget(self, replicas: set[str]) -> None:
        """Drop the series of replicas."""
        self._shown -= replicas
        self._children.clear()
        for families in (_COUNTERS, _HISTOGRAMS):
            for name in [each for each, (_, labels, *_) in families.items() if "replica" in labels]:
                series = self._counters.get(name) or self._histograms[name]
                for replica in replicas:
                    series.remove_by_labels({"replica": replica})

    def _observe_preparation(self, prepared: StagingResult, replica: str) -> None:
        prefetch, copy = prepared.prefetch, prepared.copy
        if prefetch is not None or copy is not None:
            self._time("prefetch_wait_seconds", prepared.waited_s, replica)
        if prefetch is not None:
            self._count("prefetches", replica, prefetch.timing)
            self._count("prefetch_bytes", replica, by=prefetch.promoted_bytes)
            for result in ("promoted", "pending", "missing"):
                self._count("prefetch_chunks", replica, result, by=getattr(prefetch, result))
        if copy is not None:
            self._count("copies", replica, copy.timing)
            self._count("copy_bytes", replica, by=copy.moved_bytes)

    def _count(self, name: str, *labels: str, by: int | None = 1) -> None:
        if by is not None:
            self._child(self._counters, name, labels).inc(by)

    def _time(self, name: str, seconds: float | None, *labels: str) -> None:
        if seconds is not None:
            self._child(self._histograms, name, labels).observe(seconds)

    def _child(self, metrics: Mapping[str, Any], name: str, labels: tuple[str, ...]) -> Any:
        """Return what counts under these labels."""
        key = (name, *labels)
        if (child := self._children.get(key)) is None:
            metric = metrics[name]
            child = self._children[key] = metric.labels(*labels) if labels else metric
        return child
