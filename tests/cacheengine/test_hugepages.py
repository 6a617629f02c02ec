"""2 MiB pages: counted, reserved whole or not at all, and given back."""

import errno
import logging
import mmap
import os
import re
from pathlib import Path

import pytest

from cacheengine.memory import (
    HUGE_PAGE_BYTES,
    HugePages,
    HugePagesMissingError,
    check_huge_pages,
    make_huge_file,
)
from cacheengine.settings.lmcache_file import load_engine_config
from tests.huge_pages import counts, free_huge_pages, set_free_huge_pages, set_total_huge_pages


def test_the_kernels_counts_are_read(tmp_path: Path) -> None:
    for name, number in (("nr", 9), ("free", 5), ("resv", 2)):
        (tmp_path / f"{name}_hugepages").write_text(f"{number}\n")
    found = HugePages.counted(tmp_path)
    assert found == HugePages(total=9, free=5, reserved=2)
    assert found.available == 3


def test_a_kernel_without_them_has_no_counts(tmp_path: Path) -> None:
    assert HugePages.counted(tmp_path) is None


@pytest.mark.parametrize(
    ("total", "free", "reserved", "needed_total"),
    [(0, 0, 0, 10), (4, 4, 0, 10), (12, 4, 0, 18), (12, 4, 4, 22), (12, 0, 0, 22)],
)
def test_the_number_that_would_do_is_told(
    total: int, free: int, reserved: int, needed_total: int
) -> None:
    """Pages that others use or have reserved stay theirs: only the shortfall is added."""
    why = HugePages(total=total, free=free, reserved=reserved).why_not(10)
    assert f"sysctl -w vm.nr_hugepages={needed_total}" in why
    assert "10 huge pages of 2 MiB are needed" in why


def test_free_pages_that_are_refused_are_a_limits_fault() -> None:
    why = HugePages(total=20, free=20, reserved=0).why_not(10)
    assert "hugetlb.2MB.max" in why
    assert "sysctl" not in why


def test_pages_are_had_at_once_and_given_back() -> None:
    with free_huge_pages(4):
        file = make_huge_file("a-test", 3 * HUGE_PAGE_BYTES - 5)
        assert counts().available == 1
        assert os.fstat(file).st_size == 3 * HUGE_PAGE_BYTES
        with mmap.mmap(file, 3 * HUGE_PAGE_BYTES) as memory:
            memory[-1] = 7
            assert memory[-1] == 7
        os.close(file)
        assert counts().available == 4


def test_too_few_pages_are_a_message_that_mends_it() -> None:
    with free_huge_pages(2):
        with pytest.raises(HugePagesMissingError, match=r"5 huge pages .* and 2 are free"):
            check_huge_pages(9 << 20)
        with pytest.raises(
            HugePagesMissingError, match=r"5 huge pages .* and 2 are free"
        ) as caught:
            make_huge_file("a-test", 9 << 20)
        assert counts().available == 2, "nothing is kept of a vain attempt"
        number = re.search(r"vm\.nr_hugepages=(\d+)", str(caught.value))
        assert number is not None
        set_total_huge_pages(int(number[1]))
        os.close(make_huge_file("a-test", 9 << 20))


def test_checking_keeps_nothing() -> None:
    with free_huge_pages(2):
        check_huge_pages(2 * HUGE_PAGE_BYTES)
        assert counts().available == 2
        check_huge_pages(2 * HUGE_PAGE_BYTES)


def test_pages_promised_to_another_are_not_taken() -> None:
    """A reservation is not an allocation: the other's pages still count as free."""
    with free_huge_pages(3):
        other = os.memfd_create("other", os.MFD_HUGETLB | os.MFD_HUGE_2MB)
        os.ftruncate(other, 2 * HUGE_PAGE_BYTES)
        mmap.mmap(other, 2 * HUGE_PAGE_BYTES).close()
        assert counts().free - counts().reserved == 1
        with pytest.raises(HugePagesMissingError, match="2 reserved by others"):
            make_huge_file("a-test", 2 * HUGE_PAGE_BYTES)
        os.close(other)


def test_pages_refused_after_the_promise_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a cgroup's limit does: it counts pages when they are used, not when reserved."""

    def refuse(file: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with free_huge_pages(2):
        monkeypatch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(HugePagesMissingError, match=r"hugetlb\.2MB\.max"):
            make_huge_file("a-test", HUGE_PAGE_BYTES)
        assert counts().available == 2


def test_a_kernel_that_cannot_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(HugePages, "counted", lambda: None)
    with pytest.raises(HugePagesMissingError, match="this kernel has no huge pages"):
        check_huge_pages(1)


def test_a_replica_is_warned_before_vllm_loads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "instance.yaml"
    path.write_text("max_local_cpu_size: 0.01\nlocal_cpu_use_hugepages: true\n")
    config = load_engine_config(path, {})
    with free_huge_pages(0), caplog.at_level(logging.WARNING):
        config.check_ready()
        assert "instance.yaml: local_cpu_use_hugepages: 6 huge pages" in caplog.text
        assert "sysctl -w vm.nr_hugepages=" in caplog.text
        assert "ordinary pages" in caplog.text
        caplog.clear()
        set_free_huge_pages(6)
        config.check_ready()
        assert not caplog.records
