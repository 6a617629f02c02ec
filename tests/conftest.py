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

_ONE_PROCESS = (
    "tests/e2e/",
    "tests/bench/engine/",
    "tests/simulator/test_tier_events.py",
    "tests/cacheengine/connector/",
    "tests/cacheengine/test_hugepages.py",
    "tests/router/feeds/test_kv_subscriber.py",
    "tests/router/prompt/test_media_vllm.py",
    "tests/router/prompt/test_reader_vllm.py",
    "tests/router/index/test_block_hashes_vllm.py",
)
"""Files whose tests one process runs: two fleets at once would wait for each other's cores, vLLM
takes long to import, and huge pages and shared memory are counted, which are the machine's."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file's tests to one process, which starts their servers once."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # it is untyped
        # By mark, as --dist loadgroup does it, nothing is grouped under pytest 9.2
        # (pytest-xdist issue 1386).
        def _split_scope(self, nodeid: str) -> str:
            return "vllm" if nodeid.startswith(_ONE_PROCESS) else nodeid.partition("::")[0]

    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of processes that share a run, none is left with what takes long when the others end."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        slow = {each.path for each in items if each.get_closest_marker("slow")}
        items.sort(
            key=lambda each: (not each.nodeid.startswith(_ONE_PROCESS), each.path not in slow)
        )
