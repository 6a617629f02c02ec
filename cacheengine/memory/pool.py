"""The CPU pool: one run of memory, cut into equal slots.

Which slot holds what is not known here but in `cacheengine.residency`.
"""

import mmap


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
