"""Our tokens against vLLM's own, for every kind of tokenizer, template and request.

vLLM's rendering application runs without an engine (`vllm_oracle`). What it
refuses must not be exact here; what is exact here must be equal; and the
shapes listed must be exact, so that "not exact" is no way out.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from router.prompt.prompt import Prompt
from router.prompt.prompt_reader import PromptReader
from tests.router.prompt.chat_shapes import (
    ANTHROPIC,
    CHAT_OPTIONS,
    COMPLETION_OPTIONS,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    TEMPLATES,
)
from tests.router.prompt.oracle import Oracle
from tests.router.prompt.tokenizer_makers import (
    KINDS,
    TEXT,
    gemma,
    gpt2,
    llama3,
    metaspace,
    write_model,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"),
]


class Compared:
    """Collects what differs, so that one run shows all of it."""

    def __init__(self, oracle: Oracle, model: Path, *args: str) -> None:
        self.oracle = oracle
        self.model = model
        self.args = args
        self.differ: list[str] = []
        self.exact = 0
        template = args[args.index("--chat-template") + 1] if args else None
        self.reader = PromptReader.load(model, chat_template=template)

    def ask(self, name: str, endpoint: str, body: dict[str, Any]) -> None:
        before = json.dumps(body)
        theirs = self.oracle.tokens(self.model, endpoint, body, self.args)
        prompt = self.reader.read_now(endpoint, body)
        assert json.dumps(body) == before, "reading must leave the body as it is"
        if problem := self._problem(prompt, theirs):
            self.differ.append(f"{endpoint} {name}: {problem}")
        self.exact += prompt.exact

    @staticmethod
    def _problem(prompt: Prompt, theirs: list[int] | None) -> str | None:
        if theirs is None:
            # Refused by the replica: its tokens do not exist. Ours may, where
            # what it refuses is not about the prompt.
            return None
        if not prompt.exact:
            return f"not exact ({prompt.doubt})"
        ours = None if prompt.token_ids is None else list(prompt.token_ids)
        if ours != theirs:
            return f"ours {ours} theirs {theirs} of {prompt.text!r}"
        return None

    def done(self, at_least: int) -> None:
        assert not self.differ, "\n".join(self.differ[:20])
        assert self.exact >= at_least


@pytest.fixture(scope="module", params=TEMPLATES)
def template(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(template: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(template) / "model"
    return write_model(directory, llama3(), TEMPLATES[template])


@pytest.mark.parametrize("endpoint", ["/tokenize", "/v1/chat/completions"])
def test_chats_are_exact_in_every_shape(oracle: Oracle, model: Path, endpoint: str) -> None:
    compared = Compared(oracle, model)
    options = CHAT_OPTIONS | (COMPLETION_OPTIONS if endpoint != "/tokenize" else {})
    for name, messages in MESSAGES.items():
        for option, more in options.items():
            compared.ask(f"{name}, {option}", endpoint, {"messages": messages, **more})
    compared.done(at_least=40)


def test_completions_are_exact(oracle: Oracle, model: Path) -> None:
    compared = Compared(oracle, model)
    for name, body in COMPLETIONS.items():
        compared.ask(name, "/v1/completions", body)
        if isinstance(body["prompt"], str):
            compared.ask(name, "/tokenize", body)
    compared.done(at_least=len(COMPLETIONS))


def test_responses_are_exact(oracle: Oracle, model: Path) -> None:
    compared = Compared(oracle, model)
    for name, body in RESPONSES.items():
        compared.ask(name, "/v1/responses", body)
    compared.done(at_least=5)


def test_anthropic_messages_are_exact(oracle: Oracle, model: Path) -> None:
    compared = Compared(oracle, model)
    for name, body in ANTHROPIC.items():
        compared.ask(name, "/v1/messages", body)
    compared.done(at_least=5)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tokenizer_is_exact(oracle: Oracle, kind: str, tmp_path: Path) -> None:
    compare_tokenizer(oracle, write_model(tmp_path / "model", KINDS[kind](), TEMPLATES["parts"]))


CLASSES: dict[str, tuple[Tokenizer, dict[str, Any], dict[str, Any]]] = {
    "Qwen2Tokenizer": (llama3(), {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None}, {}),
    "Qwen2TokenizerFast, no tokens": (
        gpt2(),
        {
            "tokenizer_class": "Qwen2TokenizerFast",
            "eos_token": None,
            "pad_token": None,
            "bos_token": None,
            "unk_token": None,
        },
        {},
    ),
    "qwen2 by its model": (llama3(), {}, {"model_type": "qwen2"}),
    "LlamaTokenizer": (
        metaspace("always", split=True)(),
        {"tokenizer_class": "LlamaTokenizer"},
        {},
    ),
    "LlamaTokenizer, legacy": (
        metaspace("first", split=True)(),
        {"tokenizer_class": "LlamaTokenizerFast", "legacy": True},
        {},
    ),
    "LlamaTokenizer, no prefix": (
        metaspace("first", split=True)(),
        {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False, "legacy": False},
        {},
    ),
    "LlamaTokenizer, add_bos_token": (
        metaspace("first", split=True)(),
        {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "add_eos_token": True},
        {},
    ),
    "GPT2Tokenizer": (llama3(), {"tokenizer_class": "GPT2Tokenizer"}, {}),
    "GPT2Tokenizer, prefix": (
        gpt2(),
        {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True},
        {},
    ),
    "GemmaTokenizer": (gemma(), {"tokenizer_class": "GemmaTokenizer", "bos_token": "<s>"}, {}),
    "phi3 with LlamaTokenizer": (
        metaspace("always", split=True)(),
        {"tokenizer_class": "LlamaTokenizerFast"},
        {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]},
    ),
    "mistral": (
        metaspace("first", split=True)(),
        {"tokenizer_class": "LlamaTokenizer"},
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
    ),
    "no class": (llama3(), {"tokenizer_class": None}, {}),
    "tokens of the configuration": (
        llama3(),
        {
            "added_tokens_decoder": {
                "0": {"content": "<s>", "special": True},
                "899": {"content": "dog", "lstrip": True, "normalized": False, "special": False},
                "2000": {"content": "<extra>", "normalized": False, "special": True},
            },
            "additional_special_tokens": ["<|more|>"],
            "image_token": "<image>",
            "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
        },
        {},
    ),
    "tokens that are new": (llama3(), {"sep_token": "<sep>", "extra_special_tokens": ["<x>"]}, {}),
}


@pytest.mark.parametrize("name", CLASSES)
def test_classes_that_transformers_builds_anew_are_exact(
    oracle: Oracle, name: str, tmp_path: Path
) -> None:
    tokenizer, config, model = CLASSES[name]
    directory = write_model(
        tmp_path / "model", tokenizer, TEMPLATES["parts"], config=config, model=model
    )
    compare_tokenizer(oracle, directory)


def compare_tokenizer(oracle: Oracle, model: Path) -> None:
    compared = Compared(oracle, model)
    for name, body in COMPLETIONS.items():
        compared.ask(name, "/v1/completions", body)
    for name in ("turns", "unicode", "special in text", "spaces", "long", "parts with more"):
        compared.ask(name, "/v1/chat/completions", {"messages": MESSAGES[name]})
    for name in (
        "<sep> a <x>b",
        "<image> <|more|>x <extra>",
        "the dog dogs <mask> <pad>x",
        *TEXT[:7],
    ):
        compared.ask(name, "/tokenize", {"prompt": name})
    compared.done(at_least=20)


def test_a_template_given_to_the_server_is_exact(oracle: Oracle, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", llama3(), TEMPLATES["chatml"])
    other = tmp_path / "other.jinja"
    other.write_text(TEMPLATES["everything"])
    compared = Compared(oracle, model, "--chat-template", str(other))
    for name, messages in MESSAGES.items():
        compared.ask(name, "/v1/chat/completions", {"messages": messages})
    compared.done(at_least=20)


def test_templates_by_name_are_exact(oracle: Oracle, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", llama3(), TEMPLATES["chatml"])
    more = model / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text(TEMPLATES["everything"])
    compared = Compared(oracle, model)
    for name, messages in MESSAGES.items():
        for option in ("plain", "one tool"):
            body = {"messages": messages, **CHAT_OPTIONS[option]}
            compared.ask(f"{name}, {option}", "/tokenize", body)
    compared.done(at_least=20)
