"""How contenders are started: ours with a real configuration, peers with their own options."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.environments import mark
from bench.replay.__main__ import _arguments, contenders
from bench.replay.contenders import ours, peers
from bench.replay.contenders.contender import CannotRunError, Contender, Launch, start
from bench.replay.fleet import Fleet, FleetOptions, FleetReplica, read_fleet
from router.config.loading import router_config
from router.launch.processes import ProcessGroup


def fleet(directory: Path, speed: float = 4.0) -> Fleet:
    replicas = tuple(
        FleetReplica(
            instance_id=f"sim{i}",
            url=f"http://127.0.0.1:{8000 + i}",
            agent_url=f"http://127.0.0.1:{8100 + i}",
            kv_events=f"tcp://127.0.0.1:{8200 + i}",
            kv_replay=f"tcp://127.0.0.1:{8300 + i}",
        )
        for i in range(2)
    )
    return Fleet(
        options=FleetOptions(replicas=2, speed=speed),
        replicas=replicas,
        control_url="http://127.0.0.1:8400",
        tokenizer=directory,
    )


def test_the_fleets_line_is_read() -> None:
    line = (
        '{"replicas":[{"instance_id":"a","url":"http://h:1","agent_url":"http://h:2",'
        '"kv_events":"tcp://h:3","kv_replay":"tcp://h:4","more":1}],'
        '"control_url":"http://h:5","tokenizer":"/t","speed":4}\n'
    )
    read = read_fleet(line, FleetOptions())
    assert (read.replicas[0].instance_id, read.control_url) == ("a", "http://h:5")
    assert read.replica_at("http://h:1") == "a"


def test_the_fleets_command_names_its_regime() -> None:
    command = FleetOptions(cpu="ample", disk="slow", speed=2.5).command()
    told = dict(zip(command[3:-1:2], command[4::2], strict=True))
    assert (told["--cpu-tokens"], told["--disk-tokens-per-s"]) == ("800000", "4000.0")
    assert (told["--speed"], told["--replicas"]) == ("2.5", "8")


def test_our_configuration_is_one_and_its_times_follow_the_speed(tmp_path: Path) -> None:
    made = ours.config(fleet(tmp_path), 8080, 4.0, policy="session", prefetch={"enabled": False})
    config = router_config(made, path="made")
    assert (config.policy, config.prefetch.enabled) == ("session", False)
    assert config.prefetch.wait_cap_s == 0.5
    assert config.timeouts.connect_s == 5.0
    assert config.rates.prefill_tokens_per_s == 4 * 8_000.0
    # By default 10 GB and 100 KB a token; here a token's KV has four bytes.
    assert config.rates.cpu_load_bytes_per_s == pytest.approx(4 * 100_000 * 4.0)
    assert config.rates.kv_bytes_per_token == 4.0
    assert [each.instance_id for each in config.replicas] == ["sim0", "sim1"]


def test_ours_starts_from_default_rates_and_as_a_variant_from_true_ones(tmp_path: Path) -> None:
    fast = fleet(tmp_path)
    fast = replace(fast, options=replace(fast.options, prefill_tokens_per_s=20_000.0))
    default = ours.config(fast, 8080, 4.0)["rates"]
    true = ours.config(fast, 8080, 4.0, rates=ours.measured_rates(fast, 4.0))["rates"]
    assert default["prefill_tokens_per_s"] == 4 * 8_000.0
    assert true["prefill_tokens_per_s"] == 4 * 20_000.0
    assert true["disk_bytes_per_s"] == 4 * 20_000.0 * 4.0
    assert true.keys() == default.keys()
    assert "ours-true-rates" in {each.name for each in ours.contenders()}


def test_every_policy_of_ours_is_a_contender() -> None:
    known = contenders(peers.PeersPython(None))
    assert {f"ours-{policy}" for policy in ours.POLICIES} <= known.keys()
    assert {"ours-ttft-no-prefetch", "oracle", "no-queue"} <= known.keys()


KNOWN = {each.name: each for each in peers.contenders(peers.PeersPython(Path("python")))}


def command(name: str, directory: Path) -> list[str]:
    launch = KNOWN[name].launch
    assert launch is not None
    return launch(fleet(directory), directory).command


def option(name: str, of: list[str]) -> str:
    return of[of.index(name) + 1]


def test_the_peers_are_those_that_their_documentation_recommends() -> None:
    assert list(KNOWN) == [
        "sglang-cache-aware",
        "sglang-power-of-two",
        "sglang-manual",
        "vllm-cache-aware",
        "vllm-kv-aware",
        "vllm-kv-aware-sessions",
        "vllm-power-of-two",
        "vllm-consistent-hash",
        "vllm-sticky-least-loaded",
        "vllm-round-robin",
    ]


def test_kv_aware_hears_the_events_and_gets_token_ids(tmp_path: Path) -> None:
    for name in ("vllm-kv-aware", "vllm-kv-aware-sessions"):
        assert KNOWN[name].sends_token_ids
        told = command(name, tmp_path)
        assert option("--policy", told) == "kv_aware"
        assert "http://127.0.0.1:8001=tcp://127.0.0.1:8201" in told
        assert option("--kv-event-block-size", told) == "64"
    assert not KNOWN["sglang-cache-aware"].sends_token_ids


def test_kv_aware_keeps_sessions_where_it_is_told_to_and_for_model_time(tmp_path: Path) -> None:
    told = command("vllm-kv-aware-sessions", tmp_path)
    assert option("--kv-aware-session-affinity-ttl-secs", told) == "150"
    assert "--kv-aware-session-affinity-ttl-secs" not in command("vllm-kv-aware", tmp_path)


def test_cache_aware_has_the_recommended_thresholds_and_its_own_time(tmp_path: Path) -> None:
    told = command("vllm-cache-aware", tmp_path)
    thresholds = ("--cache-threshold", "--balance-abs-threshold", "--balance-rel-threshold")
    assert [option(name, told) for name in thresholds] == ["0.5", "32", "1.1"]
    assert option("--eviction-interval-secs", told) == "30"
    assert option("--eviction-interval-secs", command("sglang-cache-aware", tmp_path)) == "15"


def test_every_port_of_a_peer_is_its_own(tmp_path: Path) -> None:
    for name in KNOWN:
        told = command(name, tmp_path)
        assert option("--port", told) != option("--prometheus-port", told)


def test_a_peer_asks_no_proxy_for_its_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "https_proxy", "MY_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    launch = KNOWN["vllm-round-robin"].launch
    assert launch is not None
    environment = launch(fleet(tmp_path), tmp_path).environment
    assert environment is not None
    assert {"HTTP_PROXY", "https_proxy"}.isdisjoint(environment)
    assert {"MY_PROXY", "PATH"} <= environment.keys()


def test_sessions_are_named_and_ended_as_each_peer_wants_it() -> None:
    headers = {name: each.session_header for name, each in KNOWN.items()}
    assert headers.pop("sglang-manual") == "x-smg-routing-key"
    assert set(headers.values()) == {"x-session-id"}
    assert KNOWN["vllm-sticky-least-loaded"].finish_path == "/finish_session"


def test_peers_that_cannot_be_installed_are_said(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(CannotRunError, match="not installed"):
        peers.PeersPython(None, file / "peers").path()


def test_an_environment_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    (tmp_path / mark(peers.PACKAGES)).touch()
    assert peers.PeersPython(None, tmp_path).path() == tmp_path / "bin" / "python"


def test_a_contender_that_dies_is_said_with_its_last_words(tmp_path: Path) -> None:
    dies = [sys.executable, "-c", "print('no such option'); raise SystemExit(2)"]
    contender = Contender(
        name="broken",
        launch=lambda fleet, directory: Launch(command=dies, url="", is_ready=lambda: False),
    )
    with (
        ProcessGroup() as group,
        pytest.raises(CannotRunError, match=r"exit code 2.*no such option"),
    ):
        start(contender, group, fleet(tmp_path), tmp_path)


def test_loads_and_time_scales_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _arguments(["--load", "0.5", "--time-scale", "0.8"])
    assert "not allowed with" in capsys.readouterr().err
