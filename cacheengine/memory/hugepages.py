"""Memory in pages of 2 MiB: whether there is enough of it, and having some.

The kernel keeps such pages apart (``vm.nr_hugepages``). They are had here as a
file without a name (`memfd_create`): that needs neither root nor a mounted
hugetlbfs, and the kernel takes the pages back with the file's last user,
however that one ends.
"""

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HUGE_PAGE_BYTES: Final = 2 << 20

_KERNEL_COUNTS: Final = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")


class HugePagesMissing(Exception):  # noqa: N818  (the state of the machine)
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
    """Raise `HugePagesMissing` when so many bytes of huge pages are not to be had now."""
    os.close(_reserved_file("check", size_bytes))


def make_huge_file(name: str, size_bytes: int) -> int:
    """Return the descriptor of a nameless file of huge pages; ``name`` is for /proc/*/maps.

    Its size is ``size_bytes`` rounded up to whole pages. All pages are there
    already: using a mapping of it never fails. Raises `HugePagesMissing`.
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
        raise HugePagesMissing("this Python cannot make huge files (os.memfd_create); use another")
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


def _missing(size_bytes: int, error: OSError) -> HugePagesMissing:
    counts = HugePages.counted()
    if counts is None:
        return HugePagesMissing(
            f"this kernel has no huge pages of 2 MiB ({error.strerror}); "
            "use one with CONFIG_HUGETLBFS"
        )
    return HugePagesMissing(counts.why_not(pages_of(size_bytes)))
