"""Which options of vLLM's make another cache."""

from pathlib import Path

import pytest

from cacheengine.identity import model_options_digest

BASE = ["--model", "M", "--port", "8001", "--max-num-seqs", "8", "--dtype=bfloat16"]


def test_what_only_serves_changes_nothing() -> None:
    assert model_options_digest(BASE) == ""
    assert model_options_digest([*BASE, "--host", "::", "--chat_template=t.jinja"]) == ""


@pytest.mark.parametrize(
    "option",
    [
        ["--quantization", "fp8"],
        ["-q", "fp8"],
        ["--hf-overrides", '{"rope_theta": 1}'],
        ["--hf-overrides.rope_theta", "1"],
        ["--revision=abc"],
        ["--load-format", "dummy"],
        ["--something-vllm-learns-next-year"],
    ],
    ids=lambda option: option[0],
)
def test_what_may_change_kv_makes_another_cache(option: list[str]) -> None:
    changed = model_options_digest([*BASE, *option])
    assert changed != ""
    assert changed == model_options_digest([*option, *BASE, "--port", "9"])
    assert changed != model_options_digest([*BASE, *option, "--revision", "other"])


def test_one_option_has_one_digest_however_it_is_written() -> None:
    written = [["--hf-overrides", "{}"], ["--hf_overrides", "{}"], ["--hf-overrides={}"]]
    assert len({model_options_digest([*BASE, *option]) for option in written}) == 1


def test_vllms_own_file_counts_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text("quantization: fp8\n")
    first = model_options_digest(["--config", str(path)])
    path.write_text("quantization: null\n")
    assert model_options_digest(["--config", str(path)]) != first
