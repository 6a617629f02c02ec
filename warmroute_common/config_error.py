"""A configuration that cannot work: what is wrong, where, and how to fix it."""

from typing import NamedTuple


class ConfigError(Exception):
    """A configuration that cannot work: where, what, and how to mend it.

    ``str()`` is the one line that the command prints:
    ``path: key: problem; fix``.
    """

    def __init__(self, path: str, key: str, problem: str, fix: str) -> None:
        super().__init__(path, key, problem, fix)
        self.path = path
        self.key = key
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        where = ": ".join(part for part in (self.path, self.key) if part)
        return f"{where}: {self.problem}; {self.fix}"


class Place(NamedTuple):
    """Where a setting stands: in which file, under which key ('' is its top level)."""

    path: str
    key: str = ""

    def at(self, name: object) -> "Place":
        """Return the place of a key in the mapping here."""
        return Place(self.path, f"{self.key}.{name}" if self.key else str(name))

    def item(self, index: int) -> "Place":
        """Return the place of an item of the list here."""
        return Place(self.path, f"{self.key}[{index}]")

    def error(self, problem: str, fix: str) -> ConfigError:
        """Return what is wrong here, to be raised."""
        return ConfigError(self.path, self.key, problem, fix)


def describe(error: BaseException) -> str:
    """Return an error's text, or its type's name where it has none."""
    return str(error) or type(error).__name__
