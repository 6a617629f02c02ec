"""Prompts with images, audio and video: which keys are certain, and what tells them apart."""

import base64
from pathlib import Path
from typing import Any

import pytest

from router.prompt import media
from router.prompt.prompt import Prompt
from router.prompt.prompt_reader import PromptReader
from tests.router.prompt.chat_shapes import TEMPLATES
from tests.router.prompt.helpers import LONG, VISION, data_url, image
from tests.router.prompt.tokenizer_makers import llama3, write_model
from warmroute_common.keys import HashScheme

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
SCHEME = HashScheme("xxhash")

# Pictures before the texts of their message, wherever they stand there.
PICTURES_FIRST = """\
{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>
{%- for part in m.content %}{% if part.type == 'image' %}<|pad|>{% endif %}{% endfor %}
{%- for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
{%- endfor %}
"""


def text(written: str) -> dict[str, Any]:
    return {"type": "text", "text": written}


def chat(*parts: dict[str, Any], before: str = LONG, **more: Any) -> dict[str, Any]:
    system = {"role": "system", "content": before}
    return {"messages": [system, {"role": "user", "content": list(parts)}], **more}


def reader_of(directory: Path, template: str, **files: Any) -> PromptReader:
    return PromptReader.load(write_model(directory, llama3(), template, **files))


@pytest.fixture
def reader(tmp_path: Path) -> PromptReader:
    return reader_of(tmp_path / "model", VISION)


def certain(prompt: Prompt) -> list[int]:
    assert not prompt.exact
    assert prompt.doubt
    return list(prompt.token_ids or ())


def encoded(written: str) -> list[int]:
    ids: list[int] = llama3().encode(written, add_special_tokens=False).ids
    return ids


def test_tokens_end_right_before_the_first_medium(reader: PromptReader) -> None:
    body = chat(text(LONG + " look:"), image(), text("What is it?"))
    ids = certain(reader.read_now(CHAT, body))
    whole = encoded(f"<s><|system|>{LONG}</s><|user|>{LONG} look:")
    assert whole[: len(ids)] == ids
    assert 0 < len(whole) - len(ids) <= 8


def test_keys_are_those_of_the_same_prompt_without_what_follows(reader: PromptReader) -> None:
    plain = reader.read_now(CHAT, chat(text(LONG + " look:")))
    shown = reader.read_now(CHAT, chat(text(LONG + " look:"), image()))
    keys = shown.chain(SCHEME, 16)
    assert keys
    assert plain.chain(SCHEME, 16)[: len(keys)] == keys
    assert keys == SCHEME.chain(shown.token_ids or [], 16)


def test_a_template_that_moves_pictures_is_noticed(tmp_path: Path) -> None:
    reader = reader_of(tmp_path / "model", PICTURES_FIRST)
    ids = certain(
        reader.read_now(
            CHAT,
            {
                **chat(text(LONG), image()),
                "messages": [
                    {"role": "system", "content": [text(LONG)]},
                    {"role": "user", "content": [text(LONG), image()]},
                ],
            },
        )
    )
    before = encoded(f"<s><|system|>{LONG}<|user|>")
    assert before[: len(ids)] == ids
    assert len(before) - len(ids) <= 8


def test_where_content_is_one_string_only_what_precedes_its_message_counts(tmp_path: Path) -> None:
    """vLLM puts the model's placeholder in front of the message's text, or into it."""
    reader = reader_of(tmp_path / "model", TEMPLATES["chatml"])
    ids = certain(reader.read_now(CHAT, chat(text(LONG), image())))
    before = encoded(f"<|system|>{LONG}</s>\n<|user|>")
    assert before[: len(ids)] == ids
    assert len(before) - len(ids) <= 8


@pytest.mark.parametrize(
    "body",
    [
        chat(image(), before="Be brief."),
        chat(text("a <|vision|><|pad|> of the client's own"), image()),
        chat(image(), before=LONG + "</s>"),
        chat(image(), before=LONG + "<image>"),
        chat(image(), truncate_prompt_tokens=2000),
        chat({"type": "prompt_embeds", "data": "AAAA"}),
        chat({"type": "file", "file": {"file_id": "x"}}),
        chat(text("lone \ud800"), image()),
    ],
)
def test_without_certainty_there_are_no_tokens(tmp_path: Path, body: dict[str, Any]) -> None:
    reader = reader_of(tmp_path / "model", VISION)
    prompt = reader.read_now(CHAT, body)
    assert certain(prompt) == []
    assert prompt.chain(SCHEME, 16) == []
    assert prompt.text_chain() or len(prompt.text) < 1024


def test_models_that_put_media_at_the_start_have_no_keys(tmp_path: Path) -> None:
    reader = reader_of(tmp_path / "model", VISION, model={"model_type": "paligemma"})
    assert certain(reader.read_now(CHAT, chat(text(LONG), image()))) == []


def test_a_literal_placeholder_after_the_first_medium_changes_nothing(reader: PromptReader) -> None:
    body = chat(image(), text("fine"))
    body["messages"].append({"role": "user", "content": "<|vision|><image></s>"})
    assert certain(reader.read_now(CHAT, body))


ALIKE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("detail", image(), {**image(), "image_url": {"url": data_url(b"one"), "detail": "low"}}),
    ("uuid", image(uuid="u"), image(b"two", uuid="u")),
    ("uuid without data", image(uuid="u"), {"type": "image_url", "image_url": None, "uuid": "u"}),
    ("no type", image(), {"image_url": data_url(b"one")}),
]
DIFFERENT: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("bytes", image(), image(b"two")),
    ("url", image(), {"type": "image_url", "image_url": {"url": "https://host/one.png"}}),
    ("uuid", image(uuid="u"), image(uuid="v")),
    ("uuid or not", image(), image(uuid="u")),
    (
        "kind",
        {"type": "video_url", "video_url": {"url": "https://host/x"}},
        {"type": "audio_url", "audio_url": {"url": "https://host/x"}},
    ),
    (
        "audio",
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": "AAAB", "format": "wav"}},
    ),
    (
        "embeddings",
        {"type": "image_embeds", "image_embeds": "A"},
        {"type": "image_embeds", "image_embeds": "B"},
    ),
]


def text_keys(reader: PromptReader, part: dict[str, Any], **more: Any) -> tuple[list[int], bytes]:
    prompt = reader.read_now(CHAT, chat(part, text(LONG), before="Be brief.", **more))
    assert prompt.text_chain()
    return prompt.text_chain(), prompt.affinity


@pytest.mark.parametrize("with_tokenizer", [True, False])
@pytest.mark.parametrize(("name", "one", "other"), ALIKE)
def test_equal_media_share_all(
    reader: PromptReader, with_tokenizer: bool, name: str, one: Any, other: Any
) -> None:
    used = reader if with_tokenizer else PromptReader(None)
    assert text_keys(used, one) == text_keys(used, other)


@pytest.mark.parametrize("with_tokenizer", [True, False])
@pytest.mark.parametrize(("name", "one", "other"), DIFFERENT)
def test_different_media_share_nothing(
    reader: PromptReader, with_tokenizer: bool, name: str, one: Any, other: Any
) -> None:
    used = reader if with_tokenizer else PromptReader(None)
    (keys, affinity), (others, other_affinity) = text_keys(used, one), text_keys(used, other)
    assert not set(keys) & set(others)
    assert affinity != other_affinity


def test_media_processed_otherwise_share_nothing(reader: PromptReader) -> None:
    keys, _ = text_keys(reader, image())
    others, _ = text_keys(reader, image(), mm_processor_kwargs={"num_crops": 4})
    assert not set(keys) & set(others)


def test_different_media_behind_a_long_beginning_prefer_different_replicas(
    reader: PromptReader,
) -> None:
    one, other, again = (
        reader.read_now(CHAT, chat(image(content))) for content in (b"one", b"two", b"one")
    )
    assert one.chain(SCHEME, 16) == other.chain(SCHEME, 16)
    assert one.affinity == again.affinity != other.affinity


def test_the_same_picture_is_the_same_at_every_endpoint(reader: PromptReader) -> None:
    source = {
        "type": "base64",
        "media_type": "image/png",
        "data": base64.b64encode(b"one").decode(),
    }
    bodies = {
        CHAT: {"messages": [{"role": "user", "content": [text("a"), image()]}]},
        MESSAGES: {
            "messages": [
                {"role": "user", "content": [text("a"), {"type": "image", "source": source}]}
            ]
        },
        RESPONSES: {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "a"},
                        {"type": "input_image", "image_url": data_url(b"one")},
                    ],
                }
            ]
        },
    }
    texts = {reader.read_now(endpoint, body).text for endpoint, body in bodies.items()}
    assert len(texts) == 1


def test_pictures_in_a_tools_result_come_after_it(reader: PromptReader) -> None:
    result = {
        "type": "tool_result",
        "tool_use_id": "call",
        "content": [
            {"type": "text", "text": LONG},
            {"type": "image", "source": {"type": "url", "url": "https://host/a.png"}},
        ],
    }
    body = {"messages": [{"role": "user", "content": [result]}]}
    ids = certain(reader.read_now(MESSAGES, body))
    whole = encoded(f"<s><|tool|>{LONG}</s><|user|>")
    assert whole[: len(ids)] == ids
    assert len(whole) - len(ids) <= 8


def test_the_count_of_tokens_does_not_follow_the_bytes(reader: PromptReader) -> None:
    small, large = (
        reader.read_now(CHAT, chat(text(LONG), image(content))) for content in (b"x", b"x" * 10**6)
    )
    without = reader.read_now(CHAT, chat(text(LONG)))
    assert small.token_count == large.token_count
    assert abs(small.token_count - without.token_count - media.MEDIUM_CHARS // 4) < 100
    bare = PromptReader(None).read_now(CHAT, chat(text(LONG), image(b"x" * 10**6)))
    assert bare.token_count < 2 * small.token_count


def test_the_next_turn_costs_only_its_new_text(reader: PromptReader) -> None:
    first = chat(text(LONG), image())
    reader.read_now(CHAT, first).chain(SCHEME, 16)
    before = (reader.memo.tokens_tokenized, reader.memo.blocks_hashed)
    more = [{"role": "assistant", "content": "A fox."}, {"role": "user", "content": "Why?"}]
    second = reader.read_now(CHAT, {"messages": [*first["messages"], *more]})
    assert second.chain(SCHEME, 16)
    assert reader.memo.tokens_tokenized == before[0]
    assert reader.memo.blocks_hashed - before[1] <= 80
    reader.memo.check()


def test_reading_leaves_the_body_alone(reader: PromptReader) -> None:
    body = chat(text(LONG), image(extra=1), image(uuid="u"))
    before = repr(body)
    reader.read_now(CHAT, body)
    PromptReader(None).read_now(CHAT, body)
    assert repr(body) == before


def test_kinds_of_content_are_named_as_vllm_does() -> None:
    messages = [
        {"role": "user", "content": [image(), text("a"), {"type": "input_audio"}, {"no": "type"}]},
        {"role": "user", "content": "string"},
        "no message",
    ]
    assert media.part_types(messages) == {"image", "text", "input"}
    assert media.part_types(None) == frozenset()


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_medium_in_a_system_message_that_is_merged_with_others_leaves_only_text(
    tmp_path: Path, role: str
) -> None:
    reader = reader_of(tmp_path, TEMPLATES["parts"])
    messages = [{"role": "user", "content": "x"}, {"role": "developer", "content": "y"}]
    body = {"messages": [*messages, {"role": role, "content": [text(LONG), image()]}]}
    prompt = reader.read_now(CHAT, body)
    assert prompt.token_ids is None
    assert "medium" in (prompt.doubt or "")
