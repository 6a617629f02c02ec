"""The model that is made on the spot."""

import json
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from bench.replica import model
from bench.replica.model import make_model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "small")


def test_it_is_made_once(made: Path) -> None:
    before = (made / "model.safetensors").stat().st_mtime_ns
    assert make_model(made) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == before
    assert [each.name for each in made.parent.iterdir()] == [made.name]


def test_an_older_recipe_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "m"
    directory.mkdir()
    (directory / "recipe.json").write_text("{}")
    (directory / "leftover").touch()
    make_model(directory)
    assert not (directory / "leftover").exists()


def test_a_strangers_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    with pytest.raises(ValueError, match="name another"):
        make_model(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["mine.txt"]


def test_the_weights_fill_the_file_exactly(made: Path) -> None:
    raw = (made / "model.safetensors").read_bytes()
    header_bytes = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + header_bytes])
    header.pop("__metadata__")
    ends = [entry["data_offsets"] for entry in header.values()]
    assert ends[0][0] == 0
    assert all(ends[i][1] == ends[i + 1][0] for i in range(len(ends) - 1))
    assert ends[-1][1] == len(raw) - 8 - header_bytes
    parameters = ends[-1][1] // 2
    assert 27_000_000 < parameters < 28_000_000


def test_another_shape_is_another_model_in_the_same_form(made: Path, tmp_path: Path) -> None:
    large = make_model(tmp_path / "large", model.LARGE_KV)
    config = json.loads((large / "config.json").read_text())
    assert config["head_dim"] != config["hidden_size"] // config["num_attention_heads"]
    heads = config["num_key_value_heads"] * config["head_dim"]
    assert 2 * 2 * config["num_hidden_layers"] * heads == 131_072
    assert (large / "tokenizer.json").read_bytes() == (made / "tokenizer.json").read_bytes()
    before = (large / "model.safetensors").read_bytes()[:8]
    make_model(large)
    assert (large / "model.safetensors").read_bytes()[:8] != before, "made anew, in its place"


def test_the_tokenizer_keeps_every_text_and_knows_the_roles(made: Path) -> None:
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == model.VOCAB_SIZE
    for text in ("def main() -> int:\n\treturn 0", "naïve 日本語 🙂"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    ids = [tokenizer.token_to_id(token) for token in model.SPECIAL_TOKENS]
    assert ids == list(range(len(ids)))


def test_the_template_renders_every_role_and_tools(made: Path) -> None:
    # As transformers renders it; importing that takes many seconds.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = json.dumps
    config = json.loads((made / "tokenizer_config.json").read_text())
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    text = environment.from_string(config["chat_template"]).render(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "3"},
        ],
        tools=[{"type": "function", "function": {"name": "f"}}],
        add_generation_prompt=True,
        bos_token=config["bos_token"],
    )
    assert text.startswith("<|begin|><|system|>You may call these tools")
    assert '{"name": "f", "arguments": {"a": 1}}<|end|><|tool|>3<|end|><|assistant|>' in text
