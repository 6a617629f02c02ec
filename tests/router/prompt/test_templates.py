"""What a template's source decides, and what it is given."""

from datetime import datetime
from typing import Any

import jinja2
import pytest

from router.prompt.chat_template import ChatTemplate, TemplateRefusedError
from tests.router.prompt.chat_shapes import TEMPLATES

USER: dict[str, Any] = {"role": "user", "content": "hi"}


def render(source: str, *messages: dict[str, Any], **options: Any) -> str:
    return ChatTemplate(source).render(list(messages), variables=options)


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (TEMPLATES["chatml"], "string"),
        (TEMPLATES["agent"], "string"),
        (TEMPLATES["parts"], "openai"),
        (TEMPLATES["macro"], "openai"),
        ("{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}", "openai"),
        (
            "{% for m in messages[1:] %}{% for c in m['content'] %}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% set x = messages|list %}"
            "{% for m in x %}{% for c in m.content %}{% endfor %}{% endfor %}",
            "openai",
        ),
        ("{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}", "string"),
        ("{% for c in content %}{% endfor %}", "openai"),
        # A loop over a parameter that is never given content is not a loop over content.
        (
            "{% macro f(content) %}{% for c in content %}{% endfor %}{% endmacro %}{{ f(1) }}",
            "string",
        ),
        # Unpacking gives up, as vLLM does.
        ("{% for a, b in messages %}{% for c in a.content %}{% endfor %}{% endfor %}", "string"),
        # Names that refer to each other end.
        ("{% set a = messages %}{% set b = a %}{% set a = b %}", "string"),
    ],
)
def test_the_source_decides_how_content_is_given(source: str, form: str) -> None:
    assert ChatTemplate(source).content_format == form


def test_json_is_printed_as_it_is() -> None:
    value = {"b": "<ü>", "a": [1, 2.0, None]}
    rendered = render("{{ messages[0].x | tojson }}", {"role": "user", "x": value})
    assert rendered == '{"b": "<ü>", "a": [1, 2.0, null]}'


def test_the_clock_is_the_one_given() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2026, 7, 26))
    assert template.render([USER], variables={}) == "26 Jul 2026"


def test_a_template_that_raises_refuses() -> None:
    with pytest.raises(TemplateRefusedError, match="no such role"):
        render("{{ raise_exception('no such role') }}", USER)
    with pytest.raises(TemplateRefusedError):
        render("{{ messages[0].nothing.at_all }}", USER)


def test_a_template_cannot_reach_out() -> None:
    with pytest.raises(TemplateRefusedError):
        render("{{ ''.__class__.__mro__[1].__subclasses__() }}", USER)
    with pytest.raises(TemplateRefusedError):
        render("{{ messages.append(1) }}", USER)


def test_no_messages_are_refused() -> None:
    with pytest.raises(TemplateRefusedError):
        render("x")


def test_a_source_that_is_no_template_is_an_error() -> None:
    with pytest.raises(jinja2.TemplateSyntaxError):
        ChatTemplate("{% for %}")


def test_developers_become_one_system_message_where_they_are_not_known() -> None:
    rendered = render(
        "{% for m in messages %}[{{ m.role }} {{ m.content }}]{% endfor %}",
        {"role": "system", "content": "one"},
        USER,
        {"role": "developer", "content": "two", "tools": None},
    )
    assert rendered == "[system one\n\ntwo][user hi]"


def test_the_last_message_is_left_open() -> None:
    source = "{% for m in messages %}<{{ m.content }}></end>{% endfor %}"
    assert render(source, USER, continue_final_message=True) == "<hi"
    with pytest.raises(TemplateRefusedError):
        render(source, USER, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(TemplateRefusedError):
        render("nothing of it content", USER, continue_final_message=True)


def test_inline_system_messages_are_known_to_be_refused() -> None:
    assert ChatTemplate(TEMPLATES["strict"]).wants_system_first
    assert not ChatTemplate(TEMPLATES["chatml"]).wants_system_first
