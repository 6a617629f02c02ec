"""What all tests share, and how processes share the tests (pytest-xdist)."""

import os
from typing import Any

import hypothesis
import pytest

# Examples are judged by what they show, not by how long a busy machine takes for them.
hypothesis.settings.register_profile("no-deadline", deadline=None, print_blob=True)
# For tests/fuzz, with --hypothesis-profile=long: minutes for each port.
hypothesis.settings.register_profile("long", deadline=None, print_blob=True, max_examples=2000)
hypothesis.settings.load_profile("no-deadline")

_GROUPS = {
    # Two fleets at once would wait for each other's cores, and huge pages and shared memory are
    # the machine's: who counts them has them alone.
    "fleets": (
        "tests/e2e/",
        "tests/bench/engine/",
        "tests/cacheengine/connector/test_region.py",
        "tests/cacheengine/connector/test_topology.py",
        "tests/cacheengine/test_hugepages.py",
    ),
    # vLLM takes long to import: one process does.
    "vllm": (
        "tests/simulator/test_tier_events.py",
        "tests/cacheengine/connector/",
        "tests/router/feeds/test_kv_subscriber.py",
        "tests/router/prompt/test_media_vllm.py",
        "tests/router/prompt/test_reader_vllm.py",
        "tests/router/index/test_block_hashes_vllm.py",
    ),
}
"""Files whose tests one process runs, by the group's name."""


def _group(nodeid: str) -> str | None:
    return next((name for name, files in _GROUPS.items() if nodeid.startswith(files)), None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file's tests to one process, which starts their servers once."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # it is untyped
        # By mark, as --dist loadgroup does it, nothing is grouped under pytest 9.2
        # (pytest-xdist issue 1386).
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid) or nodeid.partition("::")[0]

    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of processes that share a run, none is left with what takes long when the others end."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        slow = {each.path for each in items if each.get_closest_marker("slow")}
        # The longest group first: it takes longer than everything else together.
        order = {name: at for at, name in enumerate(_GROUPS)}
        items.sort(
            key=lambda each: (
                order.get(_group(each.nodeid) or "", len(order)),
                each.path not in slow,
            )
        )
