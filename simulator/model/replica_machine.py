"""The machine of a modelled replica: its speeds and sizes. Pure."""

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The speeds of one replica, in model seconds.

    A step of the model takes::

        step_s + prefill + decoding sequences * decode_s_per_sequence
               + their tokens * decode_s_per_context_token
        prefill = tokens / prefill_tokens_per_s * (1 + mean context / attention_tokens)

    and longer by the share ``transfer_slowdown`` while KV is copied to or from the GPU.
    """

    prefill_tokens_per_s: float = 8_000.0
    step_s: float = 0.006
    """What every step takes, however little there is to do in it."""
    decode_s_per_sequence: float = 0.0002
    decode_s_per_context_token: float = 0.0
    """For each token whose KV a decoding sequence reads in a step."""
    attention_tokens: float = 0.0
    """Context length at which a prefill token takes twice as long as at the beginning
    of a prompt; 0: all take the same."""
    request_s: float = 0.0
    """What every request takes before it is queued: the server's own work."""
    load_tokens_per_s: float = 160_000.0
    """From CPU RAM to the GPU."""
    store_tokens_per_s: float = 160_000.0
    """From the GPU to CPU RAM; a chunk can be found there when it has come."""
    transfer_slowdown: float = 0.0
    """By how much a step takes longer during either kind of copy: 0.1 is 10%."""
    disk_tokens_per_s: float = 20_000.0
    """From disk to CPU RAM."""
    disk_write_tokens_per_s: float = 20_000.0
    """From CPU RAM to disk."""
    peer_tokens_per_s: float = 24_000.0
    """From one replica's CPU RAM to the others'."""
    receive_tokens_per_s: float = 24_000.0
    """From the others' CPU RAM to one replica's."""
    pull_tokens_per_s: float = 160_000.0
    """From another replica's GPU to one replica's."""

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        """Return what computing ``tokens`` after ``context_tokens`` adds to a step."""
        seconds = tokens / self.prefill_tokens_per_s
        if self.attention_tokens > 0:
            seconds *= 1 + (context_tokens + tokens / 2) / self.attention_tokens
        return seconds

    def decode_s(self, sequences: int, context_tokens: int = 0) -> float:
        """Return the duration of a step without prefill."""
        return (
            self.step_s
            + sequences * self.decode_s_per_sequence
            + context_tokens * self.decode_s_per_context_token
        )

    def slowed(self, factor: float) -> "Rates":
        """Return the speeds of a replica that computes more slowly by ``factor``."""
        return replace(
            self,
            prefill_tokens_per_s=self.prefill_tokens_per_s / factor,
            step_s=self.step_s * factor,
            decode_s_per_sequence=self.decode_s_per_sequence * factor,
            decode_s_per_context_token=self.decode_s_per_context_token * factor,
        )


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of one replica."""

    gpu_tokens: int = 200_000
    """What the GPU's KV cache holds, for running requests and as a prefix cache."""
    block_tokens: int = 64
    chunk_tokens: int = 256
    max_batched_tokens: int = 1024
    """Tokens in one step at most: one per decoding sequence, the rest for prefill."""
    max_sequences: int = 128
    """Requests that run at the same time at most."""

    def __post_init__(self) -> None:
        for name in ("gpu_tokens", "block_tokens", "chunk_tokens", "max_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.chunk_tokens % self.block_tokens:
            raise ValueError(
                f"chunks of {self.chunk_tokens} tokens are not whole blocks of "
                f"{self.block_tokens}; make chunk_tokens a multiple of block_tokens"
            )
        if self.max_batched_tokens <= self.max_sequences:
            raise ValueError(
                f"max_batched_tokens is {self.max_batched_tokens}: with {self.max_sequences} "
                "decoding sequences nothing would be left for prefill; make it larger than "
                "max_sequences"
            )

    @property
    def gpu_blocks(self) -> int:
        """Blocks of the GPU's KV cache."""
        return self.gpu_tokens // self.block_tokens

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks in one chunk of the engine."""
        return self.chunk_tokens // self.block_tokens

    def blocks(self, tokens: int) -> int:
        """Return the number of blocks that this many tokens take."""
        return -(-tokens // self.block_tokens)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Size and speed of a modelled replica."""

    shape: Shape = field(default_factory=Shape)
    rates: Rates = field(default_factory=Rates)
    cpu_tokens: int = 200_000
    disk_tokens: int = 4_000_000

    def __post_init__(self) -> None:
        for name in ("cpu_tokens", "disk_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")

    @property
    def cpu_chunks(self) -> int:
        """Chunks in the CPU tier."""
        return self.cpu_tokens // self.shape.chunk_tokens

    @property
    def disk_chunks(self) -> int:
        """Chunks in the disk tier."""
        return self.disk_tokens // self.shape.chunk_tokens
