"""Which weights a request's KV is of, from adapters and in-place updates."""

import os
import threading
from pathlib import Path

import pytest

from cacheengine.identity import kv_versions
from cacheengine.identity.kv_versions import (
    UNCACHED,
    KvVersion,
    KvVersions,
    LoraAdapter,
    WeightFiles,
)
from tests.cacheengine.helpers import wait_until
from warmroute_common.keys import HashScheme, key64

KEY = bytes(range(32))

pytestmark = pytest.mark.usefixtures("patient_with_files")


def adapter(path: Path, load_id: int = 1, content: str = "1") -> LoraAdapter:
    """Write an adapter's files."""
    path.mkdir(exist_ok=True)
    (path / "adapter_model.safetensors").write_text(content)
    return LoraAdapter("name", str(path), load_id)


class Gpu:
    """vLLM's own cache, which can be emptied while no request uses it."""

    def __init__(self, versions: KvVersions) -> None:
        self.in_use = False
        self.emptied = 0
        versions.empty_gpu = self._empty

    def _empty(self) -> bool:
        self.emptied += not self.in_use
        return not self.in_use


def test_the_weights_of_the_start_keep_vllms_keys() -> None:
    assert KvVersions().of_request(None) == KvVersion()
    assert KvVersion().stored_key(KEY) == KEY


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash"])
def test_other_weights_have_other_keys_and_routers_know_them(algorithm: str) -> None:
    key = HashScheme(algorithm).root
    versions = [
        KvVersion(),
        KvVersion("e"),
        KvVersion("f"),
        KvVersion("", "e"),
        KvVersion("e", "f"),
    ]
    stored = [version.stored_key(key) for version in versions]
    assert len(set(stored)) == len(versions)
    assert {len(each) for each in stored} == {len(key)}
    assert {key64(each) for each in stored} == {key64(key)}


def test_each_update_begins_an_epoch_of_this_replica_alone() -> None:
    first, second = KvVersions(), KvVersions()
    for versions in (first, second):
        versions.weights_changed()
    once = first.of_request(None)
    first.weights_changed()
    epochs = {once.epoch, second.epoch, first.epoch, ""}
    assert len(epochs) == 4
    assert first.of_request(None).epoch == first.epoch


def test_requests_from_before_an_update_store_nothing_after_it() -> None:
    versions = KvVersions()
    before = versions.of_request(None)
    assert versions.is_current(before, None)
    versions.weights_changed()
    assert not versions.is_current(before, None)
    assert versions.is_current(versions.of_request(None), None)


def test_while_vllm_keeps_old_kv_nothing_is_cached() -> None:
    versions = KvVersions()
    gpu = Gpu(versions)
    gpu.in_use = True
    versions.weights_changed()
    assert versions.of_request(None) == UNCACHED
    gpu.in_use = False
    later = versions.of_request(None)
    assert later == KvVersion(versions.epoch)
    assert versions.is_current(later, None)
    assert not versions.is_current(UNCACHED, None), "what it computes began with old KV"
    assert gpu.emptied == 1


def test_adapters_are_their_files(tmp_path: Path) -> None:
    one = KvVersions().of_request(adapter(tmp_path / "a"))
    assert one == KvVersions().of_request(adapter(tmp_path / "a", load_id=7))
    assert one.adapter
    other = KvVersions().of_request(adapter(tmp_path / "a", content="2"))
    assert other.is_cached
    assert one != other


def test_an_adapter_that_changes_while_loaded_is_not_cached(tmp_path: Path) -> None:
    versions = KvVersions()
    named = adapter(tmp_path / "a")
    version = versions.of_request(named)
    adapter(tmp_path / "a", content="22")
    assert not versions.is_current(version, named)
    assert versions.of_request(named) == UNCACHED
    adapter(tmp_path / "a", content="1")
    assert versions.of_request(named) == UNCACHED, "vLLM may have read it meanwhile"
    again = adapter(tmp_path / "a", load_id=2, content="22")
    assert versions.of_request(again).is_cached, "unloaded and loaded again"


def test_an_adapter_replaced_while_vllm_keeps_kv_of_its_predecessor(tmp_path: Path) -> None:
    versions = KvVersions()
    gpu = Gpu(versions)
    versions.of_request(adapter(tmp_path / "a"))
    gpu.in_use = True
    replaced = adapter(tmp_path / "a", load_id=2, content="22")
    assert versions.of_request(replaced) == UNCACHED
    assert versions.of_request(None) == KvVersion(), "the others go on"
    gpu.in_use = False
    assert versions.of_request(replaced).is_cached


def test_an_adapter_that_changes_while_it_is_loaded_is_doubtful(tmp_path: Path) -> None:
    versions = KvVersions()
    named = adapter(tmp_path / "a")
    before = versions.adapter_states(named)
    adapter(tmp_path / "a", content="22")
    versions.adapter_loaded(named, before)
    assert versions.of_request(named) == UNCACHED
    versions.adapter_loaded(named, versions.adapter_states(named))
    assert versions.of_request(named) == UNCACHED, "vLLM has it already, and read nothing"
    versions.adapter_loaded(named, versions.adapter_states(named), in_place=True)
    assert versions.of_request(named).is_cached


def test_one_that_changed_between_its_load_and_its_first_request(tmp_path: Path) -> None:
    versions = KvVersions()
    named = adapter(tmp_path / "a")
    versions.adapter_loaded(named, versions.adapter_states(named))
    times = (tmp_path / "a" / "adapter_model.safetensors").stat()
    adapter(tmp_path / "a", content="2")
    os.utime(
        tmp_path / "a" / "adapter_model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns)
    )
    assert versions.of_request(named) == UNCACHED


def test_a_file_system_that_hangs_does_not_stop_the_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files may be what was loaded: nothing is stored or found until that is known."""
    answers = threading.Event()
    answers.set()

    def locate(path: str) -> WeightFiles:
        answers.wait()
        return WeightFiles(Path(path))

    versions = KvVersions(locate)
    named = adapter(tmp_path / "a")
    version = versions.of_request(named)
    assert versions.is_current(version, named) and version.is_cached
    answers.clear()
    with monkeypatch.context() as hasty:
        hasty.setattr(kv_versions, "_PATIENCE_S", 0.05)
        assert versions.of_request(named) == UNCACHED
    assert not versions.is_current(version, named)
    answers.set()
    wait_until(lambda: versions.is_current(version, named))
    assert versions.of_request(named) == version
    versions.close()


def test_an_adapter_whose_files_are_nowhere_is_not_cached(tmp_path: Path) -> None:
    named = LoraAdapter("name", str(tmp_path / "nowhere"), 1)
    for versions in (KvVersions(), KvVersions(lambda path: None)):
        assert versions.of_request(named) == UNCACHED
        assert versions.of_name((named.name, named.path)) == UNCACHED


def test_agents_know_an_adapter_before_and_after_it_is_loaded(tmp_path: Path) -> None:
    versions = KvVersions()
    named = adapter(tmp_path / "a")
    told = versions.of_name((named.name, named.path))
    assert told == versions.of_request(named)
    assert told == versions.of_name((named.name, named.path))
    versions.weights_changed()
    assert versions.of_name(None) == versions.of_request(None)
