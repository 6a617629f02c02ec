"""A model's chat template, rendered as vLLM 0.32 and transformers 5 render it.

Two facts about the template decide what it receives: whether it takes a message's content as a
list of parts or as one string, and whether it knows the ``developer`` role. Both are found in its
source with the rules of vLLM's ``renderers/hf.py``. Content is a list of parts if a loop iterates
over it: directly, through a macro's parameter, or through a variable named ``content``. The rules
miss the same cases as vLLM's, because the router must render what the replica renders. The jinja
environment is that of transformers' ``utils/chat_template_utils.py``.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes

from warmroute_common.config_reader import ConfigError

ContentFormat = Literal["string", "openai"]
Message = dict[str, Any]

# Marks the end of the text to continue. What the template writes after it to close the message
# is cut away.
_CONTINUE_HERE: Final = "CONTINUE_FINAL_MESSAGE_TAG "


class _UnclearTemplateError(Exception):
    """An assignment or loop has no single name: vLLM then gives up and says 'string'."""


def walks_content(tree: nodes.Template) -> bool:
    """Whether the template loops over the content of a message."""
    try:
        return _has_content_loop(tree)
    except _UnclearTemplateError:
        return False


def _has_content_loop(tree: nodes.Template) -> bool:
    messages = list(_message_names(tree))
    in_macro: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        given = _content_parameters(tree, macro, messages)
        for loop in macro.find_all(nodes.For):
            # A later macro without such parameters does not unmake an outer one's.
            in_macro[id(loop)] = given or in_macro.get(id(loop), set())
    for loop in tree.find_all(nodes.For):
        over = loop.iter
        is_content = any(_refers_to(over, name, "content") for name in messages)
        if not is_content and isinstance(over, nodes.Name):
            names = in_macro.get(id(loop))
            is_content = over.name == "content" if names is None else over.name in names
        if is_content:
            _name_of(loop.target)
            return True
    return False


def _message_names(tree: nodes.Template) -> Iterator[str]:
    """Yield the loop variables that stand for one message."""
    lists = _names_of_messages(tree)
    for loop in tree.find_all(nodes.For):
        if any(_refers_to(loop.iter, name) for name in lists):
            yield _name_of(loop.target)


def _names_of_messages(tree: nodes.Template) -> list[str]:
    """Return ``messages`` and every name that it, or part of it, is assigned to."""
    names = ["messages"]
    for known in names:
        for assign in tree.find_all(nodes.Assign):
            if _refers_to(assign.node, known):
                name = _name_of(assign.target)
                if name not in names:
                    names.append(name)  # the loop continues to it
    return names


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, messages: list[str]) -> set[str]:
    """Return the parameters of a macro that are given a message's content somewhere."""
    parameters = [one.name for one in macro.args]
    found: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        given = [*zip(parameters, call.args, strict=False)]
        given += [(one.key, one.value) for one in call.kwargs if one.key in parameters]
        found |= {
            name
            for name, value in given
            if any(_refers_to(value, message, "content") for message in messages)
        }
    return found


def _refers_to(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether an expression is ``name`` (or ``name.key``), filtered, tested or sliced."""
    match node:
        case nodes.Filter(node=inner) | nodes.Test(node=inner):
            return _refers_to(inner, name, key)
        case nodes.Getitem(node=inner, arg=nodes.Slice()):
            return _refers_to(inner, name, key)
        case nodes.Getitem(node=inner, arg=nodes.Const(value=found)) if key is not None:
            return bool(found == key) and _is_name(inner, name)
        case nodes.Getattr(node=inner, attr=found) if key is not None:
            return bool(found == key) and _is_name(inner, name)
    return key is None and _is_name(node, name)


def _is_name(node: nodes.Node | None, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _name_of(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _UnclearTemplateError
    return target.name


class TemplateRefusedError(Exception):
    """The template, or the rules around it, refuse this conversation."""


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}``: marks answers for training, renders as is."""

    tags: set[str] = {"generation"}  # noqa: RUF012  (jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)  # what is set in it ends with it


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _bare_environment() -> jinja2.Environment:
    return jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )


def _environment(now: Callable[[], datetime]) -> jinja2.Environment:
    environment = _bare_environment()
    environment.add_extension(_GenerationTag)
    # Unlike jinja's own, this escapes no HTML and keeps non-ASCII text.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


class ChatTemplate:
    """One template, compiled; safe to use from several threads.

    Raises `jinja2.TemplateSyntaxError` when the source is not a template.
    """

    def __init__(self, source: str, *, now: Callable[[], datetime] = datetime.now) -> None:
        self.source = source
        environment = _environment(now)
        self._compiled = environment.from_string(source)
        tree = environment.parse(source)
        self.variables: frozenset[str] = frozenset(jinja2.meta.find_undeclared_variables(tree))
        self.content_format: ContentFormat = "openai" if walks_content(tree) else "string"
        self.knows_developer = '"developer"' in source or "'developer'" in source
        self.wants_system_first = self._refuses_inline_system()

    def render(
        self,
        conversation: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any],
    ) -> str:
        """Return the prompt's text; raise `TemplateRefusedError` where there is none.

        ``conversation`` is what `router.prompt.chat_messages` makes; it is not changed.
        ``variables`` are special tokens, the request's chat_template_kwargs and its fields that
        steer the rendering, of which the template does not see ``continue_final_message``.
        """
        given = {"documents": None, "add_generation_prompt": False, **variables}
        continued: bool | str = given.pop("continue_final_message", False)
        if not conversation:
            raise TemplateRefusedError("there are no messages")
        if continued and given["add_generation_prompt"]:
            raise TemplateRefusedError("continue_final_message excludes add_generation_prompt")
        messages = self._with_roles_it_knows(conversation)
        final = ""
        if continued:
            field = continued if isinstance(continued, str) else "content"
            messages, final = self._mark_end(messages, field)
        try:
            text = self._compiled.render({**given, "messages": messages, "tools": tools})
        except Exception as error:
            # A template is a program of the model's author: whatever it raises
            # means that it does not render this conversation.
            raise TemplateRefusedError(f"the chat template fails: {error}") from error
        return _cut_at_mark(text, final) if continued else text

    def _with_roles_it_knows(self, conversation: Sequence[Message]) -> list[Message]:
        if self.knows_developer or all(one["role"] != "developer" for one in conversation):
            return list(conversation)
        return _one_system_message([_as_system(one) for one in conversation])

    def _mark_end(self, messages: list[Message], field: str) -> tuple[list[Message], str]:
        """Return the messages with the end of the last one marked, and its text."""
        last = dict(messages[-1])
        content = last.get(field)
        if content is None or field not in self.source:
            raise TemplateRefusedError(f"the last message has no {field} that could be continued")
        final = content
        if isinstance(content, str):
            last[field] = content + _CONTINUE_HERE
        else:
            at = max((at for at, part in enumerate(content) if "text" in part), default=None)
            if at is None:
                raise TemplateRefusedError("the last message has no text that could be continued")
            final = content[at]["text"]
            marked = {**content[at], "text": final + _CONTINUE_HERE}
            last[field] = [*content[:at], marked, *content[at + 1 :]]
        return [*messages[:-1], last], final

    def _refuses_inline_system(self) -> bool:
        """Whether a system message after the first raises, as /v1/messages must know."""
        probe = [{"role": role, "content": "t"} for role in ("system", "user") * 2]
        # Deliberately the bare environment: vLLM's own probe has neither the
        # filters nor the functions of the real one, and we must agree with it.
        try:
            _bare_environment().from_string(self.source).render(
                messages=probe, add_generation_prompt=False
            )
        except jinja2.TemplateError:
            return True
        except Exception:  # noqa: BLE001  (a replica with such a template does not start)
            return False
        return False


def _cut_at_mark(text: str, final: str) -> str:
    mark = _CONTINUE_HERE.strip()
    if final.strip() not in text or mark not in text:
        raise TemplateRefusedError("the chat template drops the message that should be continued")
    end = text.rindex(mark)
    kept = text[:end]
    if text.startswith(_CONTINUE_HERE, end):
        return kept
    return kept.rstrip()  # the template trims what it is given


def _as_system(message: Message) -> Message:
    if message["role"] != "developer":
        return message
    return {key: value for key, value in {**message, "role": "system"}.items() if key != "tools"}


def _one_system_message(messages: list[Message]) -> list[Message]:
    """Merge all system messages into the first place, unless they are there already."""
    places = [index for index, one in enumerate(messages) if one["role"] == "system"]
    if places in ([], [0]):
        return messages
    texts = [_plain_text(messages[index]["content"]) for index in places]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(one for one in messages if one["role"] != "system")]


def _plain_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not all("text" in part for part in content):
        raise TemplateRefusedError("a system message that is merged with others has a medium")
    return "\n".join(part["text"] for part in content)


def read_source(path: Path) -> str:
    """Return the source of a template in a file; raise `ConfigError` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            str(path), "", f"cannot be read ({error})", "give a file with a chat template"
        ) from error


def compiled(name: str, source: str) -> ChatTemplate:
    """Return the template of a source; raise `ConfigError` if it is none."""
    try:
        return ChatTemplate(source)
    except jinja2.TemplateError as error:
        raise ConfigError(
            "chat template", name, f"is no valid template ({error})", "check its source"
        ) from error
