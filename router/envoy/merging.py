"""An operator's own settings of Envoy over those that are made here."""

from typing import Any


def merge(base: Any, own: Any) -> Any:
    """Return ``base`` with an operator's own settings over it.

    Mappings are merged key by key and lists of things with a ``name`` thing by thing; one that is
    not there is added at the end, except filters of HTTP, which go before the first: the last
    one there must be the router. All else is replaced.
    """
    if isinstance(base, dict) and isinstance(own, dict):
        return {
            **base,
            **{key: merge(base[key], own[key]) if key in base else own[key] for key in own},
        }
    if _are_named(base) and _are_named(own):
        mine = {each["name"]: each for each in base}
        theirs = {each["name"]: each for each in own}
        merged = [
            merge(each, theirs[name]) if name in theirs else each for name, each in mine.items()
        ]
        added = [each for name, each in theirs.items() if name not in mine]
        is_chain = bool(merged) and merged[-1]["name"] == "router"
        return [*added, *merged] if is_chain else [*merged, *added]
    return own


def _are_named(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(e, dict) and "name" in e for e in value)
