"""Serdes: what is decoded, how much is saved, and what damaged bytes do."""

import threading
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheengine.tiers.compression import (
    FLOAT_FORMATS,
    GROUP,
    PIECE_BYTES,
    CacheGenSerde,
    LosslessSerde,
)
from cacheengine.tiers.remote import SERDE_NAMES, make_serde
from cacheengine.tiers.serde import NaiveSerde, Serde, SerdeError

DTYPES = ("bfloat16", "float16", "float32", "fp8_e4m3", "int4_per_token_head")
EXACT = ("naive", "lossless")
FLOATS = tuple(FLOAT_FORMATS)


def gaussian(dtype: str, elements: int, *, seed: int = 1) -> memoryview:
    """Return N numbers of a normal distribution, as bytes."""
    numbers = np.random.default_rng(seed).standard_normal(elements).astype(np.float32)
    return memoryview(to_words(numbers, dtype).tobytes())


def to_words(numbers: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.generic]:
    if dtype == "bfloat16":
        return (numbers.view(np.uint32) >> 16).astype(np.uint16)
    if dtype == "float16":
        with np.errstate(over="ignore"):  # infinity, correctly
            return numbers.astype(np.float16)
    return numbers


def to_floats(content: memoryview, dtype: str) -> npt.NDArray[np.float64]:
    """Return the numbers, from the format's definition and not by our own conversions."""
    if dtype == "bfloat16":
        words = np.frombuffer(content, np.uint16)
        with np.errstate(invalid="ignore"):  # signalling NaN
            return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    kind = np.float16 if dtype == "float16" else np.float32
    return np.frombuffer(content, kind).astype(np.float64)


def noise(size_bytes: int, *, seed: int = 1) -> memoryview:
    return memoryview(np.random.default_rng(seed).bytes(size_bytes))


def joined(serde: Serde, payload: memoryview) -> memoryview:
    return memoryview(b"".join(serde.encode(payload)))


def decoded(serde: Serde, encoded: memoryview, size_bytes: int) -> memoryview:
    # Between two other chunks, as in a pool: a write next to it would be seen.
    pool = bytearray(b"\xa5" * (size_bytes + 128))
    serde.decode(encoded, memoryview(pool)[64:-64])
    assert pool[:64] == pool[-64:] == b"\xa5" * 64
    return memoryview(pool)[64:-64]


# --- exact ---

payloads = st.one_of(
    st.binary(max_size=600),
    st.builds(lambda size, byte: bytes([byte]) * size, st.integers(0, 9000), st.integers(0, 255)),
    st.builds(
        lambda count, seed, cut: bytes(gaussian("bfloat16", count, seed=seed))[cut:],
        st.integers(2, 5000),
        st.integers(0, 99),
        st.integers(0, 3),
    ),
    st.builds(
        lambda count, seed, tail: bytes(gaussian("float32", count, seed=seed)) + tail,
        st.integers(0, 3000),
        st.integers(0, 99),
        st.binary(max_size=5),
    ),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXACT)
@given(payload=payloads)
def test_an_exact_serde_gives_the_bytes_back(name: str, dtype: str, payload: bytes) -> None:
    serde = make_serde(name, dtype)
    encoded = joined(serde, memoryview(payload))
    assert len(encoded) <= len(payload) + 1
    assert decoded(serde, encoded, len(payload)) == payload


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size_bytes", [PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES + 6])
def test_an_exact_serde_handles_more_than_a_piece(dtype: str, size_bytes: int) -> None:
    serde = make_serde("lossless", dtype)
    payload = gaussian("float32", size_bytes // 4 + 1)[:size_bytes]
    encoded = joined(serde, payload)
    assert len(encoded) < size_bytes
    assert decoded(serde, encoded, size_bytes) == payload


@pytest.mark.parametrize(
    ("dtype", "least_ratio"), [("bfloat16", 1.45), ("float16", 1.15), ("float32", 1.15)]
)
def test_lossless_shrinks_kv_like_numbers(dtype: str, least_ratio: float) -> None:
    payload = gaussian(dtype, 1 << 19)
    assert len(payload) / len(joined(make_serde("lossless", dtype), payload)) > least_ratio


@pytest.mark.parametrize("name", ["lossless", "cachegen"])
def test_what_does_not_shrink_is_sent_from_its_place(name: str) -> None:
    serde = make_serde(name, "bfloat16")
    payload = noise(1 << 16) if name == "lossless" else gaussian("bfloat16", 3)
    flag, content = serde.encode(payload)
    assert len(flag) == 1
    assert content is payload
    assert decoded(serde, memoryview(bytes(flag) + bytes(content)), len(payload)) == payload


def test_naive_copies_nothing_to_encode() -> None:
    payload = noise(1000)
    (part,) = NaiveSerde().encode(payload)
    assert part is payload


@pytest.mark.parametrize("name", SERDE_NAMES)
def test_the_payload_is_not_modified(name: str) -> None:
    payload = bytearray(gaussian("bfloat16", 4096))
    payload[:256] = b"\xff" * 256  # groups of NaN
    before = bytes(payload)
    make_serde(name, "bfloat16").encode(memoryview(payload))
    assert payload == before


@pytest.mark.parametrize("wrote", DTYPES)
@pytest.mark.parametrize("reads", DTYPES)
def test_lossless_reads_what_was_written_for_another_type(wrote: str, reads: str) -> None:
    payload = gaussian("float32", 1001)
    encoded = joined(make_serde("lossless", wrote), payload)
    assert decoded(make_serde("lossless", reads), encoded, len(payload)) == payload


# --- the lossy one ---

INTERESTING = (
    0.0,
    -0.0,
    float("inf"),
    float("-inf"),
    float("nan"),
    1e-40,
    1e-45,
    -(2.0**-126),
    2.0**-100,
    2.0**-101,
    6e-8,
    2.0**-14,
    2.0**-15,
    65504.0,
    -65504.0,
    1e30,
    2.0**100,
    -(2.0**101),
    3.3895314e38,
    3.4028235e38,
    1.0,
    -1.0,
)

numbers = st.one_of(
    st.sampled_from(INTERESTING),
    st.floats(width=32),
    st.floats(-8, 8, width=32),
)
groups = st.one_of(
    st.lists(numbers, min_size=GROUP, max_size=GROUP),
    st.lists(st.floats(-8, 8, width=32), min_size=GROUP, max_size=GROUP),
    st.builds(lambda number: [number] * GROUP, numbers),
    st.builds(lambda number: [number] + [0.0] * (GROUP - 1), numbers),
)


def check_error(serde: CacheGenSerde, payload: memoryview, dtype: str) -> None:
    """Assert the bound on every group; that an exact group has every bit."""
    restored = decoded(serde, joined(serde, payload), len(payload))
    before = to_floats(payload, dtype).reshape(-1, GROUP)
    after = to_floats(restored, dtype).reshape(-1, GROUP)
    finite = np.isfinite(before).all(axis=1)
    width = len(payload) // len(before)
    for i in np.flatnonzero(~finite):
        assert restored[i * width : (i + 1) * width] == payload[i * width : (i + 1) * width]
    largest = np.abs(before[finite]).max(axis=1, initial=0)
    errors = np.abs(after[finite] - before[finite])
    bounds = serde.max_error * largest
    assert (errors.max(axis=1, initial=0) <= bounds).all()
    assert (np.sqrt((errors**2).mean(axis=1)) <= bounds).all()


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=60)
@given(
    content=st.lists(groups, min_size=1, max_size=5),
    steps=st.sampled_from([1, 7, 15, 127]),
    copies=st.sampled_from([1, 20]),
)
def test_the_error_is_bounded(
    dtype: str, content: list[list[float]], steps: int, copies: int
) -> None:
    """``copies`` make it long enough not to be stored as it is."""
    words = to_words(np.array(content * copies, np.float32), dtype)
    check_error(CacheGenSerde(dtype, steps), memoryview(words.tobytes()), dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("steps", [1, 7, 15, 31, 127])
def test_the_error_is_bounded_on_random_numbers_of_all_sizes(dtype: str, steps: int) -> None:
    generator = np.random.default_rng(steps)
    exponents = generator.integers(-20, 15, 4000)
    values = generator.standard_normal((4000, GROUP)) * 2.0 ** exponents[:, np.newaxis]
    payload = memoryview(to_words(values.astype(np.float32), dtype).tobytes())
    check_error(CacheGenSerde(dtype, steps), payload, dtype)


def test_every_bfloat16_there_is_keeps_the_bound() -> None:
    words = np.arange(65536, dtype=np.uint16)
    for seed in range(3):
        np.random.default_rng(seed).shuffle(words)
        check_error(CacheGenSerde("bfloat16"), memoryview(words.tobytes()), "bfloat16")
    check_error(CacheGenSerde("bfloat16"), memoryview(np.sort(words).tobytes()), "bfloat16")


@pytest.mark.parametrize("dtype", FLOATS)
def test_groups_that_cannot_be_quantized_survive_among_others(dtype: str) -> None:
    values = np.frombuffer(gaussian("float32", 64 * GROUP), np.float32).copy().reshape(-1, GROUP)
    values[3, 5] = np.nan
    values[9, 0] = np.inf
    values[17] = 1e-40 if dtype != "float16" else 6e-8
    payload = memoryview(to_words(values, dtype).tobytes())
    serde = CacheGenSerde(dtype)
    encoded = joined(serde, payload)
    assert len(encoded) < len(payload) / 2
    restored = decoded(serde, encoded, len(payload))
    width = len(payload) // 64
    for i in (3, 9, 17):
        assert restored[i * width : (i + 1) * width] == payload[i * width : (i + 1) * width]
    check_error(serde, payload, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_more_than_a_piece_and_a_ragged_end(dtype: str) -> None:
    width = FLOAT_FORMATS[dtype].element_bytes
    elements = (PIECE_BYTES // width) + GROUP + 5
    payload = memoryview(bytes(gaussian(dtype, elements)) + b"xyz")
    serde = CacheGenSerde(dtype)
    restored = decoded(serde, joined(serde, payload), len(payload))
    assert restored[-5 * width - 3 :] == payload[-5 * width - 3 :]
    whole = (elements - 5) * width
    errors = to_floats(restored[:whole], dtype) - to_floats(payload[:whole], dtype)
    assert 0 < np.abs(errors).max() < 6 * serde.max_error


def test_more_steps_err_less_and_take_more_bytes() -> None:
    payload = gaussian("bfloat16", 1 << 16)
    sizes, errors = [], []
    for steps in (7, 15, 31, 127):
        serde = CacheGenSerde("bfloat16", steps)
        encoded = joined(serde, payload)
        restored = decoded(serde, encoded, len(payload))
        sizes.append(len(encoded))
        difference = to_floats(restored, "bfloat16") - to_floats(payload, "bfloat16")
        errors.append(float(np.sqrt((difference**2).mean())))
    assert sizes == sorted(sizes)
    assert errors == sorted(errors, reverse=True)
    assert len(payload) / sizes[1] > 3
    assert sizes[2] == len(joined(make_serde("cachegen", "bfloat16"), payload))


def test_a_reader_follows_the_writers_steps_and_type() -> None:
    payload = gaussian("float16", 1 << 12)
    encoded = joined(CacheGenSerde("float16", 7), payload)
    as_written = decoded(CacheGenSerde("float16", 7), encoded, len(payload))
    assert decoded(CacheGenSerde("bfloat16", 127), encoded, len(payload)) == as_written


# --- names ---


def test_every_name_has_its_serde_and_its_code() -> None:
    made = [make_serde(name, "bfloat16") for name in SERDE_NAMES]
    assert [each.name for each in made] == list(SERDE_NAMES) == ["naive", "lossless", "cachegen"]
    # Codes are in what remote servers hold: they never change.
    assert [each.code for each in made] == [0, 1, 2]
    assert [each.is_exact for each in made] == [True, True, False]
    assert [each.is_identity for each in made] == [True, False, False]


def test_an_unknown_name_is_told_the_names() -> None:
    with pytest.raises(ValueError, match='"zzz" is not one of naive, lossless, cachegen'):
        make_serde("zzz", "bfloat16")


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int8", "auto"])
def test_cachegen_refuses_what_it_cannot_quantize(dtype: str) -> None:
    with pytest.raises(ValueError, match="not " + dtype):
        make_serde("cachegen", dtype)


def test_settings_out_of_range_are_refused() -> None:
    for steps in (0, 128):
        with pytest.raises(ValueError, match="steps"):
            CacheGenSerde("bfloat16", steps)
    with pytest.raises(ValueError, match="elements of 3 bytes"):
        LosslessSerde(3)


# --- damage ---


def survives(serde: Serde, encoded: memoryview, size_bytes: int) -> bool:
    """Return whether ``encoded`` is accepted; whatever is neither that nor SerdeError is raised."""
    try:
        decoded(serde, encoded, size_bytes)
    except SerdeError:
        return False
    return True


@pytest.mark.parametrize("name", SERDE_NAMES)
@given(garbage=st.binary(max_size=400), size_bytes=st.integers(0, 3000))
def test_garbage_never_crashes(name: str, garbage: bytes, size_bytes: int) -> None:
    survives(make_serde(name, "bfloat16"), memoryview(garbage), size_bytes)


@pytest.fixture(scope="module", params=["lossless", "cachegen"])
def sample(request: pytest.FixtureRequest) -> tuple[Serde, bytes, int]:
    """A serde, what it made of a payload, and the payload's size."""
    serde = make_serde(request.param, "bfloat16")
    payload = bytearray(gaussian("bfloat16", 3000)) + b"ab"
    payload[1000:1002] = b"\xff\xff"
    return serde, bytes(joined(serde, memoryview(payload))), len(payload)


def test_any_truncation_is_found(sample: tuple[Serde, bytes, int]) -> None:
    serde, encoded, size_bytes = sample
    for length in range(len(encoded)):
        assert not survives(serde, memoryview(encoded)[:length], size_bytes), length


def test_bytes_too_many_are_found(sample: tuple[Serde, bytes, int]) -> None:
    serde, encoded, size_bytes = sample
    assert not survives(serde, memoryview(encoded + b"\0"), size_bytes)


def test_another_size_is_found(sample: tuple[Serde, bytes, int]) -> None:
    serde, encoded, size_bytes = sample
    for other in (0, 1, size_bytes - 1, size_bytes + 1, 2 * size_bytes, 3 * PIECE_BYTES):
        assert not survives(serde, memoryview(encoded), other)


def test_flipped_bits_never_crash(sample: tuple[Serde, bytes, int]) -> None:
    """Some are not noticed, which is the envelope's checksum's part; most are."""
    serde, encoded, size_bytes = sample
    for position in range(len(encoded)):
        for bit in (position % 8, 7):
            changed = bytearray(encoded)
            changed[position] ^= 1 << bit
            survives(serde, memoryview(changed), size_bytes)


def frame(content: bytes, **parameters: int) -> bytes:
    made = zstandard.ZstdCompressionParameters.from_level(3, **parameters)
    return zstandard.ZstdCompressor(compression_params=made).compress(content)


def with_streams(header: bytes, *streams: bytes) -> memoryview:
    table = b"".join(len(each).to_bytes(4, "little") for each in streams)
    return memoryview(header + table + b"".join(streams))


def lying_frame() -> bytes:
    """Return a frame of 1 MiB that calls itself one of 64 KiB."""
    made = bytearray(frame(bytes(1 << 20), window_log=20))
    assert made[4] == 0xA0  # one segment; its size is in the next four bytes
    assert int.from_bytes(made[5:9], "little") == 1 << 20
    made[5:9] = (1 << 16).to_bytes(4, "little")
    return bytes(made)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: frame(bytes(1 << 28)), id="more than its size"),
        pytest.param(lambda: frame(bytes(1 << 28), write_content_size=0), id="of unsaid size"),
        pytest.param(lying_frame, id="that lies about its size"),
        pytest.param(lambda: frame(bytes(100)), id="less than its size"),
        pytest.param(lambda: frame(bytes(1 << 16)) + b"more", id="with something behind it"),
        pytest.param(lambda: frame(bytes(1 << 16))[:-1], id="cut off"),
    ],
)
def test_a_frame_gives_what_was_expected_or_nothing(make: Callable[[], bytes]) -> None:
    encoded = with_streams(b"\1", make(), b"")
    tracemalloc.start()
    try:
        with pytest.raises(SerdeError):
            decoded(LosslessSerde(1), encoded, 1 << 16)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20


@pytest.mark.parametrize(
    ("scale", "code", "fits"),
    [(0x3F80, 30, True), (0x3F80, 31, False), (0x7F80, 30, False), (0x8000, 30, False)],
)
def test_a_scale_or_code_that_no_group_can_have(scale: int, code: int, fits: bool) -> None:
    """Infinity and a negative scale are none; 15 steps make 31 codes."""
    codes = bytes([15] * (GROUP - 1) + [code])
    encoded = with_streams(b"\1\x0f", bytes([scale & 255]), bytes([scale >> 8]), codes, b"", b"")
    assert survives(CacheGenSerde("bfloat16"), encoded, 2 * GROUP) == fits


# --- threads ---


@pytest.mark.parametrize("name", SERDE_NAMES)
def test_one_serde_serves_many_threads(name: str) -> None:
    serde = make_serde(name, "bfloat16")
    contents = [gaussian("bfloat16", 20_000 + seed, seed=seed) for seed in range(8)]
    wanted = [decoded(serde, joined(serde, each), len(each)).tobytes() for each in contents]

    def work(number: int) -> bool:
        payload = contents[number % 8]
        return decoded(serde, joined(serde, payload), len(payload)) == wanted[number % 8]

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(200)))


@pytest.mark.usefixtures("no_forced_switches")
@pytest.mark.parametrize("name", ["lossless", "cachegen"])
def test_others_run_meanwhile(name: str) -> None:
    serde = make_serde(name, "bfloat16")
    payload = gaussian("bfloat16", 4 << 20)
    encoded = joined(serde, payload)
    into = memoryview(bytearray(len(payload)))
    ticks = 0
    done = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            time.sleep(1e-4)  # gives the lock away

    other = threading.Thread(target=tick)
    other.start()
    try:
        for work in (lambda: serde.encode(payload), lambda: serde.decode(encoded, into)):
            before, tries = ticks, 0
            # More than once only where the machine is too busy to run the other at once.
            while ticks == before and tries < 100:
                work()
                tries += 1
            assert ticks > before
    finally:
        done.set()
        other.join()
