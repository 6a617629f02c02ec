"""What the pages say: links lead somewhere, and what is named in them exists."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import pytest
import yaml

from router.config.loading import router_config
from router.config.settings import RouterConfig
from tools.reference import hints, known_commands, section_of, slug
from warmroute_common.config_reader import ConfigError

ROOT: Final = Path(__file__).parent.parent
CODE: Final = ROOT
PAGES: Final = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "configs/**/*.md", "bench/results/*.md")
    for path in ROOT.glob(pattern)
)
FENCE: Final = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK: Final = re.compile(r"\]\(([^()\s]+)\)")
PICTURE: Final = re.compile(r"<(?:img|source)[^>]* src(?:set)?=\"([^\"]+)\"")
COMMANDS: Final = known_commands()


@cache
def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of each block of code."""
    for found in FENCE.finditer(text_of(page)):
        yield found[2], found[3]


def prose(page: str) -> str:
    return FENCE.sub("", text_of(page))


@cache
def anchors(page: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {slug(re.sub(r"\]\([^)]*\)", "]", each)) for each in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_what_is_there(page: str) -> None:
    wrong = []
    for target in (*LINK.findall(prose(page)), *PICTURE.findall(prose(page))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        there = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        if not there.exists() or (
            anchor and anchor not in anchors(there.relative_to(ROOT).as_posix())
        ):
            wrong.append(target)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES)
def test_every_command_has_its_name_and_options(page: str) -> None:
    wrong = []
    for words in commands(page):
        if words[0] not in COMMANDS:
            wrong.append(words)
            continue
        given = words[1 : words.index("--")] if "--" in words else words[1:]
        known = {each for option in COMMANDS[words[0]].params for each in option.opts}
        wrong += [[words[0], each] for each in options(given) - known - {"--help"}]
    assert wrong == []


def commands(page: str) -> Iterator[list[str]]:
    """Yield the words after ``warmroute``, in blocks of code and in the text."""
    yield from lines(page, "warmroute")


def lines(page: str, program: str) -> Iterator[list[str]]:
    """Yield the words that follow a program's name, wherever it is called."""
    inline = re.findall(rf"`({program} [^`]*)`", prose(page))
    shell = [line for kind, block in blocks(page) if kind in ("", "sh") for line in joined(block)]
    for line in (*inline, *shell):
        called = re.match(rf"(?:[A-Z_]+=\S+ )*{program} ([a-z-].*)", line.strip())
        if called is not None:
            yield words_of(called[1])


def words_of(arguments: str) -> list[str]:
    """Return the words up to where output or input is led elsewhere."""
    words = shlex.split(arguments, comments=True)
    return list(takewhile(lambda word: word not in ("<", ">", "&", "|"), words))


def joined(block: str) -> list[str]:
    return block.replace("\\\n", " ").splitlines()


def options(words: list[str]) -> set[str]:
    return {each.partition("=")[0] for each in words if each.startswith("-") and each != "-"}


@pytest.mark.parametrize("page", PAGES)
def test_every_module_that_is_run_is_there_and_takes_its_options(page: str) -> None:
    wrong = []
    for words in lines(page, "python -m"):
        spec = importlib.util.find_spec(words[0])
        if spec is None or spec.origin is None:
            wrong.append(words)
            continue
        path = Path(spec.origin)
        files = path.parent.rglob("*.py") if path.stem == "__init__" else [path]
        source = "".join(each.read_text(encoding="utf-8") for each in files)
        wrong += [[words[0], each] for each in options(words[1:]) if not takes(source, each)]
    assert wrong == []


def takes(source: str, option: str) -> bool:
    """Whether a module's source names an option, or makes it of a name (``f"--{name}"``)."""
    return f'"{option}"' in source or ('f"--{' in source and f'"{option[2:]}"' in source)


@pytest.mark.parametrize("page", PAGES)
def test_every_target_of_make_is_there(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    named = {word for words in lines(page, "make") for word in words[:1] if word.islower()}
    assert named - targets == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_piece_of_a_routers_file_loads(page: str) -> None:
    for _, block in blocks(page):
        if not block.lstrip().startswith("# router.yaml"):
            continue
        settings = {"replicas": [{"url": "http://localhost:8000"}], **yaml.safe_load(block)}
        router_config(settings, path=page)


def settings_of(cls: type, path: str = "") -> Iterator[str]:
    for each in fields(cls):
        yield f"{path}{each.name}"
        inner, _ = section_of(hints(cls)[each.name])
        if inner is not None:
            yield from settings_of(inner, f"{path}{each.name}.")


@pytest.mark.parametrize("page", PAGES)
def test_every_setting_that_is_named_exists(page: str) -> None:
    if page == "CHANGELOG.md":
        return  # it names settings that are gone
    known = set(settings_of(RouterConfig))
    sections = {each.partition(".")[0] for each in known if "." in each}
    named = re.findall(r"`([a-z_]+\.[a-z_.]+?)(?::[^`]*)?`", prose(page))
    wrong = [each for each in named if each.split(".")[0] in sections and each not in known]
    assert [each for each in wrong if not each.endswith((".md", ".yaml", ".py", ".json"))] == []


@cache
def sources() -> str:
    files = [each for name in ("router", "cacheengine") for each in (CODE / name).rglob("*.py")]
    return "".join(each.read_text(encoding="utf-8") for each in files)


@pytest.mark.parametrize("page", PAGES)
def test_every_metric_that_is_named_exists(page: str) -> None:
    if page == "CHANGELOG.md":
        return
    named = {
        *re.findall(r"`warmroute_([a-z_]+[a-z])", prose(page)),
        *(each for row in metrics_rows(page) for each in row),
    }
    assert {each for each in named if not is_metric(each)} == set()


def metrics_rows(page: str) -> Iterator[list[str]]:
    """Yield the names in the first cells of the table of the router's metrics."""
    table = re.search(r"^\| `warmroute_\.\.\.` .*?\n\n", text_of(page), re.MULTILINE | re.DOTALL)
    for line in (table[0].strip() if table else "").splitlines()[2:]:
        yield re.findall(r"`([a-z]+_[a-z_]+)(?:\{[^`]*)?`", line.split("|")[1])


def is_metric(name: str) -> bool:
    """Whether some metric has this name, or begins with it; the code adds prefix and suffix."""
    bare = re.sub(r"^(engine|transfer)_|_(total|ratio|seconds)$", "", name)
    return bare.removeprefix("tier_") in sources()


def test_the_readme_leads_to_every_page() -> None:
    linked = {each.partition("#")[0] for each in LINK.findall(prose("README.md"))}
    pages = {each for each in PAGES if each.startswith("docs/") or "/" not in each}
    assert pages - linked == {"README.md"}


def test_the_checks_see_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them, on a page with one mistake of its kind."""
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n\n[a](#nowhere) `warmroute nothing` `warmroute serve --nothing`\n"
        "`admission.nothing` `warmroute_nothing_at_all`\n\n"
        "```\npython -m bench.nothing\nmake nothing\n```\n\n"
        "```\n# router.yaml\nnothing: 1\n```\n",
        encoding="utf-8",
    )
    monkeypatch.setattr("tests.test_docs.ROOT", tmp_path)
    (tmp_path / "Makefile").write_text("all:\n")
    checks: tuple[Any, ...] = (
        test_every_link_leads_to_what_is_there,
        test_every_command_has_its_name_and_options,
        test_every_module_that_is_run_is_there_and_takes_its_options,
        test_every_target_of_make_is_there,
        test_every_setting_that_is_named_exists,
        test_every_metric_that_is_named_exists,
    )
    for check in checks:
        with pytest.raises((AssertionError, ModuleNotFoundError)):
            check("page.md")
    with pytest.raises(ConfigError):
        test_every_piece_of_a_routers_file_loads("page.md")
