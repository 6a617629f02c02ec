"""How far one replica holds a prompt, in which tiers.

Pure. Keys are those of the prompt's blocks; a chunk has the key of its last block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, count, islice, takewhile
from typing import Final

from router.residency.tiers import Tier

LOWER_TIERS: Final = (Tier.CPU, Tier.DISK, Tier.REMOTE)
"""The tiers of chunks, fastest first."""


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """Consecutive chunks whose fastest tier is the same: indices start to stop - 1."""

    tier: Tier
    start: int
    stop: int


@dataclass(slots=True)  # not frozen: many are made for each decision
class Match:
    """How far a replica holds a prompt without a gap.

    The first ``gpu_blocks`` blocks are on the GPU; ``runs`` go on from the
    chunk that holds their end.
    """

    gpu_blocks: int = 0
    runs: tuple[ChunkRun, ...] = ()

    def tokens(self, block_tokens: int, blocks_per_chunk: int) -> dict[Tier, int]:
        """Return the matched tokens by tier; tiers that hold none are left out."""
        matched = {Tier.GPU: self.gpu_blocks * block_tokens} if self.gpu_blocks else {}
        chunk_tokens = block_tokens * blocks_per_chunk
        end = self.gpu_blocks * block_tokens
        for run in self.runs:
            stop = run.stop * chunk_tokens
            matched[run.tier] = matched.get(run.tier, 0) + stop - end
            end = stop
        return matched

    def blocks(self, blocks_per_chunk: int) -> int:
        """Return how many blocks are matched in any tier."""
        return self.runs[-1].stop * blocks_per_chunk if self.runs else self.gpu_blocks


def _run(held: Mapping[int, object], keys: Sequence[int], start: int) -> int:
    """Return how many keys from ``start`` on are held without a gap."""
    return len(list(takewhile(held.__contains__, islice(keys, start, None))))


def joint_run(
    gpu: Mapping[int, object], believed: Mapping[int, object], keys: Sequence[int]
) -> int:
    """Return how many leading keys are known or believed to be on the GPU."""
    end = 0
    while True:
        found = _run(gpu, keys, end) if gpu else 0
        if believed:
            found += _run(believed, keys, end + found)
        if not found:
            return end
        end += found


def chunk_runs(
    lower: Sequence[tuple[Tier, Mapping[int, object]]], chunks: Sequence[int], start: int
) -> tuple[ChunkRun, ...]:
    """Return the runs of held chunks from ``start`` on, each in its fastest tier.

    ``lower`` are the tiers, fastest first.
    """
    runs: list[ChunkRun] = []
    at = start
    while at < len(chunks):
        for rank, (tier, held) in enumerate(lower):  # noqa: B007  (used below)
            if found := _run(held, chunks, at):
                break
        else:
            break
        for _, faster in lower[:rank]:
            # The run ends where a faster tier has the chunk, too.
            in_faster = map(faster.__contains__, chunks[at : at + found])
            found = next(compress(count(), in_faster), found)
        runs.append(ChunkRun(tier, at, at + found))
        at += found
    return tuple(runs)
