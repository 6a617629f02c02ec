"""Whether a chat template takes a message's content as a list of parts.

vLLM (``renderers/hf.py``) decides it by the template's source: content is a
list of parts where some loop goes over it, directly or through a macro's
parameter or a variable named ``content``; else it is one string. The same
questions are asked here, with the same blind spots, since the answer is part
of what the replica renders.
"""

from collections.abc import Iterator

from jinja2 import nodes


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
                    names.append(name)  # the loop goes on to it
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
