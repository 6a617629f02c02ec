"""Which calls of vLLM's engine core count as changes of the weights."""

import inspect
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.slow,
    # Importing vLLM and its dependencies warns about their own deprecations.
    pytest.mark.filterwarnings("default"),
]

from cacheengine.identity.kv_versions import KvVersions, LoraAdapter  # noqa: E402


class Manager:
    """The part of the manager that is told."""

    def __init__(self) -> None:
        self.keys = self
        self.versions = KvVersions()
        self.changes = 0

    def weights_changed(self) -> None:
        self.changes += 1


class Workers:
    """vLLM's executor, of which calls to the workers are noted."""

    def __init__(self) -> None:
        self.called: list[Any] = []

    def collective_rpc(self, method: Any, *arguments: Any) -> list[int]:
        self.called.append(method)
        if method == "breaks":
            raise RuntimeError("a worker failed")
        return [1]

    def add_lora(self, lora: Any) -> bool:
        self.called.append(lora.lora_name)
        return True


class Watched:
    """An engine core's methods, watched."""

    def __init__(self) -> None:
        from vllm.v1.engine.core import EngineCore

        from cacheengine.connector.connector import WeightWatch

        manager: Any = Manager()
        self.manager = manager
        self.core: Any = EngineCore.__new__(EngineCore)
        self.core.model_executor = self.workers = Workers()
        self.before = {name: getattr(EngineCore, name) for name in ("collective_rpc", "add_lora")}
        self.watch = WeightWatch(manager)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    from vllm.v1.engine.core import EngineCore

    for name in ("collective_rpc", "add_lora", "sleep"):
        monkeypatch.setattr(EngineCore, name, getattr(EngineCore, name))
    yield Watched()


@pytest.mark.parametrize("method", ["reload_weights", "update_weights", "finish_weight_update"])
def test_a_call_that_may_change_weights_counts(watched: Watched, method: str) -> None:
    assert watched.core.collective_rpc(method, args=(1,)) == [1]
    assert watched.manager.changes == 1
    assert watched.workers.called == [method]


def test_whatever_is_not_known_counts_and_so_does_what_failed(watched: Watched) -> None:
    watched.core.collective_rpc("a_trainers_own_method")
    watched.core.collective_rpc(lambda worker: None)
    with pytest.raises(RuntimeError, match="a worker failed"):
        watched.core.collective_rpc("breaks")
    assert watched.manager.changes == 3


def test_a_look_at_the_weights_leaves_them(watched: Watched) -> None:
    watched.core.collective_rpc("compute_weight_checksums")
    assert watched.manager.changes == 0


def test_after_the_end_nobody_is_told(watched: Watched) -> None:
    watched.watch.end()
    assert watched.core.collective_rpc("reload_weights") == [1]
    assert watched.manager.changes == 0


def test_vllm_still_reads_the_arguments_types(watched: Watched) -> None:
    """It turns what comes over its socket into what the signature says."""
    for name, original in watched.before.items():
        method = getattr(type(watched.core), name)
        assert inspect.signature(method) == inspect.signature(original)


@pytest.mark.usefixtures("patient_with_files")
def test_an_adapter_counts_as_its_files_were_when_it_was_loaded(
    watched: Watched, tmp_path: Path
) -> None:
    from vllm.lora.request import LoRARequest

    (tmp_path / "adapter_config.json").write_text("{}")
    assert watched.core.add_lora(LoRARequest("name", 1, str(tmp_path)))
    (tmp_path / "adapter_config.json").write_text("{ }")
    adapter = LoraAdapter("name", str(tmp_path), 1)
    assert not watched.manager.versions.of_request(adapter).is_cached
    assert watched.core.add_lora(LoRARequest("name", 2, str(tmp_path)))
    again = LoraAdapter("name", str(tmp_path), 2)
    assert watched.manager.versions.of_request(again).is_cached
