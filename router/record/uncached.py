"""Why tokens of a prompt were computed and not taken from a cache: `Uncached`.

A prompt is cut into parts, each with one cause. The replica computed all tokens from the first one
on that was not cached, so the causes add up to exactly these. Positions and names of fields
only: nothing here contains text of a prompt. `router.waste` finds the parts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

from router.index.prompt_keys import KvTier


class UncachedCause(StrEnum):
    """Why tokens were computed."""

    NEW = "new"
    """Nobody has sent this beginning before, as far as the router remembers."""
    SHORT = "short"
    """Less than a block or a chunk, or the last block, which is always computed."""
    CHANGED = "changed"
    """The client changed its own prompt before these tokens."""
    EVICTED = "evicted"
    """They were held before, and have left the cache."""
    ELSEWHERE = "elsewhere"
    """Another replica holds them."""
    DECLINED = "declined"
    """They could not be found or used: see `WhyDeclined`."""


AVOIDABLE: Final = (
    UncachedCause.CHANGED,
    UncachedCause.EVICTED,
    UncachedCause.ELSEWHERE,
    UncachedCause.DECLINED,
)
"""Causes of tokens that need not have been computed."""


class ChangeKind(StrEnum):
    """What a client's change looks like, as far as positions and hashes show it."""

    BEGINNING = "beginning"
    """Something near the beginning: often a time stamp or a user's name."""
    REORDERED = "reordered"
    """The same tools in another order."""
    CUT = "cut"
    """Earlier messages were left out."""
    RENDERED = "rendered"
    """The request only continues, but the chat template renders earlier messages differently: most
    drop the reasoning of earlier answers."""
    EDITED = "edited"
    """Something later."""


_CHANGES: Final[Mapping[ChangeKind, str]] = {
    ChangeKind.BEGINNING: "the client changed {place} near the beginning of the prompt "
    "(often a time stamp or a user's name)",
    ChangeKind.REORDERED: "the client sent the same tools in another order",
    ChangeKind.CUT: "the client cut its history: messages before {place} are missing",
    ChangeKind.RENDERED: "the chat template renders {place} differently than in the turn before "
    "(most templates drop the reasoning of earlier answers)",
    ChangeKind.EDITED: "the client changed {place}",
}
_MANY_CHANGES: Final[Mapping[ChangeKind, str]] = {
    ChangeKind.BEGINNING: "{who} something that changes near the beginning of {place}",
    ChangeKind.REORDERED: "{who} the same tools in changing orders",
    ChangeKind.CUT: "{who} histories whose beginnings were cut",
    ChangeKind.RENDERED: "{who} earlier messages that the chat template then renders differently",
    ChangeKind.EDITED: "{who} a changed {place}",
}


class WhyDeclined(StrEnum):
    """Why KV that may exist was not used."""

    SALT = "salt"
    """The session's prompts have different salts."""
    MODEL = "model"
    """The session's turn before was for another model or adapter."""
    MEDIA = "media"
    """What comes from the first image, audio or video on has no keys that the router knows."""
    NO_TOKENS = "no-tokens"
    """The router does not know the replica's tokens, so prompts are matched by text."""
    NO_EVENTS = "no-events"
    """The replica does not report what it holds."""
    NOT_LOADED = "not-loaded"
    """The replica held it and computed it all the same: it came too late, computing was faster, or
    the engine is off."""


_DECLINED: Final[Mapping[WhyDeclined, str]] = {
    WhyDeclined.SALT: "the session's last prompt had another cache_salt",
    WhyDeclined.MODEL: "the session's last prompt was for another model or adapter",
    WhyDeclined.MEDIA: "the router has no keys from the first image, audio or video on",
    WhyDeclined.NO_TOKENS: "the router does not know the replica's tokens, and matches by text",
    WhyDeclined.NO_EVENTS: "the replica publishes no KV events, so its cache is only guessed",
    WhyDeclined.NOT_LOADED: "the replica was believed to hold them {where}and computed them: they "
    "came too late, computing was faster, or its engine is off",
}
_MANY_DECLINED: Final[Mapping[WhyDeclined, str]] = {
    WhyDeclined.SALT: "{who} prompts of one session with changing salts",
    WhyDeclined.MODEL: "{who} prompts of one session to changing models or adapters",
    WhyDeclined.MEDIA: "{who} prompts with media, which have no keys from the first one on",
    WhyDeclined.NO_TOKENS: "{who} prompts whose tokens the router does not know",
    WhyDeclined.NO_EVENTS: "{who} prompts to replicas that publish no KV events",
    WhyDeclined.NOT_LOADED: "{who} prompts whose KV was held {where}and computed again",
}
_TIERS: Final[Mapping[KvTier, str]] = {
    KvTier.GPU: "GPU",
    KvTier.CPU: "CPU RAM",
    KvTier.DISK: "disk",
    KvTier.REMOTE: "remote store",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A client's change of its own prompt."""

    kind: ChangeKind
    place: str
    """The field in the client's request, such as ``messages[3].content`` or ``tools``."""
    at_token: int
    """The first token that differs."""
    turn: int
    """The number of this turn of the session, as far as the router has seen them."""
    since_turn: int
    """The turn from which on the same place has changed in each one."""

    def words(self) -> str:
        """Return what happened, for a person."""
        each = ""
        if self.since_turn < self.turn:
            each = f", in each turn since turn {self.since_turn}"
        what = _CHANGES[self.kind].format(place=self.place)
        return f"{what}, at token {self.at_token:,}{each}"

    def group(self) -> tuple[str, str]:
        """Return what tells equal causes from others, and the words for many of them."""
        return f"{self.kind}/{self.place}", _MANY_CHANGES[self.kind].format(
            who="{who}", place=self.place
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """Where tokens were held last."""

    replica: str | None
    """None for a store that replicas share, or a replica that has left."""
    tier: KvTier | None
    """None if that is not remembered any more."""
    ago_s: float = 0.0
    is_whole: bool = False
    """Whether the tier was emptied, or the replica restarted."""

    def words(self) -> str:
        """Return what happened, for a person."""
        if self.tier is None:
            return "the session sent them before; the router does not remember when they left"
        of = "" if self.replica is None else f" of {self.replica}"
        how = "were lost with all others in" if self.is_whole else "left"
        return f"they {how} the {_TIERS[self.tier]}{of} {_duration(self.ago_s)} before"

    def group(self) -> tuple[str, str]:
        """Return what tells equal causes from others, and the words for many of them."""
        if self.tier is None:
            return "unknown", "{who} prompts whose KV was evicted long before"
        of = "" if self.replica is None else f" of {self.replica}"
        how = "was emptied or restarted" if self.is_whole else "is too small for them"
        return (
            f"{self.tier}/{self.replica}/{self.is_whole}",
            f"{{who}} prompts whose KV had left the {_TIERS[self.tier]}{of}, which {how}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldElsewhere:
    """Another replica that held tokens, and the predicted times on both sides."""

    replica: str
    reason: str
    """Why the request went where it went (`router.fleet.decision.Reason`)."""
    ttft_s: float
    """Predicted where it went."""
    other_ttft_s: float | None
    """Predicted at the other replica; None if that could not take the request."""

    def words(self) -> str:
        """Return what happened, for a person."""
        if self.other_ttft_s is None:
            return f"{self.replica} holds them, and could not take the request"
        return (
            f"{self.replica} holds them; predicted TTFT {_duration(self.other_ttft_s)} there and "
            f"{_duration(self.ttft_s)} here ({self.reason})"
        )

    def group(self) -> tuple[str, str]:
        """Return what tells equal causes from others, and the words for many of them."""
        words = "{who} prompts that went to another replica than the one that held them"
        return self.reason, f"{words} ({self.reason})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    """KV that could not be found or used."""

    why: WhyDeclined
    tier: KvTier | None = None
    """Where it was believed to be."""

    def words(self) -> str:
        """Return what happened, for a person."""
        return _DECLINED[self.why].format(where=self._where())

    def group(self) -> tuple[str, str]:
        """Return what tells equal causes from others, and the words for many of them."""
        words = _MANY_DECLINED[self.why].format(who="{who}", where=self._where())
        return f"{self.why}/{self.tier}", words

    def _where(self) -> str:
        return "" if self.tier is None else f"in its {_TIERS[self.tier]} "


Detail: TypeAlias = Change | Eviction | HeldElsewhere | Declined


@dataclass(slots=True)  # not frozen: some are made for each request
class PromptPart:
    """Tokens of a prompt, up to ``stop``, that have one cause if they are computed."""

    stop: int
    cause: UncachedCause
    detail: Detail | None = None


@dataclass(slots=True, kw_only=True)  # not frozen: one is made for each request
class Uncached:
    """The parts of one prompt, and how much of it was cached."""

    parts: tuple[PromptPart, ...]
    """They follow each other from the beginning of the prompt to its end."""
    prompt_tokens: int
    cached_tokens: int
    """As the replica's ``usage`` said (``is_reported``), else as the router expected."""
    is_reported: bool = False
    s_per_token: float = 0.0
    """Predicted seconds of prefill for each token that is computed."""

    def reported(self, prompt_tokens: int | None, cached_tokens: int | None) -> "Uncached":
        """Return the causes by the counts of the replica's ``usage``; None: it does not tell one.

        If it counts other tokens than the router, the parts become longer or shorter in
        proportion: their lengths were estimates.
        """
        parts, total, cached = self.parts, self.prompt_tokens, self.cached_tokens
        if prompt_tokens and prompt_tokens != total:
            scale = prompt_tokens / total
            parts = tuple(
                PromptPart(round(each.stop * scale), each.cause, each.detail) for each in parts
            )
            total, cached = prompt_tokens, round(cached * scale)
        return Uncached(
            parts=parts,
            prompt_tokens=total,
            cached_tokens=min(cached if cached_tokens is None else cached_tokens, total),
            is_reported=cached_tokens is not None,
            s_per_token=self.s_per_token,
        )

    @property
    def computed_tokens(self) -> int:
        """Tokens that were not cached."""
        return self.prompt_tokens - self.cached_tokens

    def computed(self) -> list[tuple[PromptPart, int]]:
        """Return the parts that were computed, with the number of tokens of each.

        Together they are all tokens of the prompt that were not cached.
        """
        found: list[tuple[PromptPart, int]] = []
        at = self.cached_tokens
        for part in self.parts:
            if part.stop > at:
                found.append((part, part.stop - at))
                at = part.stop
        return found

    def tokens(self) -> dict[UncachedCause, int]:
        """Return how many tokens were computed by cause; causes without any are left out."""
        sums: dict[UncachedCause, int] = {}
        for part, tokens in self.computed():
            sums[part.cause] = sums.get(part.cause, 0) + tokens
        return sums

    def lines(self) -> list[str]:
        """Return why tokens were computed, in words: one line for each part, in order."""
        basis = "" if self.is_reported else " (by what the router knew; the replica did not report)"
        head = f"{self.computed_tokens:,} of {self.prompt_tokens:,} tokens were computed{basis}"
        return [head, *(f"{tokens:,} tokens, {_why(part)}" for part, tokens in self.computed())]

    def header(self) -> str:
        """Return the causes for an answer's header: ``changed=3000 (messages[0].content);new=7``.

        The header goes out before the replica reports what was cached, so this is expected.
        """
        return ";".join(_short(part, tokens) for part, tokens in self.computed()) or "none"

    def summary(self) -> str | None:
        """Return the causes for a line of a log: ``changed:3000,new:7``; None without any."""
        return ",".join(f"{cause}:{count}" for cause, count in self.tokens().items()) or None

    def as_json(self) -> dict[str, Any]:
        """Return the causes as JSON values, for the request log."""
        return {
            "tokens": {str(cause): count for cause, count in self.tokens().items()},
            "is_reported": self.is_reported,
            "why": [
                {"cause": str(part.cause), "tokens": tokens, "words": _why(part)}
                for part, tokens in self.computed()
            ],
        }


def covering(parts: Iterable[PromptPart], prompt_tokens: int) -> tuple[PromptPart, ...]:
    """Return the parts that are not empty; the last one ends with the prompt.

    A part that would begin before the end of the one before it begins there.
    """
    found: list[PromptPart] = []
    at = 0
    for part in parts:
        if part.stop > at:
            found.append(PromptPart(min(part.stop, prompt_tokens), part.cause, part.detail))
            at = part.stop
    return tuple(found)


_PLAIN: Final[Mapping[UncachedCause, str]] = {
    UncachedCause.NEW: "nobody has sent this beginning before",
    UncachedCause.SHORT: "less than a block or chunk, or the last block, which is always computed",
}


def _why(part: PromptPart) -> str:
    words = _PLAIN.get(part.cause, "") if part.detail is None else part.detail.words()
    return f"{part.cause}: {words}"


def _short(part: PromptPart, tokens: int) -> str:
    place = ""
    if isinstance(part.detail, Change):
        place = f" ({part.detail.place})"
    elif isinstance(part.detail, Declined):
        place = f" ({part.detail.why})"
    return f"{part.cause}={tokens}{place}"


def _duration(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:,.0f} min"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
