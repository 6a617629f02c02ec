"""Loaded KV equals stored KV: answers from every tier, bit for bit.

The reference is always vLLM's own GPU-tier hit of the same length: its hits
differ from a cold prefill in the last bits of bfloat16 (`test_ranks` has the cold one).
"""

import re
import zlib
from pathlib import Path

import msgspec
import pytest

from bench.replica.tiers import call
from tests.e2e.serving import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    Answer,
    Replica,
    chunk_hexes,
    fresh_prompt,
)
from tests.huge_pages import counts
from tests.stored_chunks import stored_chunks
from warmroute_common.agent_protocol import InstanceInfo

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

# Five chunks, which are ten blocks, and a tail shorter than a block: both tiers
# hold the same 1,280 tokens of it.
PROMPT_TOKENS = 5 * CHUNK_TOKENS + 20
HIT_TOKENS = 5 * CHUNK_TOKENS
POOL_PAGES = 128  # 0.25 GB


def warm_up(replica: Replica, prompt: list[int]) -> Answer:
    """Compute a prompt, wait until it is stored, and return the GPU tier's answer."""
    replica.ask(prompt)
    replica.wait_stored(prompt)
    reference = replica.ask(prompt)
    assert reference.cached_tokens == HIT_TOKENS
    return reference


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> list[int]:
    """A prompt of its own for each test."""
    return fresh_prompt(PROMPT_TOKENS, seed=zlib.crc32(request.node.nodeid.encode()))


def test_from_the_cpu_tier(replica: Replica, prompt: list[int]) -> None:
    reference = warm_up(replica, prompt)
    replica.empty_gpu()
    assert replica.ask(prompt) == reference


def test_with_too_few_huge_pages_it_says_so_and_serves(replica: Replica) -> None:
    """From a pool of ordinary pages, as all tests here show."""
    free = counts().available
    if free >= POOL_PAGES:
        pytest.skip("this machine has huge pages to spare")
    needed = f"{POOL_PAGES} huge pages of 2 MiB are needed and {free} are free"
    before_vllm, inside, *_ = (line for line in replica.log.splitlines() if needed in line)
    assert f"{replica.name}.yaml: local_cpu_use_hugepages: " in before_vllm
    assert "ordinary pages" in inside
    assert "sysctl -w vm.nr_hugepages=" in inside


def test_the_agent_reports_what_its_engine_measured(replica: Replica) -> None:
    """Steps of the scheduler, and loads into the GPU tier."""
    prompt = fresh_prompt(PROMPT_TOKENS, seed=77)
    warm_up(replica, prompt)
    replica.empty_gpu()
    replica.ask(prompt)
    for seed in range(100, 124):
        replica.ask(fresh_prompt(PROMPT_TOKENS, seed=seed))
    info = msgspec.convert(call(f"{replica.agent_url}/info"), type=InstanceInfo)
    assert info.compute is not None
    assert info.compute.steps >= 8 and info.compute.tokens >= 24 * PROMPT_TOKENS
    assert 0 < info.compute.prefill_token_s < 1
    assert info.tiers["cpu"].read_bytes >= 5 * info.chunk_bytes
    assert info.tiers["cpu"].read_bytes_per_s > 0


def test_from_disk(replica: Replica, prompt: list[int]) -> None:
    reference = warm_up(replica, prompt)
    replica.empty_gpu()
    replica.empty_cpu()
    assert replica.tiers_of(prompt) == ["disk"] * 5
    assert replica.ask(prompt) == reference


def test_from_disk_and_cpu_mixed(replica: Replica, prompt: list[int]) -> None:
    reference = warm_up(replica, prompt)
    replica.empty_gpu()
    replica.empty_cpu()
    assert replica.prefetch(prompt, chunks=2)["promoted"] == 2
    assert replica.tiers_of(prompt) == ["cpu", "cpu", "disk", "disk", "disk"]
    assert replica.ask(prompt) == reference


def test_from_gpu_and_cpu_mixed_within_a_chunk(replica: Replica, prompt: list[int]) -> None:
    """The GPU keeps the head of the prefix; the CPU tier continues inside a chunk."""
    reference = warm_up(replica, prompt)
    loads = []
    # vLLM evicts the tail of the least recently used request first; how much
    # of it goes depends on how many blocks another request takes.
    for filler_blocks in (26, 27, 28, 29, 30):
        replica.ask(prompt, max_tokens=1)
        filler = fresh_prompt(filler_blocks * BLOCK_TOKENS - 1, seed=filler_blocks)
        replica.ask(filler, max_tokens=1)
        replica.settle()
        loaded_before = replica.vllm_metric("vllm:external_prefix_cache_hits_total")
        answer = replica.ask(prompt)
        loaded = replica.vllm_metric("vllm:external_prefix_cache_hits_total") - loaded_before
        # vLLM does not load less than a chunk: then a block is computed again.
        if answer.cached_tokens == HIT_TOKENS:
            assert answer == reference
            loads.append(loaded)
    began_inside_a_chunk = [each for each in loads if each % CHUNK_TOKENS == BLOCK_TOKENS]
    assert began_inside_a_chunk, f"loaded beside the GPU's part: {loads}"


def test_a_prefix_that_ends_inside_a_chunk(replica: Replica, prompt: list[int]) -> None:
    """Another prompt shares four chunks and a piece of the fifth, less than a block."""
    warm_up(replica, prompt)
    shared = 4 * CHUNK_TOKENS + 76
    other = prompt[:shared] + fresh_prompt(60, seed=1)
    from_gpu = replica.ask(other)
    assert from_gpu.cached_tokens == 4 * CHUNK_TOKENS
    replica.empty_gpu()
    assert replica.ask(other) == from_gpu


def test_the_next_turn_finds_the_generated_answer(replica: Replica, prompt: list[int]) -> None:
    first = replica.ask(prompt, max_tokens=300)
    spoken = prompt + list(first.token_ids)
    # The last token's KV is computed only when another follows it.
    replica.wait_stored(spoken[:-1])
    next_turn = spoken + fresh_prompt(30, seed=2)
    from_gpu = replica.ask(next_turn)
    replica.empty_gpu()
    from_cpu = replica.ask(next_turn)
    assert from_cpu.cached_tokens == (len(spoken) - 1) // CHUNK_TOKENS * CHUNK_TOKENS
    assert from_cpu.cached_tokens > len(prompt)
    if from_cpu.cached_tokens == from_gpu.cached_tokens:
        assert from_cpu == from_gpu


def test_an_idle_replica_promotes_on_request(replica: Replica, prompt: list[int]) -> None:
    """Its scheduler is not stepping: nobody has asked it anything."""
    warm_up(replica, prompt)
    replica.empty_cpu()
    replica.empty_gpu()
    steps_before = replica.vllm_metric("vllm:iteration_tokens_total_count")
    assert replica.prefetch(prompt)["promoted"] == 5
    assert replica.tiers_of(prompt) == ["cpu"] * 5
    assert replica.vllm_metric("vllm:iteration_tokens_total_count") == steps_before


def test_a_byte_flipped_on_disk_is_a_miss(replica: Replica, prompt: list[int]) -> None:
    reference = answer_with_two_chunks(replica, prompt)
    warm_up(replica, prompt)
    replica.empty_gpu()
    replica.empty_cpu()
    path, start = stored_chunks(replica.disk)[bytes.fromhex(chunk_hexes(prompt)[2])]
    with path.open("r+b") as file:
        file.seek(start + 1000)
        (byte,) = file.read(1)
        file.seek(start + 1000)
        file.write(bytes([byte ^ 1]))
    corrupt_before = replica.metrics()["warmroute_engine_corrupt"]
    answer = replica.ask(prompt)
    assert replica.metrics()["warmroute_engine_corrupt"] == corrupt_before + 1
    assert answer.cached_tokens == 2 * CHUNK_TOKENS
    assert answer == reference
    replica.wait_stored(prompt)
    replica.empty_gpu()
    assert replica.ask(prompt).cached_tokens == HIT_TOKENS


def answer_with_two_chunks(replica: Replica, prompt: list[int]) -> Answer:
    """Return the answer when the GPU tier holds the first two chunks of a prompt."""
    replica.ask(prompt[: 2 * CHUNK_TOKENS + 20], max_tokens=1)
    answer = replica.ask(prompt)
    assert answer.cached_tokens == 2 * CHUNK_TOKENS
    return answer


def test_these_tests_would_see_one_flipped_byte(replica: Replica, prompt: list[int]) -> None:
    """Flip one byte of a chunk in the pool, behind everybody's back: the answer changes."""
    reference = warm_up(replica, prompt)
    replica.empty_gpu()
    replica.settle()
    pid, address = find_in_pool(replica, stored_bytes(replica, prompt))
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        memory.seek(address + 4001)
        (byte,) = memory.read(1)
        memory.seek(address + 4001)
        # The high byte of a bfloat16: sign and most of the exponent.
        memory.write(bytes([byte ^ 0x40]))
    assert replica.ask(prompt).said != reference.said
    # Leave nothing wrong behind for the tests after this one.
    replica.empty_gpu()
    replica.empty_cpu()


def stored_bytes(replica: Replica, prompt: list[int]) -> bytes:
    """Return the beginning of a prompt's first chunk, from the disk tier."""
    path, start = stored_chunks(replica.disk)[bytes.fromhex(chunk_hexes(prompt)[0])]
    with path.open("rb") as file:
        file.seek(start)
        return file.read(4096)


def find_in_pool(replica: Replica, wanted: bytes) -> tuple[int, int]:
    """Return a process of the replica that maps the pool, and where these bytes are in it."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
            if replica.agent_url.rsplit(":", 1)[1] not in listening_ports(maps.parent):
                continue
        except OSError:
            continue
        for line in lines:
            match = re.match(r"([0-9a-f]+)-([0-9a-f]+) .*/dev/shm/#.*\(deleted\)", line)
            if match is None:
                continue
            start, end = (int(text, 16) for text in match.groups())
            with (maps.parent / "mem").open("rb", buffering=0) as memory:
                memory.seek(start)
                for offset in range(start, end, 1 << 20):
                    if memory.read(1 << 20)[: len(wanted)] == wanted:
                        return int(maps.parent.name), offset
    raise AssertionError("the chunk is in no pool")


def listening_ports(process: Path) -> set[str]:
    """Return the local TCP ports that a process listens on."""
    inodes = set()
    for descriptor in (process / "fd").iterdir():
        try:
            match = re.match(r"socket:\[(\d+)\]", str(descriptor.readlink()))
        except OSError:
            continue
        if match:
            inodes.add(match.group(1))
    ports = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            ports.add(str(int(fields[1].split(":")[1], 16)))
    return ports
