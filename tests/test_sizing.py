"""docs/sizing.md: what it says was measured is in the results, and what it calculates is right."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")


def results(name: str) -> Any:
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())


def rows(heading: str) -> Iterator[list[str]]:
    """Yield the cells of each row of the table that has a column of this name."""
    is_in = False
    for line in PAGE.splitlines():
        cells = [each.strip() for each in line.strip("|").split("|")]
        if line.startswith("|") and heading in cells:
            is_in = True
        elif is_in and not line.startswith("|"):
            return
        elif is_in and not line.startswith("|---"):
            yield cells


def number(text: str) -> float:
    return float(re.sub("[^0-9.]", "", text))


CASES: Final = {
    "1 KB, one answer": "1k-whole",
    "16 KB, never seen before": "16k-piece",
    "64 KB, never seen before": "64k-piece",
    "conversations that grow": "conversation-piece",
    "1 KB, streamed in 200 events": "1k-slow",
}


def test_cpu_time_of_requests_is_what_was_measured() -> None:
    measured = {
        (case["case"], each["contender"]): each["cpu_ms"]["median"]
        for case in results("overhead")["cases"]
        for each in case["contenders"]
        if each["cpu_ms"]
    }
    table = {cells[0]: cells[1:] for cells in rows("by text, ms")}
    assert table.keys() == CASES.keys()
    for name, (by_text, by_tokens, per_second) in table.items():
        assert float(by_text) == pytest.approx(measured[CASES[name], "ours-text"], rel=0.02)
        assert float(by_tokens) == pytest.approx(measured[CASES[name], "ours-tokens"], rel=0.02)
        # A half digit of what is shown is up to 5% of it.
        assert float(per_second) == pytest.approx(600 / float(by_tokens), rel=0.05)
    event_ms = (measured["1k-slow", "ours-text"] - measured["1k-piece", "ours-text"]) / 200
    assert event_ms == pytest.approx(0.023, abs=0.0005)


def test_index_sessions_and_kv_events_are_what_was_measured() -> None:
    scale = results("scale")["rows"]
    keys = [each["index_bytes_per_key"] for each in scale]
    sessions = [each["session_bytes"] for each in scale]
    assert f"{min(keys):.0f} to {max(keys):.0f} bytes for each block key" in PAGE
    assert f"{min(sessions):.0f} to {max(sessions):.0f} bytes each" in PAGE
    placed = {each["replicas"]: each["place_p50_us"] / 1000 for each in scale}
    assert f"{placed[8]:.2f} ms with 8 replicas and {placed[1000]:.2f} ms with 1,000" in PAGE
    index = next(each for each in results("event-load")["phases"] if each["name"] == "index")
    assert f"{index['loop_us_per_message'] / 1000:.3f} ms a message" in PAGE
    assert f"{index['loop_share']:.0%} of a core" in PAGE


def kv_bytes() -> dict[str, int]:
    return {
        name: int(2 * number(layers) * number(heads) * number(size) * 2)
        for name, layers, heads, size, *_ in rows("KV of a token")
    }


def test_kv_of_a_token_follows_from_the_shape() -> None:
    sizes = kv_bytes()
    for name, *_, shown, million in rows("KV of a token"):
        assert number(shown) * 1024 == sizes[name]
        assert number(million) == round(sizes[name] / 1000)


def test_ram_follows_from_the_gpu() -> None:
    sizes = kv_bytes()
    seen = 0
    for about, weights, cache, tokens, ram in rows("RAM 1, for each replica"):
        model, gpus = about.split(", ")
        count = {"one": 1, "two": 2, "four": 4}[gpus.split()[0]]
        [memory_gb] = map(float, re.findall(r"\((\d+) GB\)", gpus))
        left_gb = memory_gb * 0.9 - number(weights) - 4 * count
        assert number(cache) == pytest.approx(left_gb, abs=0.5)
        assert number(tokens) == pytest.approx(left_gb * 1e9 / sizes[model], rel=0.07, abs=500)
        assert ram == cache
        seen += 1
    assert seen == 5


def test_speeds_of_disks_follow_from_the_prefill() -> None:
    for _, prefill, disk in rows("disk must read"):
        tokens = float(prefill.split()[0].replace(",", ""))
        shown = float(disk.split()[0])
        assert shown == pytest.approx(tokens * kv_bytes()["Llama 3.1 8B"] / 1e9, abs=0.06)
