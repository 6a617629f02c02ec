"""The tokens before the first medium, compared with those of vLLM's own processor.

The model takes audio: among the models that vLLM's CPU build serves without further
packages it is the one with a processor of its own. Its audio comes as embeddings,
which need no decoder.
"""

import base64
import io
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from router.prompt.prompt_reader import PromptReader
from tests.router.prompt.chat_shapes import TEMPLATES
from tests.router.prompt.helpers import LONG
from tests.router.prompt.oracle import Oracle
from tests.router.prompt.tokenizer_makers import llama3, write_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"),
]

CHAT = "/v1/chat/completions"
AUDIO = """\
{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>
{%- if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}
{%- if part.type == 'audio' %}Audio: <|audio_bos|><|AUDIO|><|audio_eos|>
{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}</s>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
"""
AUDIO_FIRST = """\
{% for m in messages %}<|{{ m.role }}|>
{%- for part in m.content if part.type == 'audio' %}<|AUDIO|>{% endfor %}
{%- for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}
{%- endfor %}
"""
FEATURES = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "processor_class": "Qwen2AudioProcessor",
    "return_attention_mask": True,
}
MODEL: dict[str, Any] = {
    "architectures": ["Qwen2AudioForConditionalGeneration"],
    "model_type": "qwen2_audio",
    "text_config": {
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "max_position_embeddings": 65536,
        "vocab_size": 2048,
    },
    "audio_config": {
        "model_type": "qwen2_audio_encoder",
        "d_model": 32,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
    },
}


@pytest.fixture(scope="module")
def audio() -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    packed = io.BytesIO()
    torch.save(torch.ones(30, 64, dtype=torch.bfloat16), packed)
    return {"type": "audio_embeds", "audio_embeds": base64.b64encode(packed.getvalue()).decode()}


def audio_model(directory: Path, template: str) -> Path:
    tokenizer = llama3()
    marks = ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks])
    index = tokenizer.token_to_id("<|AUDIO|>")
    write_model(directory, tokenizer, template, model={**MODEL, "audio_token_index": index})
    (directory / "preprocessor_config.json").write_text(json.dumps(FEATURES))
    return directory


def said(role: str, *parts: Any) -> dict[str, Any]:
    texts = [{"type": "text", "text": one} if isinstance(one, str) else one for one in parts]
    return {"role": role, "content": texts}


@pytest.mark.parametrize(
    ("template", "text_first"),
    [(AUDIO, True), (AUDIO_FIRST, False), (TEMPLATES["chatml"], False)],
    ids=["in place", "audio first", "one string"],
)
def test_what_is_certain_is_what_vllm_has_before_the_first_medium(
    oracle: Oracle, audio: dict[str, Any], tmp_path: Path, template: str, text_first: bool
) -> None:
    model = audio_model(tmp_path / "model", template)
    reader = PromptReader.load(model)
    system = said("system", LONG)
    shapes = {
        "text first": [system, said("user", LONG, audio, "What is that?")],
        "newlines first": [system, said("user", LONG + "\n\n", audio, "\n\nWhat?")],
        "medium first": [system, said("user", audio, LONG)],
        "several": [system, said("user", LONG, audio, audio), said("assistant", "A fox.")],
        "later": [system, said("user", LONG), said("assistant", LONG), said("user", "a", audio)],
    }
    for name, messages in shapes.items():
        body = {"model": str(model), "messages": messages, "max_tokens": 1}
        args = ("--enable-mm-embeds",)
        answer = oracle.ask(model, "/v1/chat/completions/render", body, args)
        assert answer["status"] == 200, answer
        theirs: list[int] = answer["body"]["token_ids"]
        first = answer["body"]["features"]["mm_placeholders"]["audio"][0]["offset"]
        prompt = reader.read_now(CHAT, body)
        ours = list(prompt.token_ids or ())
        assert not prompt.exact
        assert ours == theirs[: len(ours)], name
        assert 0 < len(ours) <= first, name
        # As far as it goes: a template's own words before the medium count as unsure.
        if text_first or name == "medium first":
            assert first - len(ours) <= 32, name
