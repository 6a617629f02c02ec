"""Parts of our command lines: types of options, and counts in messages."""

import click


class NumberRange(click.FloatRange):
    """A number within bounds."""

    name = "number"


class WholeNumberRange(click.IntRange):
    """A whole number within bounds."""

    name = "whole number"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: "1 request", "2 requests"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
