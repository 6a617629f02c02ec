"""What is each data parallel rank's own, and how many ranks vLLM's options ask for."""

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from cacheengine.launch.replica_command import replica
from cacheengine.launch.vllm_launch import Ranks, config_of_rank, free_ports, ranks_of
from cacheengine.settings.engine_config import EngineConfig


def config() -> EngineConfig:
    return EngineConfig(
        lmcache_instance_id="one",
        lmcache_worker_port=8090,
        distributed_url="[::1]:8200",
        local_disk=(Path("/a"), Path("/b")),
        keep_cpu_dir=Path("/dev/shm/one"),
        max_local_disk_size=1.0,
        max_local_cpu_size=2.0,
        openai_url="http://:8000",
    )


def test_rank_0_has_what_the_configuration_says() -> None:
    assert config_of_rank(config(), 0) == config()


def test_every_other_rank_has_a_name_and_ports_and_directories_of_its_own() -> None:
    third = config_of_rank(config(), 2)
    assert third.lmcache_instance_id == "one_dp2"
    assert third.lmcache_worker_port == 8092
    assert third.distributed_url == "[::1]:8202"
    assert third.local_disk == (Path("/a/dp2"), Path("/b/dp2"))
    assert third.keep_cpu_dir == Path("/dev/shm/one/dp2")
    assert third.openai_url is None
    assert (third.max_local_cpu_size, third.max_local_disk_size) == (2.0, 1.0)


def test_any_free_port_stays_any_free_port() -> None:
    free = EngineConfig(lmcache_worker_port=0, distributed_url="localhost:0")
    second = config_of_rank(free, 1)
    assert (second.lmcache_worker_port, second.distributed_url) == (0, "localhost:0")
    assert config_of_rank(EngineConfig(), 1).distributed_url is None


@pytest.mark.parametrize(
    ("arguments", "here", "everywhere"),
    [
        ("", 1, 1),
        ("--data-parallel-size 4", 4, 4),
        ("--data_parallel_size=4", 4, 4),
        ("-dp 4", 4, 4),
        ("-dp 4 -dpl 2", 2, 4),
        ("--data-parallel-size 4 --data-parallel-size-local 2", 2, 4),
        # One of several servers, which each have one rank and a configuration of their own.
        ("--data-parallel-size 4 --data-parallel-rank 2", 1, 4),
        ("--data-parallel-size 4 --data-parallel-external-lb", 1, 4),
    ],
)
def test_the_ranks_are_read_from_vllms_options(arguments: str, here: int, everywhere: int) -> None:
    assert ranks_of(arguments.split()) == Ranks(here, everywhere)


def test_what_is_no_number_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="--data-parallel-size: 'two' is not a number of ranks"):
        ranks_of(["-dp", "two"])


def test_free_ports_in_a_row_share_none() -> None:
    firsts = free_ports(20, in_a_row=3)
    taken = [port for first in firsts for port in range(first, first + 3)]
    assert len(set(taken)) == 60


def test_a_taken_port_of_the_second_rank_is_found_before_vllm_starts(tmp_path: Path) -> None:
    (port,) = free_ports(1, in_a_row=2)
    path = tmp_path / "instance.yaml"
    path.write_text(f"max_local_cpu_size: 0.1\nlmcache_worker_port: {port}\n")
    arguments = ["--config", str(path), "--print-command", "--", "--model", "M"]
    with socket.create_server(("127.0.0.1", port + 1)):
        alone = CliRunner().invoke(replica, arguments)
        two = CliRunner().invoke(replica, [*arguments, "--data-parallel-size", "2"])
    assert alone.exit_code == 0, alone.output
    assert two.exit_code == 2
    assert f"lmcache_worker_port: cannot listen on 127.0.0.1:{port + 1}" in two.output
