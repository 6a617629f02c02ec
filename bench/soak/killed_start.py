"""Starts of a replica that are killed: `python -m bench.soak.killed_start '{...}'`, with vLLM.

vLLM is imported once. For each line on its standard input, the name of a region and perhaps a
directory that keeps the pool, a child maps the CPU pool as a worker and the scheduler of a starting
replica do. It is killed before the pool's name is forgotten, and a line is written. The process
exits when its input closes.
"""

import os
import signal
import sys
from pathlib import Path

import orjson

from cacheengine.connector.pool_region import PoolRegion


def main() -> None:
    """Kill one start for each line of the standard input."""
    slots, chunk_bytes = orjson.loads(sys.argv[1])
    print("ready", flush=True)
    for line in sys.stdin:
        name, keep = orjson.loads(line)
        ours, theirs = os.pipe()
        child = os.fork()
        if not child:
            regions = _begin_start(name, Path(keep) if keep else None, slots, chunk_bytes)
            os.write(theirs, b"%d mapped" % len(regions))
            signal.pause()
        os.close(theirs)
        is_mapped = os.read(ours, 16)
        os.close(ours)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print("killed" if is_mapped else "not mapped", flush=True)


def _begin_start(name: str, keep: Path | None, slots: int, chunk_bytes: int) -> list[PoolRegion]:
    """Map the pool as a worker and as the scheduler, whose next step would forget the name."""
    return [
        PoolRegion(
            engine_id=name,
            num_chunks=slots,
            rank=rank,
            kv_bytes_per_chunk=chunk_bytes,
            cpu_page_size=chunk_bytes,
            keep=keep,
        )
        for rank in (0, None)
    ]


if __name__ == "__main__":
    main()
