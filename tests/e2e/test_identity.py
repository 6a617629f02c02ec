"""KV of other weights is never found: real vLLM, with a disk and with Redis below it."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.replica.model import make_model
from tests.e2e.serving import fresh_prompt, in_one_process
from tests.servers import redis_program, running

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

CHUNK_TOKENS = 256
PROMPT_TOKENS = 2 * CHUNK_TOKENS + 20
HIT_TOKENS = 2 * CHUNK_TOKENS
HUB_NAME = "warm/small"


class Vllm:
    """vLLM started directly (`llm_process`), with one model at a time."""

    def __init__(self, process: "subprocess.Popen[str]", directory: Path) -> None:
        self._process = process
        self._directory = directory
        self.is_open = False

    def do(self, command: str, **arguments: object) -> Any:
        """Have a command executed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({command: arguments}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, (self._directory / "vllm.log").read_text()[-6000:]
        return json.loads(answer)

    def open(self, model: str, tiers: dict[str, object], *, lora: bool = False) -> dict[str, Any]:
        """Serve a model with these tiers below the CPU's; return the layout of its chunks."""
        if self.is_open:
            self.do("close")
        self.is_open = True
        settings = {"max_local_cpu_size": 0.05, "lmcache_worker_port": 0, **tiers}
        config = {"path": str(self._directory / "engine.yaml"), "settings": settings}
        layout: dict[str, Any] = self.do("open", model=model, config=config, lora=lora)
        return layout

    def ask(self, prompt: list[int], lora: list[object] | None = None) -> dict[str, Any]:
        """Answer a prompt; with what it stored in the tiers below."""
        answer: dict[str, Any] = self.do("ask", prompt=prompt, lora=lora)
        return answer


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of a hub, with two revisions of one model; it is at the first."""
    from safetensors.torch import load_file, save_file

    cache = tmp_path_factory.mktemp("hub")
    model = cache / f"models--{HUB_NAME.replace('/', '--')}"
    first = make_model(tmp_path_factory.mktemp("model") / "small")
    second = first.parent / "second"
    shutil.copytree(first, second)
    weights = load_file(second / "model.safetensors")
    name = "model.layers.0.self_attn.v_proj.weight"
    save_file({**weights, name: -weights[name]}, second / "model.safetensors", {"format": "pt"})
    for revision, files in (("1" * 40, first), ("2" * 40, second)):
        snapshot = model / "snapshots" / revision
        snapshot.mkdir(parents=True)
        (model / "blobs").mkdir(exist_ok=True)
        for file in files.iterdir():
            blob = model / "blobs" / f"{revision}-{file.name}"
            shutil.copy(file, blob)
            (snapshot / file.name).symlink_to(blob)
    (model / "refs").mkdir()
    point_to(cache, "1" * 40)
    return cache


def point_to(hub: Path, revision: str) -> None:
    """Move the model's main branch."""
    (hub / f"models--{HUB_NAME.replace('/', '--')}" / "refs" / "main").write_text(revision)


@pytest.fixture(scope="module")
def vllm(hub: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    directory = tmp_path_factory.mktemp("vllm")
    environment = {
        **in_one_process(),
        "HF_HUB_CACHE": str(hub),
    }
    with (
        (directory / "vllm.log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.llm_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        ) as process,
    ):
        yield Vllm(process, directory)
        assert process.stdin is not None
        process.stdin.close()  # which ends both: the one that serves, and its parent


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[dict[str, object]]:
    """Two tiers below the CPU's, which outlive vLLM. A chunk that is not found is in neither."""
    with running(redis_program(), tmp_path) as server:
        yield {
            "local_disk": str(tmp_path / "disk"),
            "max_local_disk_size": 1.0,
            "remote_url": server.url,
        }


def each_alone(tiers: dict[str, object]) -> list[dict[str, object]]:
    """Return the settings of each of the two tiers without the other."""
    remote = {"remote_url": tiers["remote_url"]}
    return [{name: tiers[name] for name in tiers.keys() - remote.keys()}, remote]


def adapter(path: Path, *, seed: int) -> Path:
    """Write a LoRA adapter of the small model."""
    import torch
    from safetensors.torch import save_file

    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    rank, generator = 8, torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(8):
        for projection, width in (("q_proj", 512), ("v_proj", 256)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}.lora_"
            weights[f"{name}A.weight"] = torch.randn(rank, 512, generator=generator) * 0.3
            weights[f"{name}B.weight"] = torch.randn(width, rank, generator=generator) * 0.3
    save_file(weights, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "bias": "none"}
    config["target_modules"] = ["q_proj", "v_proj"]
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def test_a_hub_model_whose_revision_moved_is_computed_anew(
    vllm: Vllm, hub: Path, tiers: dict[str, object]
) -> None:
    prompt = fresh_prompt(PROMPT_TOKENS, seed=1)
    layout = vllm.open(HUB_NAME, tiers)
    assert layout["model"] == HUB_NAME
    assert layout["weights"] == f"{HUB_NAME}@{'1' * 40}"
    cold = vllm.ask(prompt)
    assert cold["cached"] == 0
    for alone in each_alone(tiers):
        assert vllm.open(HUB_NAME, alone) == layout
        assert vllm.ask(prompt)["cached"] == HIT_TOKENS
    point_to(hub, "2" * 40)
    try:
        assert vllm.open(HUB_NAME, tiers)["weights"] == f"{HUB_NAME}@{'2' * 40}"
        moved = vllm.ask(prompt)
    finally:
        point_to(hub, "1" * 40)
    assert moved["cached"] == 0
    assert moved["logprob"] != cold["logprob"], "the two revisions answer alike"


def test_an_adapter_replaced_under_its_name_is_computed_anew(
    vllm: Vllm, tiers: dict[str, object], tmp_path: Path
) -> None:
    prompt = fresh_prompt(PROMPT_TOKENS, seed=2)
    path = adapter(tmp_path / "adapter", seed=1)
    lora = ["adapter", 1, str(path)]
    vllm.open(HUB_NAME, tiers, lora=True)
    first = vllm.ask(prompt, lora)
    assert first["cached"] == 0
    assert vllm.ask(prompt)["cached"] == 0, "the model without it"
    for alone in each_alone(tiers):
        vllm.open(HUB_NAME, alone, lora=True)
        assert vllm.ask(prompt, lora)["cached"] == HIT_TOKENS
    adapter(path, seed=2)
    vllm.open(HUB_NAME, tiers, lora=True)
    second = vllm.ask(prompt, lora)
    assert second["cached"] == 0
    assert second["logprob"] != first["logprob"], "the two adapters answer alike"
    assert vllm.ask(prompt)["cached"] == HIT_TOKENS, "the model's own KV stays"
    # Replaced while it is loaded: which of the two vLLM has is not known, nothing is stored.
    adapter(path, seed=3)
    vllm.do("empty_gpu")
    assert vllm.ask(prompt, lora)["cached"] == 0
    vllm.do("empty_gpu")
    assert vllm.ask(prompt, lora)["cached"] == 0


def test_weights_changed_in_place_begin_an_epoch(vllm: Vllm, tiers: dict[str, object]) -> None:
    before, after = fresh_prompt(PROMPT_TOKENS, seed=3), fresh_prompt(PROMPT_TOKENS, seed=4)
    vllm.open(HUB_NAME, tiers)
    vllm.ask(before)
    vllm.do("call_workers", method="reload_weights")
    assert vllm.ask(before)["cached"] == 0, "neither from the GPU nor from below"
    vllm.ask(after)
    vllm.do("empty_gpu")
    assert vllm.ask(after)["cached"] == HIT_TOKENS, "its own KV it finds"
    # Another replica, which loads the weights from their files.
    vllm.open(HUB_NAME, tiers)
    assert vllm.ask(after)["cached"] == 0
    assert vllm.ask(before)["cached"] == HIT_TOKENS, "those of the first epoch are in Redis"


def test_a_pause_keeps_the_tiers_below(vllm: Vllm, tiers: dict[str, object]) -> None:
    prompt = fresh_prompt(PROMPT_TOKENS, seed=5)
    vllm.open(HUB_NAME, tiers)
    vllm.ask(prompt)
    vllm.do("pause")
    assert vllm.ask(prompt)["cached"] == HIT_TOKENS


def test_started_directly_vllm_tells_everything_itself(vllm: Vllm, tmp_path: Path) -> None:
    from vllm import __version__

    disk = {"local_disk": str(tmp_path / "disk"), "max_local_disk_size": 1.0}
    layout = vllm.open(HUB_NAME, disk)
    assert f"vllm {__version__}" in layout["build"]
    assert layout["attention"] == "CPU_ATTN"
    assert "num_kv_heads=4, head_size=64" in layout["pages"]
    assert (layout["dtype"], layout["hash_algorithm"]) == ("bfloat16", "sha256")
    assert layout["model_options"] != vllm.open(HUB_NAME, disk, lora=True)["model_options"]
