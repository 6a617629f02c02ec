"""The pool of pinned CPU RAM, and huge pages for it.

`Pool` is numbered slots of one size over one mapping; `pages_of` and `make_huge_file` say
and make what it lies on.

Called by engine, settings and connector. Imports nothing of the engine.
"""

from cacheengine.memory.hugepages import (
    HUGE_PAGE_BYTES,
    HugePagesMissing,
    check_huge_pages,
    make_huge_file,
    pages_of,
)
from cacheengine.memory.pool import Pool

__all__ = [
    "HUGE_PAGE_BYTES",
    "HugePagesMissing",
    "Pool",
    "check_huge_pages",
    "make_huge_file",
    "pages_of",
]
