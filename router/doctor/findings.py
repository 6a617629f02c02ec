"""The findings of ``warmroute doctor``, and their report as text and JSON."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from warmroute_common.command_line import counted


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    NOTE = "note"
    """Works, and may be intended."""
    PROBLEM = "problem"
    """Must be fixed."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding, shown as one line."""

    check: str
    """Identifier of the check; programs may rely on it."""
    level: Level
    what: str
    fix: str | None = None
    """How to fix it; None if there is nothing to fix."""

    @property
    def line(self) -> str:
        """The finding and its fix, joined into one line: replicas' messages may have several."""
        whole = self.what if self.fix is None else f"{self.what}; {self.fix}"
        return " ".join(whole.split())


@dataclass(kw_only=True)
class Section:
    """The findings about one thing: the router, a replica, the fleet."""

    about: str
    at: str = ""
    """Its address."""
    findings: list[Finding] = field(default_factory=list)

    def ok(self, check: str, what: str) -> None:
        """Add a passed check."""
        self.findings.append(Finding(check=check, level=Level.OK, what=what))

    def note(self, check: str, what: str, fix: str | None = None) -> None:
        """Add something that may be intended."""
        self.findings.append(Finding(check=check, level=Level.NOTE, what=what, fix=fix))

    def problem(self, check: str, what: str, fix: str | None = None) -> None:
        """Add a problem."""
        self.findings.append(Finding(check=check, level=Level.PROBLEM, what=what, fix=fix))


@dataclass(frozen=True)
class Report:
    """All sections, in the order of the report."""

    sections: Sequence[Section]

    @property
    def is_well(self) -> bool:
        """Whether there is no problem."""
        return not self.count(Level.PROBLEM)

    def count(self, level: Level) -> int:
        """Return the number of findings of a level."""
        levels = Counter(each.level for section in self.sections for each in section.findings)
        return levels[level]

    def as_json(self) -> dict[str, Any]:
        """Return the report for programs."""
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
                    "fix": each.fix,
                }
                for section in self.sections
                for each in section.findings
            ],
        }

    def lines(self) -> Iterator[tuple[Level | None, str]]:
        """Yield the lines of the report with their levels; headings have none."""
        for section in self.sections:
            if section.findings:
                yield None, f"{section.about}  {section.at}".rstrip()
                for each in section.findings:
                    yield each.level, f"  {each.level:<8} {each.line}"
                yield None, ""
        yield None, self._verdict()

    def _verdict(self) -> str:
        problems, notes = self.count(Level.PROBLEM), self.count(Level.NOTE)
        verdict = [counted(problems, "problem")] if problems else ["No problem found"]
        if notes:
            verdict.append(counted(notes, "note"))
        return ", ".join(verdict) + "."
