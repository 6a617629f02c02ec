"""The keys of a prompt at each kind of replica, and how far a replica holds them.

Replicas that make their keys alike share them: a fleet of one kind computes them once per prompt.
A chunk has the key of its last block. Pure.
"""

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import compress, count, islice, takewhile
from typing import Final, Protocol

from router.index.lmcache_keys import LmcacheKeys, lmcache_key64
from warmroute_common.keys import TEXT_PIECE_CHARS, HashScheme


class KvTier(StrEnum):
    """Where KV lies, fastest first."""

    GPU = "gpu"
    CPU = "cpu"
    DISK = "disk"
    REMOTE = "remote"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyShape:
    """How a replica makes the keys of its KV."""

    scheme: HashScheme | None
    """None: its blocks' keys are not known, and LMCache's chunks stand for blocks too."""
    block_tokens: int
    blocks_per_chunk: int = 1
    """1 where there is no agent: vLLM's own offloading reports block keys."""
    hashes_per_block: int = 1
    """More where vLLM hashes fewer tokens at a time, because of other cache groups. A block has the
    key at its end."""
    lmcache: LmcacheKeys | None = None
    """How chunks have LMCache's keys; None: they have those of their last blocks."""

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        return self.block_tokens * self.blocks_per_chunk


LOWER_TIERS: Final = (KvTier.CPU, KvTier.DISK, KvTier.REMOTE)
"""The tiers of chunks, fastest first."""


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """Consecutive chunks whose fastest tier is the same: indices start to stop - 1."""

    tier: KvTier
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

    def tokens(self, block_tokens: int, blocks_per_chunk: int) -> dict[KvTier, int]:
        """Return the matched tokens by tier; tiers that hold none are left out."""
        matched = {KvTier.GPU: self.gpu_blocks * block_tokens} if self.gpu_blocks else {}
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
    lower: Sequence[tuple[KvTier, Mapping[int, object]]], chunks: Sequence[int], start: int
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


class PromptView(Protocol):
    """The parts of a prompt that placement needs (`router.prompt.Prompt`)."""

    @property
    def token_ids(self) -> Sequence[int] | None:
        """The tokens that the replica will see; None where they cannot be known."""

    @property
    def cache_salt(self) -> str | None:
        """What keeps its KV apart from other tenants'."""

    @property
    def affinity(self) -> bytes:
        """What prompts that begin alike, and may share KV, have in common."""

    def lora(self, adapters: Mapping[str, str]) -> tuple[str, str] | None:
        """Return (name, path) of the adapter that a replica which has ``adapters`` will use."""

    @property
    def text(self) -> str:
        """The prompt as text."""

    @property
    def token_count(self) -> int:
        """How many tokens it has, or an estimate."""

    def chain(
        self, scheme: HashScheme, block_tokens: int, *, lora: tuple[str, str] | None = None
    ) -> list[bytes]:
        """Return the keys of its full blocks."""

    def text_chain(self) -> list[int]:
        """Return 64-bit keys of its text, in pieces of `TEXT_PIECE_CHARS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptKeys:
    """A prompt's keys in one scheme."""

    keys: Sequence[int] = field(default=(), repr=False)
    chain: Sequence[bytes] = field(default=(), repr=False)
    """The whole digests; empty in the text scheme."""
    chunk_keys: Sequence[int] = field(default=(), repr=False)
    """Those of ``keys`` that end a chunk; LMCache's chunks have keys of their own."""
    chunk_chain: Sequence[bytes] = field(default=(), repr=False)
    """The whole digests of LMCache's chunks; empty where a chunk has its last block's."""
    token_ids: Sequence[int] = field(default=(), repr=False)
    """The tokens that name a prompt to LMCache, with ``cache_salt``; empty for other schemes."""
    cache_salt: str = field(default="", repr=False)
    lora: tuple[str, str] | None = None
    """Name and path of the adapter that makes its KV."""
    block_tokens: int = 1
    blocks_per_chunk: int = 1

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        return self.block_tokens * self.blocks_per_chunk

    def chunks(self, runs: Iterable[ChunkRun]) -> tuple[bytes, ...]:
        """Return the whole digests of the chunks in some runs."""
        step = self.blocks_per_chunk
        digests = self.chunk_chain or self.chain[step - 1 :: step]
        return tuple(digests[chunk] for run in runs for chunk in range(run.start, run.stop))


class PromptKeyCache:
    """The keys of one prompt at each kind of replica, each made once."""

    def __init__(self, prompt: PromptView | None) -> None:
        self._prompt = prompt
        self.prompt_tokens = 0 if prompt is None else prompt.token_count
        self._affinity: bytes | None = None
        self._made: dict[tuple[KeyShape, tuple[str, str] | None] | None, PromptKeys] = {}

    def of(self, shape: KeyShape | None, adapters: Mapping[str, str]) -> PromptKeys:
        """Return the keys at a replica; by text where the tokens or its shape are unknown."""
        prompt = self._prompt
        if prompt is None:
            return PromptKeys()
        name = None
        if shape is not None and prompt.token_ids is not None:
            name = (shape, prompt.lora(adapters))
        if name not in self._made:
            self._made[name] = _by_text(prompt) if name is None else _by_tokens(prompt, *name)
        return self._made[name]

    def make(self, kinds: Iterable[tuple[KeyShape | None, Mapping[str, str]]]) -> None:
        """Make the keys for replicas of these shapes and adapters, so that `of` only returns them.

        For long prompts; may run in a thread while nothing else uses the prompt.
        """
        for shape, adapters in kinds:
            self.of(shape, adapters)

    def affinity(self, session: str | None) -> bytes:
        """Return what requests that should meet have in common, whatever the scheme.

        A session's turns have its name, others the beginning of their prompt.
        """
        if session is not None or self._prompt is None:
            # A header's bytes need not be UTF-8; aiohttp gives the others as surrogates.
            return (session or "").encode(errors="surrogatepass")
        if self._affinity is None:
            self._affinity = self._prompt.affinity
        return self._affinity


def keys64(chain: Sequence[bytes]) -> list[int]:
    """Return the 64-bit keys of whole digests, all of one length (a multiple of 8 bytes)."""
    if not chain:
        return []
    words = array("Q", b"".join(chain))
    if sys.byteorder == "little":
        words.byteswap()
    per_digest = len(chain[0]) // words.itemsize
    return words[per_digest - 1 :: per_digest].tolist()


def _by_text(prompt: PromptView) -> PromptKeys:
    characters = max(1, len(prompt.text))
    piece_tokens = max(1, round(prompt.token_count * TEXT_PIECE_CHARS / characters))
    keys = prompt.text_chain()
    return PromptKeys(keys=keys, chunk_keys=keys, block_tokens=piece_tokens)


def _by_tokens(prompt: PromptView, shape: KeyShape, lora: tuple[str, str] | None) -> PromptKeys:
    chunk_chain = shape.lmcache.chain(prompt.token_ids or ()) if shape.lmcache else []
    chunk_keys = [lmcache_key64(each, prompt.cache_salt) for each in chunk_chain]
    chain, keys = chunk_chain, chunk_keys
    if shape.scheme is not None:
        step = shape.hashes_per_block
        chain = prompt.chain(shape.scheme, shape.block_tokens // step, lora=lora)
        chain = chain[step - 1 :: step] if step > 1 else chain
        keys = keys64(chain)
    if not shape.lmcache:
        chunk_keys = keys[shape.blocks_per_chunk - 1 :: shape.blocks_per_chunk]
    return PromptKeys(
        keys=keys,
        chunk_keys=chunk_keys,
        chunk_chain=chunk_chain,
        token_ids=(prompt.token_ids or ()) if shape.lmcache else (),
        cache_salt=prompt.cache_salt or "",
        chain=chain,
        lora=lora,
        block_tokens=shape.block_tokens,
        blocks_per_chunk=shape.blocks_per_chunk,
    )
