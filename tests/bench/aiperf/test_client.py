"""AIPerf's command, its tokenizer without a network, and how a run of it ends."""

import itertools
import sys
from pathlib import Path

import pytest

from bench.aiperf.client import TOKENIZER, Workload, arguments, fill_hub, profile
from bench.ttft import BenchError
from router.launch.processes import ProcessGroup

WORKLOAD = Workload(
    conversations=100,
    concurrency=16,
    contexts=24,
    context_tokens=6000,
    turn_tokens=2000,
    turn_tokens_stddev=500,
    answer_tokens=64,
    ttft_bound_ms=800,
    seed=7,
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_text("{}")
    (directory / "model.safetensors").write_bytes(b"long")
    return directory


def program(directory: Path, source: str) -> Path:
    """Return a program that stands where AIPerf would."""
    path = directory / "aiperf"
    path.write_text(f"#!{sys.executable}\n{source}")
    path.chmod(0o755)
    return path


def option(told: list[str], name: str) -> list[str]:
    return [value for key, value in itertools.pairwise(told) if key == name]


def test_the_command_says_what_is_asked_and_of_which_servers() -> None:
    told = arguments(WORKLOAD, model="m", urls=["http://a", "http://b"])
    assert told[0] == "profile"
    assert option(told, "--url") == ["http://a", "http://b"]
    assert option(told, "--goodput") == ["time_to_first_token:800"]
    assert option(told, "--conversation-num") == ["100"]
    assert option(told, "--concurrency") == ["16"]
    assert option(told, "--num-prefix-prompts") == ["24"]
    assert option(told, "--random-seed") == ["7"]
    assert option(told, "--session-header") == ["x-session-id"]
    assert "--streaming" in told


def test_the_command_names_no_path() -> None:
    told = arguments(WORKLOAD, model="m", urls=["http://a"])
    assert option(told, "--tokenizer") == [TOKENIZER]
    assert not any(part.startswith("/") for part in told)


def test_a_share_has_fewer_conversations_of_the_same_kind() -> None:
    share = WORKLOAD.share(4)
    assert (share.conversations, share.concurrency, share.contexts) == (25, 4, 6)
    assert (share.turn_tokens, share.ttft_bound_ms) == (2000, 800)
    assert WORKLOAD.share(1000).concurrency == 1


def test_the_tokenizer_is_found_without_a_network(tmp_path: Path, tokenizer: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    fill_hub(tmp_path / "hub", tokenizer)
    found = hub.snapshot_download(TOKENIZER, cache_dir=tmp_path / "hub", local_files_only=True)
    names = {path.name for path in Path(found).iterdir()}
    assert names == {"config.json", "tokenizer.json", "tokenizer_config.json"}


def test_all_that_a_run_leaves_lies_in_its_directory(tmp_path: Path, tokenizer: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    source = (
        "import os, pathlib, tempfile\n"
        "assert os.environ['HF_HUB_OFFLINE'] == '1'\n"
        "tempfile.mkstemp()\n"
        "assert pathlib.Path(os.environ['HF_HOME'], 'hub').is_dir()\n"
        "pathlib.Path('artifacts').mkdir()\n"
    )
    with ProcessGroup() as group:
        profile(program(tmp_path, source), [], group=group, tokenizer=tokenizer, work=work)
        assert repr(group) == "<ProcessGroup empty>"
    assert {path.name for path in work.iterdir()} == {"artifacts", "aiperf.log", "hub", "tmp"}
    assert list((work / "tmp").iterdir())


def test_a_run_that_fails_is_an_error_with_its_last_words(tmp_path: Path, tokenizer: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    source = "print('no such option')\nraise SystemExit(2)\n"
    with ProcessGroup() as group, pytest.raises(BenchError, match=r"(?s)code 2.*no such option"):
        profile(program(tmp_path, source), [], group=group, tokenizer=tokenizer, work=work)


def test_a_replica_that_ends_ends_the_run(tmp_path: Path, tokenizer: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    endless = program(tmp_path, "import time\ntime.sleep(600)\n")
    with ProcessGroup() as group:
        group.start("replica", [sys.executable, "-c", "print('gone')"], None, tmp_path / "log")
        with pytest.raises(BenchError, match=r"(?s)replica died.*gone"):
            profile(endless, [], group=group, tokenizer=tokenizer, work=work)
        assert "aiperf" not in repr(group)
