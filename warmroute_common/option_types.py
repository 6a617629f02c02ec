"""Types of command line options whose error messages say "number"."""

import click


class NumberRange(click.FloatRange):
    """A number within bounds."""

    name = "number"


class WholeNumberRange(click.IntRange):
    """A whole number within bounds."""

    name = "whole number"
