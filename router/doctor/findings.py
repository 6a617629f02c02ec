"""What was found: one line each, under what it is about. Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"
    """Works, and may be meant so."""
    TROUBLE = "trouble"
    """Wants to be mended."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line."""

    check: str
    """What was looked at: a word that programs may rely on."""
    level: Level
    what: str
    mend: str | None = None
    """What to do about it; None where nothing is to be done."""

    @property
    def line(self) -> str:
        """What was found and how to mend it, as one line: replicas' own words may have several."""
        whole = self.what if self.mend is None else f"{self.what}; {self.mend}"
        return " ".join(whole.split())


@dataclass(kw_only=True)
class Section:
    """The findings about one thing: the router, a replica, the fleet."""

    about: str
    at: str = ""
    """Its address."""
    findings: list[Finding] = field(default_factory=list)

    def ok(self, check: str, what: str) -> None:
        """Add what is well."""
        self.findings.append(Finding(check=check, level=Level.OK, what=what))

    def note(self, check: str, what: str, mend: str | None = None) -> None:
        """Add what is worth knowing."""
        self.findings.append(Finding(check=check, level=Level.NOTE, what=what, mend=mend))

    def trouble(self, check: str, what: str, mend: str | None = None) -> None:
        """Add what is wrong."""
        self.findings.append(Finding(check=check, level=Level.TROUBLE, what=what, mend=mend))


@dataclass(frozen=True)
class Report:
    """All sections, in the order in which they are read."""

    sections: Sequence[Section]

    @property
    def is_well(self) -> bool:
        """Whether nothing wants to be mended."""
        return not self.count(Level.TROUBLE)

    def count(self, level: Level) -> int:
        """Return how many findings are of a level."""
        levels = Counter(each.level for section in self.sections for each in section.findings)
        return levels[level]

    def as_json(self) -> dict[str, Any]:
        """Return it for programs."""
        return {
            "well": self.is_well,
            "counts": {str(level): self.count(level) for level in Level},
            "findings": [
                {
                    "about": section.about,
                    "at": section.at,
                    "check": each.check,
                    "level": str(each.level),
                    "what": each.what,
                    "mend": each.mend,
                }
                for section in self.sections
                for each in section.findings
            ],
        }

    def lines(self) -> Iterator[tuple[Level | None, str]]:
        """Yield the lines for a person with their levels; headings have none."""
        for section in self.sections:
            if section.findings:
                yield None, f"{section.about}  {section.at}".rstrip()
                for each in section.findings:
                    yield each.level, f"  {each.level:<8} {each.line}"
                yield None, ""
        yield None, self._verdict()

    def _verdict(self) -> str:
        troubles, notes = self.count(Level.TROUBLE), self.count(Level.NOTE)
        told = [counted(troubles, "trouble")] if troubles else ["Nothing is wrong"]
        if notes:
            told.append(counted(notes, "note"))
        return ", ".join(told) + "."


def counted(count: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
