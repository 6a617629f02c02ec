"""What a client changed between two requests, by their outlines."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.record.uncached import ChangeKind
from router.waste.outline import NO_OUTLINE, Outline, OutlineChange

LONG = "a text that is long enough to be known again where a little of it differs " * 4
TALK: list[dict[str, Any]] = [
    {"role": role, "content": f"{LONG}{role}{number}"}
    for number, role in enumerate(("system", "user", "assistant", "user", "assistant", "user"))
]


def changed(before: dict[str, Any], after: dict[str, Any]) -> OutlineChange | None:
    return Outline.of(after).change_from(Outline.of(before))


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [*messages], **more}


def edited(number: int, content: str) -> list[dict[str, Any]]:
    return [*TALK[:number], {**TALK[number], "content": content}, *TALK[number + 1 :]]


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "description": f"It is {name}.", "input_schema": {"a": name}, **more}


@pytest.mark.parametrize(
    ("before", "after", "kind", "place"),
    [
        (chat(*TALK[:2]), chat(*TALK), ChangeKind.RENDERED, ""),
        (chat(*TALK), chat(*edited(0, "x")), ChangeKind.BEGINNING, "messages[0].content"),
        (chat(*TALK), chat(*edited(3, "x")), ChangeKind.EDITED, "messages[3].content"),
        (
            chat(*TALK),
            chat(*TALK[:2], {**TALK[2], "reasoning": "hm"}, *TALK[3:]),
            ChangeKind.EDITED,
            "messages[2]",
        ),
        (chat(*TALK), chat(*TALK[2:]), ChangeKind.CUT, "messages[0]"),
        (chat(*TALK), chat(TALK[0], *TALK[3:]), ChangeKind.CUT, "messages[1]"),
        (
            chat(*TALK),
            chat(TALK[0], {"role": "user", "content": "What was before."}, *TALK[4:]),
            ChangeKind.CUT,
            "messages[1]",
        ),
        (chat(*TALK, system="a"), chat(*TALK, system="b"), ChangeKind.BEGINNING, "system"),
        (
            {"input": TALK[1:], "instructions": "a"},
            {"input": TALK[1:], "instructions": "b"},
            ChangeKind.BEGINNING,
            "instructions",
        ),
        (
            chat(*TALK, tools=[tool("a"), tool("b")]),
            chat(*TALK, tools=[tool("b"), tool("a")]),
            ChangeKind.REORDERED,
            "tools",
        ),
        (
            chat(*TALK, tools=[tool("a"), tool("b")]),
            chat(*TALK, tools=[tool("a"), tool("b", description="It was.")]),
            ChangeKind.EDITED,
            "tools[1].description",
        ),
        (
            chat(*TALK, tools=[tool("a")]),
            chat(*TALK, tools=[tool("a"), tool("b")]),
            ChangeKind.EDITED,
            "tools[1]",
        ),
        (
            {"prompt": "12:01 " + LONG * 20},
            {"prompt": "12:02 " + LONG * 30},
            ChangeKind.BEGINNING,
            "prompt",
        ),
    ],
)
def test_the_first_field_that_differs_is_named(
    before: dict[str, Any], after: dict[str, Any], kind: ChangeKind, place: str
) -> None:
    found = changed(before, after)
    assert found is not None and (found.kind, found.place) == (kind, place)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (chat({"role": "user", "content": "a"}), chat({"role": "user", "content": "b"})),
        (chat(TALK[0], TALK[1]), chat(TALK[0], {"role": "user", "content": "Quite another one."})),
        (chat(system="a", messages=[]), chat(*TALK[:1], system="b")),
        (chat(*TALK[:1], tools=[tool("a")]), chat(*TALK[1:2], tools=[tool("b")])),
        ({"prompt": LONG * 20}, {"prompt": LONG * 30}),
        (chat(*TALK), chat(*TALK[:3])),
    ],
)
def test_another_conversation_is_no_change(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert changed(before, after) is None


def test_equal_messages_are_told_apart_by_their_places() -> None:
    again = {"role": "user", "content": "yes"}
    before = chat(TALK[0], again, TALK[2], again)
    found = changed(before, chat({**TALK[0], "content": "x"}, again, TALK[2], again))
    assert found == OutlineChange(ChangeKind.BEGINNING, "messages[0].content", None)


def test_what_no_template_prints_does_not_count() -> None:
    """Claude Code changes both in each turn."""

    def turn(number: int) -> Outline:
        header = {"type": "text", "text": f"x-anthropic-billing-header: {number}"}
        parts: list[dict[str, Any]] = [{"type": "text", "text": LONG}]
        if number == 1:
            parts[0]["cache_control"] = {"type": "ephemeral"}
        system = [header, {"type": "text", "text": "Be brief."}]
        return Outline.of(chat({"role": "user", "content": parts}, system=system))

    assert turn(1) == turn(2) != NO_OUTLINE


JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
NAMES = st.sampled_from(["messages", "input", "prompt", "tools", "system", "cache_salt"])
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "reasoning", "tool_calls"]), JSON)
)


@given(
    before=st.dictionaries(NAMES, JSON | MESSAGES), after=st.dictionaries(NAMES, JSON | MESSAGES)
)
def test_no_body_breaks_it(before: dict[str, Any], after: dict[str, Any]) -> None:
    found = changed(before, after)
    assert found is None or found.new_share is None or 0.0 <= found.new_share <= 1.0
    assert Outline.of(after).message_at(0.5)
