"""Priority classes: which one a request gets, and the number that its replica gets.

A request asks for a class by vLLM's ``priority`` (a number, lower goes first) or by OpenAI's
``service_tier``. The class of its key is the best that it gets. The order of classes is kept by
`router.scheduling.waiting_queue`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from router.config.settings import PriorityName
from warmroute_common.api_errors import BadRequestError

VLLM_PRIORITY_HEADER: Final = "x-vllm-priority"
"""vLLM (0.32) takes the number in it before that in the body."""
_FIELD: Final = "priority"
_TIER: Final = "service_tier"
_MOST: Final = 1 << 63
"""vLLM takes numbers below this, and from the negative of this."""


class Priority(IntEnum):
    """A class of requests; the lower one goes first."""

    HIGH = 0
    NORMAL = 1
    BATCH = 2

    @classmethod
    def named(cls, name: PriorityName) -> "Priority":
        """Return the class that a setting names."""
        return cls[name.upper()]

    @classmethod
    def numbered(cls, number: int) -> "Priority":
        """Return the class that a ``priority`` asks for."""
        return cls.NORMAL if not number else cls.HIGH if number < 0 else cls.BATCH

    @property
    def number(self) -> int:
        """The class as a ``priority``: -1, 0 or 1."""
        return self - Priority.NORMAL


_TIERS: Final = {
    "priority": Priority.HIGH,
    "default": Priority.NORMAL,
    "standard_only": Priority.NORMAL,
    "flex": Priority.BATCH,
    "batch": Priority.BATCH,
}
"""Values of ``service_tier``, with Anthropic's. Others, such as ``auto``, ask for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPriority:
    """The class of one request, and what its replica gets."""

    priority: Priority
    vllm_number: int
    """For vLLM's ``priority``."""
    changed: Mapping[str, str | int]
    """Members of the body that the replica must get with other values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityRules:
    """Which class requests get that may have ``best`` at most."""

    best: Priority
    """Also the class of requests that ask for none."""
    replicas_take_numbers: bool
    """Whether replicas get a number for each class; otherwise all get 0."""

    def of(self, fields: Mapping[str, Any], headers: Mapping[str, str]) -> RequestPriority:
        """Return the class of a request; raise `BadRequestError` for a ``priority`` that is none.

        ``headers`` is looked up by names in lower case.
        """
        in_body, tier = _number(fields), fields.get(_TIER)
        asked_number = _in_header(headers)
        if asked_number is None:
            asked_number = in_body
        priority = self.best
        if asked_number:
            priority = max(priority, Priority.numbered(asked_number))
        if isinstance(tier, str) and tier in _TIERS:
            priority = max(priority, _TIERS[tier])
        number = 0
        if self.replicas_take_numbers:
            is_own = bool(asked_number) and Priority.numbered(asked_number) is priority
            number = asked_number if is_own else priority.number
        changed: dict[str, str | int] = {}
        if in_body not in (0, number):
            changed[_FIELD] = number
        if tier == "batch":
            changed[_TIER] = "flex"  # vLLM does not know the other name
        return RequestPriority(priority=priority, vllm_number=number, changed=changed)


def _in_header(headers: Mapping[str, str]) -> int | None:
    text = headers.get(VLLM_PRIORITY_HEADER)
    try:
        number = None if text is None else int(text)
    except ValueError:
        return None  # as vLLM does
    return number if number is not None and -_MOST <= number < _MOST else None


def _number(fields: Mapping[str, Any]) -> int:
    """Return the body's ``priority``; 0 without one."""
    number = fields.get(_FIELD)
    if number is None:
        return 0
    # vLLM would take the text "-5" and the number -5.0 for a priority too.
    if not isinstance(number, int) or isinstance(number, bool) or not -_MOST <= number < _MOST:
        raise BadRequestError(
            "'priority' must be a whole number of 64 bits, such as 0 or 1 (lower goes first)",
            param=_FIELD,
            code="invalid_type",
        )
    return number
