"""What all tests share, and how processes share the tests (pytest-xdist)."""

import faulthandler
import functools
import os
import re
from collections import deque
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from cacheengine.launch import vllm_launch

# Examples are judged by what they show, not by how long a busy machine takes for them.
_UNTIMED = hypothesis.settings(
    deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.register_profile("no-deadline", _UNTIMED)
# For tests/fuzz, with --hypothesis-profile=long: minutes for each port.
hypothesis.settings.register_profile("long", _UNTIMED, max_examples=2000)
hypothesis.settings.load_profile("no-deadline")

_GROUPS = {
    # One vLLM at a time, on one core, in ordinary memory: it may run while a fleet does.
    "identity": ("tests/e2e/test_identity.py",),
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
"""Files whose tests one process runs, by the group's name; the first that fits counts."""


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
        # The groups first: the fleets take about as long as the whole run.
        order = {name: at for at, name in enumerate(_GROUPS)}
        items.sort(
            key=lambda each: (
                order.get(_group(each.nodeid) or "", len(order)),
                each.path not in slow,
            )
        )


_STACKS = Path(".pytest_cache/stacks")
"""Where each process of a shared run (pytest-xdist) writes its stacks when it dies. pytest-xdist
itself names the test that ran, and nothing else."""


def pytest_configure() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        for old in _STACKS.glob("*"):
            old.unlink()


_TEST_PORTS = range(10_000, 20_000)
"""Neither the kernel nor ``warmroute replica`` chooses one of these."""


def _choose_ports_apart(number: int, of: int) -> None:
    """Have `free_ports` give each of ``of`` processes other ports, and none twice.

    Some are taken long after they were chosen: those of vLLM's engine 20 s later.
    """
    size = len(_TEST_PORTS) // of
    own = _TEST_PORTS[number * size : (number + 1) * size]
    given: deque[int] = deque(maxlen=size // 2)
    choose = vllm_launch.free_ports

    @functools.wraps(choose)
    def free_ports(count: int, *, in_a_row: int = 1, besides: Collection[int] = ()) -> list[int]:
        firsts = choose(count, in_a_row=in_a_row, besides={*given, *besides})
        given.extend(port for first in firsts for port in range(first, first + in_a_row))
        return firsts

    patch = pytest.MonkeyPatch()
    patch.setattr(vllm_launch, "_PORTS", own)
    patch.setattr(vllm_launch, "free_ports", free_ports)


# Now, before any module takes the function from there by its name.
_PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_choose_ports_apart(int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % _PROCESSES, _PROCESSES)


@pytest.fixture(scope="session", autouse=True)
def stacks_of_a_crash() -> Iterator[int | None]:
    """Let this process write its threads' stacks to a file when it crashes."""
    if (worker := os.environ.get("PYTEST_XDIST_WORKER")) is None:
        yield None
        return
    _STACKS.mkdir(parents=True, exist_ok=True)
    with (_STACKS / f"{worker}-{os.getpid()}").open("w") as file:
        # pytest's own handler writes to a standard error that scrolls away.
        faulthandler.enable(file)
        yield file.fileno()


@pytest.fixture(autouse=True)
def stacks_of_a_hang(
    stacks_of_a_crash: int | None, request: pytest.FixtureRequest
) -> Iterator[None]:
    """Write them too before pytest-timeout ends the process, at the test's own limit."""
    if stacks_of_a_crash is None:
        yield
        return
    own = request.node.get_closest_marker("timeout")
    limit_s = float(request.config.getini("timeout") if own is None else own.args[0])
    faulthandler.dump_traceback_later(limit_s - 5.0, file=stacks_of_a_crash)
    yield
    faulthandler.cancel_dump_traceback_later()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the stacks of processes that died, without the frames that run the tests."""
    runners = re.compile(r"/site-packages/(_pytest|pluggy|xdist|execnet)/|File \"<string>\"")
    for file in sorted(_STACKS.glob("*")):
        lines = [line for line in file.read_text().splitlines() if not runners.search(line)]
        if lines:
            terminalreporter.section(f"stacks of {file.name}")
            terminalreporter.write_line("\n".join(lines))
