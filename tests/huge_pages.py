"""Real huge pages for tests, as many as they ask for, on machines where root may set their number.

The number is the whole machine's: nothing else may use huge pages meanwhile, so that all
tests that do belong to one process (`tests/conftest.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cacheengine.memory import HugePages

_NUMBER = Path("/proc/sys/vm/nr_hugepages")


@contextmanager
def free_huge_pages(count: int) -> Iterator[None]:
    """Have ``count`` free huge pages, and afterwards as many as before; else skip the test."""
    before = counts()
    try:
        set_free_huge_pages(count)
        yield
    finally:
        set_total_huge_pages(before.total)


def set_free_huge_pages(count: int) -> None:
    """Change the machine's number of huge pages so that ``count`` are free; skip if impossible."""
    now = counts()
    set_total_huge_pages(now.total + count - now.available)
    if counts().available != count:
        pytest.skip(f"this machine cannot have {count} free huge pages now: {counts()}")


def set_total_huge_pages(number: int) -> None:
    """Set ``vm.nr_hugepages``; skip the test where that is not allowed."""
    if counts().total == number:
        return
    try:
        _NUMBER.write_text(str(number))
    except OSError as error:
        pytest.skip(f"vm.nr_hugepages cannot be set here ({error.strerror}): run as root")


def counts() -> HugePages:
    """Return the kernel's counts of now; skip the test where it has no huge pages."""
    found = HugePages.counted()
    if found is None:
        pytest.skip("this kernel has no huge pages of 2 MiB")
    return found
