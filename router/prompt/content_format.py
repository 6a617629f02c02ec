"""Whether a chat template takes a message's content as a list of parts.

vLLM (``renderers/hf.py``) decides it by the template's source: content is a
list of parts where some loop goes over it, directly or through a macro's
parameter or a variable named ``content``; else it is one string. The same
questions are asked here, with the same blind spots, since the answer is part
of what the replica renders.
"""

from collections.abc import Iterator

import jinja2.nodes


class _UnclearTemplateError(Exception):
    """An assignment or loop has no single name: vLLM then gives up and says 'string'."""


def walks_content(tree: jinja2.nodes.Template) -> bool:
    """Whether the template loops over the content of a message."""
    try:
        return _has_content_loop(tree)
    except _UnclearTemplateError:
        return False


def _has_content_loop(tree: jinja2.nodes.Template) -> bool:
    messages = list(_message_names(tree))
    in_macro: dict[int, set[str]] = {}
    for macro in tree.find_all(jinja2.nodes.Macro):
        given = _content_parameters(tree, macro, messages)
        for loop in macro.find_all(jinja2.nodes.For):
            # A later macro without such parameters does not unmake an outer one's.
            in_macro[id(loop)] = given or in_macro.get(id(loop), set())
    for loop in tree.find_all(jinja2.nodes.For):
        over = loop.iter
        is_content = any(_refers_to(over, name, "content") for name in messages)
        if not is_content and isinstance(over, jinja2.nodes.Name):
            names = in_macro.get(id(loop))
            is_content = over.name == "content" if names is None else over.name in names
        if is_content:
            _name_of(loop.target)
            return True
    return False


def _message_names(tree: jinja2.nodes.Template) -> Iterator[str]:
    """Yield the loop variables that stand for one message."""
    lists = _names_of_messages(tree)
    for loop in tree.find_all(jinja2.nodes.For):
        if any(_refers_to(loop.iter, name) for name in lists):
            yield _name_of(loop.target)


def _names_of_messages(tree: jinja2.nodes.Template) -> list[str]:
    """Return ``messages`` and every name that it, or part of it, is assigned to."""
    names = ["messages"]
    for known in names:
        for assign in tree.find_all(jinja2.nodes.Assign):
            if _refers_to(assign.node, known):
                name = _name_of(assign.target)
                if name not in names:
                    names.append(name)  # the loop goes on to it
    return names


def _content_parameters(
    tree: jinja2.nodes.Template, macro: jinja2.nodes.Macro, messages: list[str]
) -> set[str]:
    """Return the parameters of a macro that are given a message's content somewhere."""
    parameters = [one.name for one in macro.args]
    found: set[str] = set()
    for call in tree.find_all(jinja2.nodes.Call):
        if not isinstance(call.node, jinja2.nodes.Name) or call.node.name != macro.name:
            continue
        given = [*zip(parameters, call.args, strict=False)]
        given += [(one.key, one.value) for one in call.kwargs if one.key in parameters]
        found |= {
            name
            for name, value in given
            if any(_refers_to(value, message, "content") for message in messages)
        }
    return found


def _refers_to(node: jinja2.nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether an expression is ``name`` (or ``name.key``), filtered, tested or sliced."""
    if isinstance(node, jinja2.nodes.Filter | jinja2.nodes.Test):
        return _refers_to(node.node, name, key)
    if isinstance(node, jinja2.nodes.Getitem) and isinstance(node.arg, jinja2.nodes.Slice):
        return _refers_to(node.node, name, key)
    if key is None:
        return isinstance(node, jinja2.nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, jinja2.nodes.Getitem):
        constant = isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == key
        return constant and _refers_to_name(node.node, name)
    return (
        isinstance(node, jinja2.nodes.Getattr)
        and node.attr == key
        and _refers_to_name(node.node, name)
    )


def _refers_to_name(node: jinja2.nodes.Node, name: str) -> bool:
    return isinstance(node, jinja2.nodes.Name) and node.ctx == "load" and node.name == name


def _name_of(target: jinja2.nodes.Node) -> str:
    if not isinstance(target, jinja2.nodes.Name):
        raise _UnclearTemplateError
    return target.name
