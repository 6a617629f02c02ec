"""The replica without a model that other tests use: its end."""

from pathlib import Path

from tests.cacheengine.conftest import MakeBench
from tests.cacheengine.helpers import config, keys
from tests.cacheengine.whole_replica import WholeReplica


def test_it_can_end_while_chunks_are_on_their_way_from_disk(
    make_bench: MakeBench, tmp_path: Path
) -> None:
    bench = make_bench(32, config(tmp_path))
    chunks = keys(*range(20))
    bench.store(chunks)
    bench.finish_puts()
    bench.engine.clear(["cpu"])
    whole = WholeReplica("one", bench)
    bench.engine.promote(chunks, pin_s=10.0)
    whole.stop()
