"""The reference pages: as fresh as the code, and no setting without a meaning."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tools.reference import pages, sections, slug, unexplained
from warmroute_common.config_reader import setting

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Lamp:
    """A lamp: what it gives.

    More of it.
    """

    watts: int = setting(60, at_least=1, at_most=100)
    """Of ``power``,
    on two lines."""
    store_bytes: int = 2 << 20
    """With a | bar."""
    name: str | None = None
    """Of it."""


@dataclass(frozen=True, kw_only=True)
class House:
    """All of it."""

    lamps: tuple[Lamp, ...] = ()
    hall: Lamp | None = None
    """One more."""
    cellar: Lamp = field(default_factory=Lamp)
    bare: bool
    """Whether it is."""


@pytest.mark.parametrize("page", pages())
def test_a_page_is_what_the_code_says(page: str) -> None:
    """Where it fails: python -m tools.reference."""
    assert (ROOT / page).read_text(encoding="utf-8") == pages()[page]


def test_every_setting_says_what_it_means() -> None:
    """By a docstring below its field."""
    assert sorted(unexplained()) == []


def test_a_class_becomes_its_table_and_those_of_its_sections() -> None:
    assert "".join(sections(House, "house.yaml", "house.yaml")).split("\n\n")[:6] == [
        "## house.yaml",
        "All of it.",
        "| key | what | default | meaning |\n|---|---|---|---|\n"
        "| `lamps` | list of sections | none | [A lamp: what it gives](#lamps-in-houseyaml). |\n"
        "| `hall` | section | off | [A lamp: what it gives](#hall-in-houseyaml). One more. |\n"
        "| `cellar` | section | all defaults | "
        "[A lamp: what it gives](#cellar-in-houseyaml). |\n"
        "| `bare` | true or false | *required* | Whether it is. |",
        "### `lamps[]` in house.yaml",
        "A lamp: what it gives.",
        "More of it.",
    ]


def test_a_row_has_bounds_units_and_no_bars() -> None:
    table = "".join(sections(Lamp, "lamp.yaml", "lamp.yaml")).split("\n\n")[3].splitlines()
    assert table[2:] == [
        "| `watts` | whole number | 60 | Of `power`, on two lines. At least 1, at most 100. |",
        "| `store_bytes` | whole number | 2097152 (2 MiB) | With a &#124; bar. |",
        "| `name` | text | none | Of it. |",
    ]


def test_an_anchor_is_githubs() -> None:
    assert slug("`access.keys[]` in router.yaml") == "accesskeys-in-routeryaml"
    assert slug("A replica's file, with_keys") == "a-replicas-file-with_keys"
