"""The CPU pool: contiguous memory cut into equal slots, optionally made of huge pages.

`cacheengine.residency` knows which slot holds which chunk.

The kernel reserves pages of 2 MiB separately (``vm.nr_hugepages``). Here they back a file without
a name (`memfd_create`): that needs neither root nor a mounted hugetlbfs, and the kernel takes the
pages back when the last process with the file has ended, even after a kill.
"""

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final


class Pool:
    """``num_slots`` slots of ``slot_bytes`` each over one writable, contiguous buffer.

    The caller owns the buffer, which must outlive the pool; `close` releases it.
    """

    def __init__(
        self, buffer: "memoryview | bytearray | mmap.mmap", num_slots: int, slot_bytes: int
    ) -> None:
        view = memoryview(buffer)
        if num_slots <= 0 or slot_bytes <= 0:
            raise ValueError(
                f"a pool needs at least one slot of one byte, not {num_slots} of {slot_bytes}; "
                "raise max_local_cpu_size"
            )
        if view.readonly:
            raise ValueError("the pool's buffer is read-only")
        if view.nbytes < num_slots * slot_bytes:
            raise ValueError(
                f"the pool's buffer has {view.nbytes} bytes, too few for "
                f"{num_slots} slots of {slot_bytes}"
            )
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._bytes = view.cast("B")

    @classmethod
    def allocate(cls, num_slots: int, slot_bytes: int) -> "Pool":
        """Return a pool over anonymous memory of its own (for tests and simulation)."""
        return cls(mmap.mmap(-1, num_slots * slot_bytes), num_slots, slot_bytes)

    def view(self, slot: int) -> memoryview:
        """Return the slot's bytes, writable and not copied."""
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot} of a pool of {self.num_slots}")
        start = slot * self.slot_bytes
        return self._bytes[start : start + self.slot_bytes]

    def close(self) -> None:
        """Release the buffer, so that its owner can unmap it. Idempotent."""
        self._bytes.release()


HUGE_PAGE_BYTES: Final = 2 << 20

_KERNEL_COUNTS: Final = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")


class HugePagesMissingError(Exception):
    """Too few huge pages: ``str()`` is one line with how many, and how to get them."""


@dataclass(frozen=True, kw_only=True)
class HugePages:
    """The kernel's 2 MiB pages: all, the free ones, and how many of these are reserved."""

    total: int
    free: int
    reserved: int

    @classmethod
    def counted(cls, directory: Path = _KERNEL_COUNTS) -> "HugePages | None":
        """Return the kernel's current counts; None if it has no such pages."""
        try:
            total, free, reserved = (
                int((directory / f"{name}_hugepages").read_text())
                for name in ("nr", "free", "resv")
            )
        except (OSError, ValueError):
            return None
        return cls(total=total, free=free, reserved=reserved)

    @property
    def available(self) -> int:
        """Pages that are neither used nor reserved."""
        return max(0, self.free - self.reserved)

    def why_not(self, pages: int) -> str:
        """Say why ``pages`` of them are not available, and what to do."""
        if pages <= self.available:
            return (
                f"{pages} huge pages of 2 MiB are needed and {self.available} are free, but not "
                "for this process; raise its cgroup's limit (hugetlb.2MB.max; in Kubernetes "
                "resources.limits of hugepages-2Mi)"
            )
        return (
            f"{pages} huge pages of 2 MiB are needed and {self.available} are free (of "
            f"{self.total}, {self.reserved} reserved by others); as root: "
            f"sysctl -w vm.nr_hugepages={self.total + pages - self.available}"
        )


def pages_of(size_bytes: int) -> int:
    """Return how many huge pages hold ``size_bytes``."""
    return -(-size_bytes // HUGE_PAGE_BYTES)


def check_huge_pages(size_bytes: int) -> None:
    """Raise `HugePagesMissingError` if ``size_bytes`` of huge pages are not available now."""
    os.close(_reserved_file("check", size_bytes))


def make_huge_file(name: str, size_bytes: int) -> int:
    """Return the descriptor of a nameless file of huge pages; ``name`` is shown in /proc/*/maps.

    Its size is ``size_bytes`` rounded up to whole pages. All pages are allocated, so using a
    mapping of it never fails. Raises `HugePagesMissingError`.
    """
    file = _reserved_file(name, size_bytes)
    try:
        # A reservation does not count against a cgroup's limit of pages in use: without allocated
        # pages the first access could be a SIGBUS.
        os.posix_fallocate(file, 0, pages_of(size_bytes) * HUGE_PAGE_BYTES)
    except OSError as error:
        # Closed first: the counts in the message must not include its pages.
        os.close(file)
        raise _missing(size_bytes, error) from None
    return file


def _reserved_file(name: str, size_bytes: int) -> int:
    """Return a file of huge pages, all of them reserved, or raise."""
    if not hasattr(os, "memfd_create"):
        raise HugePagesMissingError(
            "this Python cannot make huge files (os.memfd_create); use another"
        )
    try:
        file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    except OSError as error:
        raise _missing(size_bytes, error) from None
    length = pages_of(size_bytes) * HUGE_PAGE_BYTES
    try:
        os.ftruncate(file, length)
        # Mapping reserves the pages of the whole file in one step: of two replicas that want the
        # last pages, one gets all. The reservation outlives the mapping.
        mmap.mmap(file, length).close()
    except OSError as error:
        os.close(file)
        raise _missing(size_bytes, error) from None
    return file


def _missing(size_bytes: int, error: OSError) -> HugePagesMissingError:
    counts = HugePages.counted()
    if counts is None:
        return HugePagesMissingError(
            f"this kernel has no huge pages of 2 MiB ({error.strerror}); "
            "use one with CONFIG_HUGETLBFS"
        )
    return HugePagesMissingError(counts.why_not(pages_of(size_bytes)))
