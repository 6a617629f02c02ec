"""The CPU pool, one run of memory cut into equal slots, and huge pages to make it of.

Which slot holds what is not known here but in `cacheengine.residency`.

The kernel keeps pages of 2 MiB apart (``vm.nr_hugepages``). They are had here as a
file without a name (`memfd_create`): that needs neither root nor a mounted
hugetlbfs, and the kernel takes the pages back with the file's last user,
however that one ends.

Called by engine, settings, connector and simulator. Imports nothing of the engine.
"""

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final


class Pool:
    """``num_slots`` slots of ``slot_bytes`` each over one writable, contiguous buffer.

    The buffer is its maker's and must outlive the pool; `close`
    lets go of it.
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
        """Make a pool over anonymous memory of its own (for tests and simulation)."""
        return cls(mmap.mmap(-1, num_slots * slot_bytes), num_slots, slot_bytes)

    def view(self, slot: int) -> memoryview:
        """Return the slot's bytes, writable and not copied."""
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot} of a pool of {self.num_slots}")
        start = slot * self.slot_bytes
        return self._bytes[start : start + self.slot_bytes]

    def close(self) -> None:
        """Let go of the buffer, so that its owner can unmap it. Idempotent."""
        self._bytes.release()


HUGE_PAGE_BYTES: Final = 2 << 20

_KERNEL_COUNTS: Final = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")


class HugePagesMissingError(Exception):
    """Too few huge pages here: ``str()`` is one line with how many, and how to have them."""


@dataclass(frozen=True, kw_only=True)
class HugePages:
    """The kernel's 2 MiB pages: how many there are, are free, and of these are promised."""

    total: int
    free: int
    reserved: int

    @classmethod
    def counted(cls, directory: Path = _KERNEL_COUNTS) -> "HugePages | None":
        """Return the kernel's counts of now; None where it has no such pages."""
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
        """Pages that are neither taken nor promised."""
        return max(0, self.free - self.reserved)

    def why_not(self, pages: int) -> str:
        """Say why ``pages`` of them could not be had, and what to do."""
        if pages <= self.available:
            return (
                f"{pages} huge pages of 2 MiB are needed and {self.available} are free, but not "
                "for this process; raise its cgroup's limit (hugetlb.2MB.max; in Kubernetes "
                "resources.limits of hugepages-2Mi)"
            )
        return (
            f"{pages} huge pages of 2 MiB are needed and {self.available} are free (of "
            f"{self.total}, {self.reserved} promised to others); as root: "
            f"sysctl -w vm.nr_hugepages={self.total + pages - self.available}"
        )


def pages_of(size_bytes: int) -> int:
    """Return how many huge pages hold so many bytes."""
    return -(-size_bytes // HUGE_PAGE_BYTES)


def check_huge_pages(size_bytes: int) -> None:
    """Raise `HugePagesMissingError` when so many bytes of huge pages are not to be had now."""
    os.close(_reserved_file("check", size_bytes))


def make_huge_file(name: str, size_bytes: int) -> int:
    """Return the descriptor of a nameless file of huge pages; ``name`` is for /proc/*/maps.

    Its size is ``size_bytes`` rounded up to whole pages. All pages are there
    already: using a mapping of it never fails. Raises `HugePagesMissingError`.
    """
    file = _reserved_file(name, size_bytes)
    try:
        # The reservation does not count against a cgroup's limit of pages in
        # use; without the pages themselves the first touch could be a SIGBUS.
        os.posix_fallocate(file, 0, pages_of(size_bytes) * HUGE_PAGE_BYTES)
    except OSError as error:
        # Given back first: the numbers in the message are to be without them.
        os.close(file)
        raise _missing(size_bytes, error) from None
    return file


def _reserved_file(name: str, size_bytes: int) -> int:
    """Return a huge file whose pages are promised to it, all or none."""
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
        # Mapping is what reserves, at once for the whole file: of two replicas
        # that want the last pages one gets them all. It outlives the mapping.
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
