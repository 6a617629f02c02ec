"""What the serde benchmark computes from what it measures."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bench.engine import serde as bench
from bench.engine.kv import (
    KvShape,
    StoredChunks,
    as_bfloat16,
    as_float16,
    gaussian_kv,
    structured_kv,
)
from bench.engine.serde_effect import Answers, compare
from bench.ttft import BenchError
from cacheengine.tiers.disk.disk import DiskTier
from cacheengine.tiers.serde.base import NaiveSerde, Serde
from cacheengine.tiers.serde.cachegen import CacheGenSerde

SHAPE = KvShape(layers=1, tokens=64, heads=2, head_dim=64)
FINGERPRINT = "0123456789abcdef" * 2


class HalvingSerde(Serde):
    """Drops every second byte, and is therefore easy to reckon with."""

    name = "halving"
    is_exact = False

    def encode(self, payload: memoryview) -> Sequence[bytes]:
        return [bytes(payload[1::2])]

    def decode(self, encoded: memoryview, into: memoryview) -> None:
        for i, byte in enumerate(encoded):
            into[2 * i] = 0
            into[2 * i + 1] = byte


def test_ratio_speeds_and_break_even() -> None:
    kv = bench.Kv(name="k", dtype="bfloat16", chunks=[as_bfloat16(gaussian_kv(SHAPE, seed=1))] * 3)
    # Encoding takes 2 ticks a chunk, decoding 1.
    ticks = iter([0.0, 2.0, 2.0, 3.0] * 6)
    result = bench.measure(kv, HalvingSerde(), rounds=2, clock=lambda: next(ticks) * 1e-3)
    gb = len(kv.chunks[0]) / 1e9
    assert result.ratio == 2
    assert result.encode_gb_per_s == pytest.approx(gb / 2e-3)
    assert result.decode_gb_per_s == pytest.approx(gb / 1e-3)
    assert result.pays_below_gb_per_s == pytest.approx(gb / 1e-3 / 2)


def test_errors_are_those_of_the_numbers() -> None:
    numbers = np.zeros(128, np.float32)
    numbers[:3] = (4.0, 1.0, -2.0)
    numbers[64] = 1.0078125
    kv = bench.Kv(name="k", dtype="bfloat16", chunks=[as_bfloat16(numbers)])
    assert bench.errors(kv, NaiveSerde()) == (0, 0)
    largest, rms = bench.errors(kv, HalvingSerde())
    # The exponent ends in the low byte: without it 4 becomes 2, and 1 and 1.0078125 one half.
    assert largest == pytest.approx((1.0078125 - 0.5) / 1.0078125)
    squares = 2**2 + 0.5**2 + (1.0078125 - 0.5) ** 2
    assert rms == pytest.approx((squares / (16 + 1 + 4 + 1.0078125**2)) ** 0.5)


def test_a_serde_that_pays_is_not_named_as_if_it_did_not() -> None:
    kv = bench.Kv(name="k", dtype="bfloat16", chunks=[as_bfloat16(structured_kv(SHAPE, seed=1))])
    for serde in bench.serdes_for("bfloat16"):
        result = bench.measure(kv, serde, rounds=1)
        assert (result.pays_below_gb_per_s > 0) == (serde.name != "naive")
        assert result.max_error <= result.error_bound
        assert (result.rms_error > 0) == isinstance(serde, CacheGenSerde)


def test_made_up_kv_has_the_structure_it_claims() -> None:
    kv = structured_kv(KvShape(layers=1, tokens=256, heads=2, head_dim=128), seed=3)
    assert kv.shape == (1, 2, 256, 2, 128)
    assert (kv == structured_kv(KvShape(layers=1, tokens=256, heads=2, head_dim=128), seed=3)).all()
    keys, values = kv[0]
    sizes = np.abs(keys).mean(axis=0)
    assert (sizes > 5 * np.median(sizes)).sum() >= 4
    slowest = values - values.mean(axis=0)
    neighbours = (slowest[1:] * slowest[:-1]).mean() / (slowest**2).mean()
    assert 0.2 < neighbours < 0.6


def test_numbers_are_rounded_to_the_nearest() -> None:
    numbers = np.array([1.0, 1.00390625, 1.01171875, -3.14159], np.float32)
    words = np.frombuffer(as_bfloat16(numbers), "<u2").astype(np.uint32) << 16
    assert words.view(np.float32).tolist() == [1.0, 1.0, 1.015625, -3.140625]
    assert np.frombuffer(as_float16(numbers), np.float16).tolist() == numbers.astype("e").tolist()


def test_stored_chunks_are_read_and_replaced(tmp_path: Path) -> None:
    chunks = {bytes([i]) * 32: bytes([i]) * 8192 for i in range(3)}
    tier = DiskTier([tmp_path], FINGERPRINT, 8192, 1 << 30)
    tier.scan()
    for key, content in chunks.items():
        tier.put(key, memoryview(content))
    tier.close()
    stored = StoredChunks(tmp_path, 8192)
    assert stored.read() == chunks
    changed = {key: content[::-1].replace(b"\1", b"\7") for key, content in chunks.items()}
    stored.rewrite(changed)
    assert stored.read() == changed != chunks


def test_a_directory_without_chunks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="0 layouts"):
        StoredChunks(tmp_path, 8192)


def test_answers_are_compared() -> None:
    reference = Answers([{"a": -1.0, "b": -2.0}] * 2, [[1, 2, 3], [4, 5, 6]])
    other = Answers(
        [{"a": -1.0, "b": -2.0}, {"c": -1.0, "b": -1.5, "d": -9.0}], [[1, 2, 3], [4, 0, 6]]
    )
    effect = compare(reference, other)
    assert effect.predictions == 2
    assert effect.same_best_token == 0.5
    # The second prediction has lost "a", which is at most as likely as "d".
    assert effect.mean_logprob_difference == (0 + 0 + 8 + 0.5) / 4
    assert effect.max_logprob_difference == 8
    assert effect.median_same_tokens == 2


def test_without_a_replica(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = bench.made_up(SHAPE)
    monkeypatch.setattr(bench, "made_up", lambda _shape: small)
    out = tmp_path / "serde.json"
    assert bench.main(["--prompts", "0", "--rounds", "1", "--json", str(out)]) == 0
    written = json.loads(out.read_text())
    lossless = [each for each in written["results"] if each["serde"] == "lossless"]
    assert [each["kv"] for each in lossless] == ["normal noise", "structured", "structured"]
    assert lossless[0]["ratio"] > 1.4
    assert "lossless" in capsys.readouterr().out
