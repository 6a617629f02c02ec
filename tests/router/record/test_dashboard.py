"""The Grafana dashboard and the alerts: what they ask for is what a router tells."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from router.index.prompt_keys import KvTier
from router.record.records import Cause, FailedTry, Outcome, RequestRecord
from router.staging.stager import CopyOutcome, PrefetchOutcome, StagingResult
from tests.router.conftest import Fleet
from tests.router.scripted import chat_events, stream

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
RUNBOOK = ROOT / "docs" / "runbook.md"
ADDED_BY_PROMETHEUS = {"instance", "job"}
COLUMNS = 24


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((CONFIGS / "grafana" / "warmroute.json").read_text())
    return loaded


def panels() -> list[dict[str, Any]]:
    return [each for each in dashboard()["panels"] if each["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    loaded = yaml.safe_load((CONFIGS / "prometheus" / "alerts.yaml").read_text())
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def autoscaler() -> dict[str, Any]:
    """Return the KEDA object in the documentation."""
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    begin = page.index("apiVersion: keda.sh")
    loaded: dict[str, Any] = yaml.safe_load(page[begin : page.index("```", begin)])
    return loaded


def expressions() -> Iterator[str]:
    yield from (each["metadata"]["query"] for each in autoscaler()["spec"]["triggers"])
    for panel in panels():
        yield from (each["expr"] for each in panel["targets"])
    yield from (each["expr"] for each in rules())


def parsed(expression: str) -> Any:
    """Return the expression's tree; raises where it is not PromQL."""
    return promql.parse(expression.replace("$__rate_interval", "5m"))


def selectors(node: Any) -> Iterator[Any]:
    """Yield the vector selectors in an expression."""
    if isinstance(node, promql.VectorSelector):
        yield node
    for name in ("vector_selector", "expr", "lhs", "rhs", "param"):
        if (inner := getattr(node, name, None)) is not None:
            yield from selectors(inner)
    for each in getattr(node, "args", None) or []:
        yield from selectors(each)


def everything() -> RequestRecord:
    """Return a record that touches each metric that needs more than one plain request."""
    return RequestRecord(
        request_id="r",
        endpoint="/v1/completions",
        started_s=100.0,
        ended_s=103.0,
        outcome=Outcome.OK,
        status=200,
        replica_id="one",
        reason="retry",
        rejected="full",
        held_s=1.0,
        prompt_tokens=10,
        cached_tokens=8,
        matched_tokens={KvTier.GPU: 8},
        prepared=StagingResult(
            prefetch=PrefetchOutcome(asked=5, promoted=4, pending=1, promoted_bytes=4096),
            copy=CopyOutcome(asked=2, source_id="two", arrived=2, moved_bytes=9),
            waited_s=0.2,
        ),
        failed_tries=[FailedTry(replica_id="two", cause=Cause.CONNECT, detail="x")],
    )


async def told(fleet: Fleet, client: aiohttp.ClientSession) -> dict[str, set[str]]:
    """Return what a router's ``/metrics`` has after traffic: names with their labels."""
    router = await fleet.router()
    fleet.one.will(stream(*chat_events("a", "b")))
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    async with client.post(f"{router.url}/v1/chat/completions", json=body) as response:
        assert response.status == 200
        await response.read()
    await router.record()
    counted = router.parts.api.counted
    counted.observe(everything())
    errors = router.parts.fleet.replicas["one"].errors
    for observed_s in (1.0, 1.1):
        errors.note(1.0, observed_s)
    async with client.get(f"{router.url}/metrics") as response:
        text = await response.text()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


LABELS_WITHOUT_SAMPLES = {
    # Counted where keys are configured, and LMCache is there.
    "warmroute_access_refused_total": {"key", "cause"},
    "warmroute_uncached_tokens_total": {"model", "key", "cause"},
    "warmroute_lmcache_total": {"what"},
    "warmroute_measured_rate": {"replica", "part"},
    # Of servers that are vLLM's.
    "warmroute_tokens_exact": {"model"},
    "warmroute_kv_events_known": {"replica"},
}


async def test_every_metric_that_is_asked_for_is_told(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    known = await told(fleet, client)
    for name, labels in LABELS_WITHOUT_SAMPLES.items():
        known.setdefault(name, set()).update(labels)
    asked = set()
    for expression in expressions():
        for each in selectors(parsed(expression)):
            assert each.name in known, f"{each.name} in {expression}"
            labels = {matcher.name for matcher in each.matchers.matchers}
            assert labels <= known[each.name] | ADDED_BY_PROMETHEUS, expression
            asked.add(each.name)
    assert len(asked) > 20, "the expressions were read"
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            metric = variable["query"]["query"].removeprefix("label_values(").split("{")[0]
            assert metric.split(",")[0] in known


async def test_those_without_samples_are_told_where_there_are_some(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    """Their families stand in every answer, so that their names are right at least."""
    router = await fleet.router()
    async with client.get(f"{router.url}/metrics") as response:
        families = text_string_to_metric_families(await response.text())
        types = {each.name: each.type for each in families}
    for name in LABELS_WITHOUT_SAMPLES:
        assert name.removesuffix("_total") in types


@pytest.mark.parametrize("kind", ["by", "legend"])
def test_labels_that_are_summed_by_and_shown_are_kept(kind: str) -> None:
    """A legend that names a label which the sum has dropped would be empty."""
    for panel in panels():
        for target in panel["targets"]:
            legend = {part.split("}}")[0] for part in target["legendFormat"].split("{{")[1:]}
            tree = parsed(target["expr"])
            while not isinstance(tree, promql.AggregateExpr) and _inner(tree) is not None:
                tree = _inner(tree)
            if isinstance(tree, promql.AggregateExpr):
                kept = set(tree.modifier.labels) if tree.modifier else set()
                shown = legend if kind == "legend" else kept - {"le"} - legend
                assert (shown <= kept) if kind == "legend" else not shown, panel["title"]


def _inner(node: Any) -> Any:
    if isinstance(node, promql.BinaryExpr):
        return node.lhs
    if isinstance(node, promql.Call):
        return node.args[-1]
    return getattr(node, "expr", None)


def test_the_dashboard_is_one_that_grafana_loads() -> None:
    """Its parts have what Grafana's own exports have, and do not lie on each other."""
    board = dashboard()
    assert (board["uid"], board["id"], board["schemaVersion"]) == ("warmroute", None, 39)
    every = board["panels"]
    assert len({each["id"] for each in every}) == len(every)
    taken: set[tuple[int, int]] = set()
    for panel in every:
        pos = panel["gridPos"]
        assert pos["x"] >= 0 and pos["x"] + pos["w"] <= COLUMNS, panel["title"]
        cells = {
            (x, y)
            for x in range(pos["x"], pos["x"] + pos["w"])
            for y in range(pos["y"], pos["y"] + pos["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in panels():
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        refs = [each["refId"] for each in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0
        assert panel["type"] in ("timeseries", "stat", "heatmap")
    names = [each["name"] for each in board["templating"]["list"]]
    assert names == ["datasource", "instance", "replica"]


def test_every_alert_says_what_to_do() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"].keys() == {"summary", "description", "runbook"}
        parsed(rule["expr"])


def test_every_alert_has_its_entry_in_the_runbook() -> None:
    """In the same order, and the page has no others."""
    headings = re.findall("^## (.*)$", RUNBOOK.read_text(), flags=re.MULTILINE)
    assert headings == [rule["alert"] for rule in rules()]
    for rule in rules():
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert CONFIGS.parent / page == RUNBOOK
        assert anchor == rule["alert"].lower()
