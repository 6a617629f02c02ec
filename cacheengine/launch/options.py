"""Reading vLLM's own options, as its parser does."""

from collections.abc import Sequence


def has_option(vllm_args: Sequence[str], *names: str) -> bool:
    """Whether one of these options is given; short ones, such as ``-dp``, by their names."""
    return any(_name_of(arg) in names for arg in vllm_args)


def value_of(vllm_args: Sequence[str], default: str, *names: str) -> str:
    """Return the value of an option, the last one where it is given several times."""
    value = default
    for index, arg in enumerate(vllm_args):
        if _name_of(arg) not in names:
            continue
        if "=" in arg:
            value = arg.split("=", 1)[1]
        elif index + 1 < len(vllm_args):
            value = vllm_args[index + 1]
    return value


def _name_of(argument: str) -> str | None:
    """Return the option that vLLM's parser takes an argument for, None if for a value.

    It reads underscores as dashes, and ``--option.key`` as a part of a JSON option.
    """
    if not argument.startswith("-"):
        return None
    name = argument.split("=", 1)[0]
    return name.split(".", 1)[0].replace("_", "-") if name.startswith("--") else name
