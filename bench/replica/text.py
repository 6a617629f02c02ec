"""Real text of a wanted length, from what every Python installation carries.

The text is the source of standard library modules, one after the other, as an
agent's context holds a code base. It is cut to a number of tokens, and two
seeds give texts that differ from the first line on, so that no cache can take
one for the other. Standard library only.
"""

import random
import sysconfig
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path

CHARS_PER_TOKEN = 3.0
"""First guess at a tokenizer's yield on source text; corrected by counting."""

_TOLERANCE_TOKENS = 8
_MAX_CUTS = 40


def library_files() -> list[Path]:
    """Return the standard library's modules that hold some text, in a stable order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [*root.glob("*.py"), *root.glob("pydoc_data/*.py"), *root.glob("asyncio/*.py")]
    return sorted(path for path in files if path.stat().st_size > 4096)


def estimate_tokens(text: str) -> int:
    """Return about how many tokens ``text`` has, without a tokenizer."""
    return round(len(text) / CHARS_PER_TOKEN)


def real_text(tokens: int, *, seed: int, count: Callable[[str], int] = estimate_tokens) -> str:
    """Return real text of about ``tokens`` tokens, within 8 where ``count`` is exact.

    ``count`` tells a text's number of tokens. The same seed and count give the
    same text. Raises ValueError when the standard library is shorter than that.
    """
    parts = _pieces(seed)
    text = next(parts)
    chars = round(tokens * CHARS_PER_TOKEN)
    short, long = 0, inf
    for _ in range(_MAX_CUTS):
        text = _extend(text, chars, parts)
        counted = count(text[:chars])
        if abs(counted - tokens) <= _TOLERANCE_TOKENS:
            break
        if counted < tokens:
            short = chars
        else:
            long = chars
        chars = max(1, round(chars * tokens / max(1, counted)))
        # Where the text becomes denser such guesses can swing about the length for ever.
        if short and long < inf:
            inner = (long - short) // 4
            chars = round(min(max(chars, short + inner), long - inner))
    return _extend(text, chars, parts)[:chars]


def _extend(text: str, chars: int, parts: Iterator[str]) -> str:
    """Append parts to ``text`` until it has at least ``chars`` characters."""
    while len(text) < chars:
        part = next(parts, None)
        if part is None:
            raise ValueError(
                f"this Python's standard library has only {len(text)} characters of text, "
                f"{chars} are needed: ask for fewer tokens"
            )
        text += part
    return text


def _pieces(seed: int) -> Iterator[str]:
    """Yield a first line that names the seed, then modules in an order that it decides."""
    rng = random.Random(seed)
    yield f"Notebook {rng.getrandbits(64):016x}. The sources under review follow.\n\n"
    files = library_files()
    rng.shuffle(files)
    for path in files:
        yield f"File {path.name}:\n{path.read_text(encoding='utf-8', errors='replace')}\n\n"
