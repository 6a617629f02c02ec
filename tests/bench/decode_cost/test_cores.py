"""Threads on their cores, by the kernel's word."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from bench.decode_cost.cores import parted

CORES = os.sched_getaffinity(0)


@pytest.fixture
def child() -> Iterator[int]:
    """Another process, that computes."""
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


@pytest.mark.skipif(len(CORES) < 2, reason="one core cannot be parted")
def test_a_main_thread_has_a_core_of_its_own_for_the_length_of_the_block(child: int) -> None:
    with pytest.raises(RuntimeError), parted(child):
        model, others = os.sched_getaffinity(child), os.sched_getaffinity(0)
        assert len(model) == 1
        assert model | others == CORES
        assert not model & others
        raise RuntimeError
    assert os.sched_getaffinity(child) == os.sched_getaffinity(0) == CORES
