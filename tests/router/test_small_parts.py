"""Bindings, where the tokenizer is looked for, and the tick."""

import asyncio
from pathlib import Path
from unittest.mock import Mock

import orjson
import pytest

from router.app import ticking
from router.config.settings import RouterConfig
from router.faults import FaultReport
from router.fleet.fleet import Fleet
from router.index.prefix_index import PrefixIndex
from router.index.prompt_keys import KvTier
from router.policy import Plane, Policy
from router.prompt.prompt_source import local_model
from router.proxy.lifecycle import ResponseOwners


def test_a_binding_is_found_until_others_crowd_it_out() -> None:
    bindings = ResponseOwners(max_entries=2)
    bindings.bind("a", "one")
    bindings.bind("b", "two")
    assert bindings.replica_of(["x", "a"]) == "one"
    bindings.bind("c", "one")
    assert bindings.replica_of(["b"]) is None, "the least recently used goes first"
    assert (bindings.replica_of(["a"]), bindings.replica_of(["c"])) == ("one", "one")
    assert bindings.replica_of([]) is None
    assert len(bindings) == 2


def test_a_model_is_found_as_a_directory_or_in_the_cache(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    nowhere = {"HF_HOME": str(tmp_path / "hf")}
    assert local_model(str(model), nowhere) is None, "a directory without a tokenizer"
    (model / "tokenizer.json").write_text("{}")
    assert local_model(str(model), nowhere) == model

    repository = tmp_path / "hf" / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").write_text("{}")
    assert local_model("org/name", nowhere) is None, "no main revision"
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc\n")
    assert local_model("org/name", nowhere) == snapshot
    assert local_model("org/name", {"HF_HUB_CACHE": str(tmp_path / "hf" / "hub")}) == snapshot


def test_a_model_that_cannot_be_looked_for_is_not_here() -> None:
    """A replica's own path may be one that this machine's user may not look into."""
    too_long = "/models/" + "x" * 5000
    assert local_model(too_long, {"HF_HOME": "/nowhere"}) is None


@pytest.mark.parametrize("where", ["header", "field"])
def test_a_session_takes_little_memory_whatever_its_name(where: str) -> None:
    def session(name: str) -> str | None:
        headers = {"x-session-id": name} if where == "header" else {}
        body = orjson.dumps({} if where == "header" else {"prompt_cache_key": name})
        policy = Policy(RouterConfig())
        return policy.parse(Plane.PROXY, "POST", "/v1/completions", headers, body).session

    long, other = session("x" * 1_000_000), session("x" * 999_999)
    assert long is not None and len(long) < 1000
    assert long == session("x" * 1_000_000)
    assert long != other
    assert session("mine") == "mine"


async def test_a_tick_that_fails_is_told_and_not_the_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.app._TICK_S", 0.0)
    again = asyncio.Event()
    fleet = Mock(Fleet, index=PrefixIndex(1))

    def tick(now_s: float) -> None:
        if fleet.tick.call_count == 1:
            raise KeyError("once")
        again.set()

    fleet.tick.side_effect = tick
    task = asyncio.create_task(ticking(fleet, Mock(FaultReport)))
    await again.wait()
    task.cancel()
    assert "once" in caplog.text


async def test_a_full_index_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.app._TICK_S", 0.0)
    again = asyncio.Event()
    fleet = Mock(Fleet, index=PrefixIndex(2))

    def tick(now_s: float) -> None:
        if fleet.tick.call_count == 2:
            assert not caplog.records
            fleet.index.add(0, KvTier.GPU, [1, 2, 3])
        elif fleet.tick.call_count == 9:
            again.set()

    fleet.tick.side_effect = tick
    task = asyncio.create_task(ticking(fleet, Mock(FaultReport)))
    await again.wait()
    task.cancel()
    assert [each.message for each in caplog.records] == [
        "the prefix index is full (2 keys): KV that replicas hold is no longer matched; "
        "raise index.max_keys"
    ]
