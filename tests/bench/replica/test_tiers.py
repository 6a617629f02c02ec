"""Waiting for a replica's tiers: asked again until it is so, told when it is not."""

from pathlib import Path

import pytest

from bench.replica.tiers import NotThereError, call, common_prefix, forget_pages, total, wait_until


def test_waiting_asks_until_it_is_so() -> None:
    answers = iter([False, False, True])
    wait_until("ready", lambda: next(answers))
    assert next(answers, "asked no more") == "asked no more"


def test_waiting_in_vain_names_what_was_waited_for() -> None:
    with pytest.raises(NotThereError, match="chunks on disk"):
        wait_until("chunks on disk", lambda: False, timeout_s=0.0)


def test_a_server_that_is_not_there_is_an_oserror() -> None:
    with pytest.raises(OSError, match="refused"):
        call("http://127.0.0.1:9/info")


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [([], [], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 2], 2), ([1, 9], [1, 2], 1)],
)
def test_common_prefix(first: list[int], second: list[int], expected: int) -> None:
    assert common_prefix(first, second) == expected


def test_forgetting_pages_keeps_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "aa" / "chunk.kv"
    path.parent.mkdir()
    path.write_bytes(b"x" * 10_000)
    forget_pages(tmp_path)
    assert path.read_bytes() == b"x" * 10_000


def test_a_figure_is_summed_over_its_labels_or_taken_by_them() -> None:
    text = '# HELP a A.\na{tier="cpu",x="1"} 1.5\na{tier="disk",x="1"} 2\na_more 7\nb 3e2\n'
    assert total(text, "a") == total(text, "a", x="1") == 3.5
    assert total(text, "a", x="1", tier="disk") == 2.0
    assert total(text, "b") == 300.0
    assert total(text, "c") == 0.0
