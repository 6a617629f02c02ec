"""How far a reader's tokens are those of the replicas, and how a replica is asked about it."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple

import aiohttp
import xxhash

_log = logging.getLogger("warmroute.prompt")

# Chosen to differ wherever tokenizers and templates are known to: spaces at the ends, digits,
# contractions, case, scripts without spaces, marks that compose, text that looks like special
# tokens; and for chats each role and kind of part.
TEXT_PROBES: Final[Sequence[str]] = (
    "",
    " ",
    "Hello world",
    " leading and trailing ",
    "It's 12345 o'clock, DON'T wait: 3.14 + 1e-9!\r\n\r\n\tdef f(x):\n        return x  # ok",
    "naïve café, cafe\u0301, Ångström, Å, ﬁne, ½, ①, İstanbul, Straße, ΣΊΣΥΦΟΣ",
    "日本語の文章です。中文句子,没有空格。한국어 문장입니다. ไทย العربية עברית हिन्दी",
    "👩‍👩‍👧‍👦 🇪🇺 \u200b\u00a0\u3000 … —– “quotes” ▁under ▁▁ Ġ Ċ",  # noqa: RUF001
    "<s>[INST] not special? [/INST]</s><|im_start|>user\n<|endoftext|> <unk> <mask> x",
    "a" * 40 + " " * 40 + "\n" * 5 + "=" * 40,
)

_WEATHER: Final = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["place"],
        },
    },
}
_CALL: Final = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"place": "Zürich", "days": 2}'},
}

_USER: Final = {"role": "user", "content": "Hello, who are you?"}
_ANSWER: Final = {"role": "assistant", "content": "  An answer.\n"}

CHAT_PROBES: Final[Sequence[Mapping[str, Any]]] = (
    {"messages": [_USER]},
    {"messages": [_USER], "add_generation_prompt": False},
    {"messages": [{"role": "system", "content": " Be brief.\n"}, _USER]},
    {"messages": [_USER, _ANSWER, {"role": "user", "content": "日本語 <s> ok?"}]},
    {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}],
            }
        ]
    },
    {"messages": [{"role": "user", "content": ""}]},
    {"messages": [_USER], "tools": [_WEATHER]},
    {
        "messages": [
            _USER,
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call00001", "content": "rain"},
        ],
        "tools": [_WEATHER],
    },
)


TOKENIZE: Final = "/tokenize"
RENDER_CHAT: Final = "/v1/chat/completions/render"
"""vLLM has it if it was started with ``--enable-scale-out``."""
_REFUSALS: Final = (400, 422)
_ABSENT: Final = (403, 404, 405, 501)
"""What vLLM answers at a path that it does not have, or that it was not started with."""
_ANSWER_S: Final = 5.0
"""For one probe at a replica: it takes milliseconds."""
HANGS: Final = "/tokenize does not answer in time"


class Trust(StrEnum):
    """How far the tokens of a reader are those of the replicas."""

    EXACT = "exact"
    """A replica gave equal tokens for all probes, or the files are of a kind that is tested to."""
    DOUBTFUL = "doubtful"
    """Probably equal: used, and not called exact."""
    REFUTED = "refuted"
    """Every replica that was asked gave other tokens: not used."""


class Comparison(NamedTuple):
    """What came of the probes of one kind at a replica."""

    equal: bool | None
    """Whether all tokens are ours; None where there was nothing to compare."""
    answers: int | None
    """What tells its answers from others; None if it gave none."""
    max_model_len: int | None
    """The tokens of its context, if it told them."""


class Agreement:
    """Which replicas gave a reader's tokens for one kind of prompt: text or chat."""

    def __init__(self, by_files: Trust) -> None:
        """``by_files`` is what counts as long as no replica was asked; REFUTED stays."""
        self._by_files = by_files
        self._found: dict[str, Comparison] = {}

    @property
    def trust(self) -> Trust:
        """How far the tokens equal the replicas', except for replicas that differ (`differs`)."""
        compared = any(each.equal is not None for each in self._found.values())
        if self._by_files is Trust.REFUTED or not compared:
            return self._by_files
        return Trust.EXACT if self.is_confirmed else Trust.REFUTED

    @property
    def is_confirmed(self) -> bool:
        """Whether a replica has given equal tokens."""
        return any(each.equal for each in self._found.values())

    def note(self, replica_url: str, found: Comparison) -> None:
        """Note what came of a comparison."""
        if found.equal is not None or found.answers is not None:
            self._found[replica_url] = found

    def is_equal(self, replica_url: str) -> bool | None:
        """Whether this replica gave equal tokens; None where that was not found out."""
        found = self._found.get(replica_url)
        return None if found is None else found.equal

    def forget(self, replica_url: str) -> None:
        """Forget a replica: it serves something else now."""
        self._found.pop(replica_url, None)

    def differs(self, replica_url: str) -> bool:
        """Whether this replica gave other tokens than the ones that are used."""
        return self.trust is not Trust.REFUTED and self.is_equal(replica_url) is False

    # Replicas among themselves, whatever our tokens are

    def answers(self, replica_url: str) -> int | None:
        """Return what tells a replica's answers from others; None if it gave none."""
        found = self._found.get(replica_url)
        return None if found is None else found.answers

    @property
    def usual(self) -> int | None:
        """The answers that most replicas gave; None if none gave any."""
        counted = Counter(each.answers for each in self._found.values() if each.answers is not None)
        return max(counted, key=counted.__getitem__, default=None)

    def alike(self) -> Collection[str]:
        """Return the replicas that gave the usual answers."""
        usual = self.usual
        if usual is None:
            return ()
        return {url for url, each in self._found.items() if each.answers == usual}

    def deviates(self, replica_url: str) -> bool:
        """Whether this replica gave other answers than most."""
        return self.answers(replica_url) not in (None, self.usual)


async def compare(
    session: aiohttp.ClientSession,
    replica_url: str,
    probes: Sequence[Mapping[str, Any]],
    ours: Callable[[Mapping[str, Any]], list[int] | None],
    *,
    path: str = TOKENIZE,
    headers: Mapping[str, str] | None = None,
) -> Comparison:
    """Compare ``ours(probe)`` with what the replica answers at ``path`` for each probe.

    Probes that the replica refuses (a template need not take every role), or that we have no tokens
    for, are not compared. Raises what aiohttp raises, TimeoutError, and ValueError or KeyError when
    the answer is not one of ``/tokenize``. A replica need not have another ``path``.
    """
    url = f"{replica_url.rstrip('/')}{path}"
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    # The router's session adds none by itself, and without it vLLM answers 400.
    typed = {**(headers or {}), "Content-Type": "application/json"}
    equal: bool | None = None
    max_model_len: int | None = None
    answers = xxhash.xxh3_64()
    told = False
    for at, probe in enumerate(probes):
        async with session.post(url, json=probe, headers=typed, timeout=timeout) as response:
            if response.status in _REFUSALS or (path != TOKENIZE and response.status in _ABSENT):
                continue
            response.raise_for_status()
            answer = await response.json()
        if path != TOKENIZE and not (isinstance(answer, dict) and "token_ids" in answer):
            continue  # older versions answer otherwise
        if not isinstance(answer, dict):
            raise ValueError("the answer is no object")
        tokens = answer["tokens" if path == TOKENIZE else "token_ids"]
        max_model_len = answer.get("max_model_len")
        told = True
        answers.update(json.dumps([at, tokens]).encode())
        expected = ours(probe)
        if expected is None:
            continue
        if tokens != expected and equal is not False:
            _report(url, probe, expected, tokens)
        equal = equal is not False and tokens == expected
    return Comparison(equal, answers.intdigest() if told else None, max_model_len)


def _report(url: str, probe: Mapping[str, Any], ours: list[int], theirs: list[int]) -> None:
    pairs = enumerate(zip(ours, theirs, strict=False))
    at = next((i for i, (mine, yours) in pairs if mine != yours), min(len(ours), len(theirs)))
    _log.error(
        "%s: tokens differ from ours at %d of %d for %.200s; ours are not used for prompts of this "
        "kind there until they agree. Check tokenizer.path, and tokenizer.chat_template if the "
        "replica runs with --chat-template",
        url,
        at,
        len(theirs),
        json.dumps(probe, ensure_ascii=False),
    )
