"""What tests here share."""

from tests.cacheengine.whole_replica import WholeReplica
from warmroute_common.keys import HashScheme, chunk_keys

TOKENS = list(range(256 * 20 + 100))


PREFIX = chunk_keys(HashScheme("sha256", "seed").chain(TOKENS, 16), 16)


class Replica(WholeReplica):
    """One that says how much of the prefix it holds."""

    def holds(self, tier: str = "cpu") -> int:
        return self.bench.engine.held_in(PREFIX, tier)
