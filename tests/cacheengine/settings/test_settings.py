"""LMCache's configuration: read strictly, and nothing ignored in silence."""

import logging
import os
from pathlib import Path

import pytest

from cacheengine.settings import lmcache_file
from cacheengine.settings.engine_config import EngineConfig
from cacheengine.settings.lmcache_file import _SETTINGS, load_engine_config
from warmroute_common.config_reader import ConfigError

# The keys in LMCache's documentation ("Configuring LMCache").
_DOCUMENTED = """
chunk_size local_cpu max_local_cpu_size local_disk max_local_disk_size remote_url remote_serde
save_decode_cache use_layerwise pre_caching_hash_algorithm save_unfull_chunk blocking_timeout_secs
py_enable_gc cache_policy numa_mode external_lookup_client priority_limit min_retrieve_tokens
extra_config enable_lazy_memory_allocator lazy_memory_initial_ratio
lazy_memory_expand_trigger_ratio lazy_memory_step_ratio lazy_memory_safe_size
reserve_local_cpu_size enable_blending blend_recompute_ratios blend_check_layers blend_special_str
enable_p2p p2p_host peer_init_ports peer_lookup_ports transfer_channel enable_controller
lmcache_instance_id controller_url lmcache_worker_port enable_pd pd_role pd_buffer_size
pd_buffer_device nixl_backends pd_peer_host pd_peer_init_port pd_peer_alloc_port pd_proxy_host
pd_proxy_port gds_path cufile_buffer_size internal_api_server_enabled internal_api_server_host
internal_api_server_port_start internal_api_server_include_index_list
internal_api_server_socket_path_prefix plugin_locations audit_actual_remote_url
"""


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "instance.yaml"
    path.write_text(text)
    return path


def _load(tmp_path: Path, text: str, **variables: str) -> EngineConfig:
    return load_engine_config(_file(tmp_path, text), variables)


def test_without_anything_the_defaults_are_lmcaches() -> None:
    config = load_engine_config(environment={})
    assert (config.chunk_size, config.local_cpu, config.max_local_cpu_size) == (256, True, 5.0)
    assert (config.local_disk, config.max_local_disk_size) == ((), 0.0)
    assert config.max_local_cpu_bytes == 5 * 1024**3
    assert config.max_local_disk_bytes == 0
    assert config.save_decode_cache is True
    assert config.lmcache_instance_id


def test_a_file_as_in_lmcaches_examples(tmp_path: Path) -> None:
    config = _load(
        tmp_path,
        f"""
        chunk_size: 512
        local_cpu: true
        max_local_cpu_size: 0.5
        local_disk: "file://{tmp_path}/cache/"
        max_local_disk_size: 1.5
        remote_url: null
        remote_serde: "naive"
        lmcache_instance_id: "one"
        lmcache_worker_port: 8501
        """,
    )
    assert config.chunk_size == 512
    assert config.local_disk == (tmp_path / "cache",)
    assert config.max_local_disk_bytes == 1536 * 1024**2
    assert (config.lmcache_instance_id, config.lmcache_worker_port) == ("one", 8501)


def test_a_disk_tier_may_have_several_directories(tmp_path: Path) -> None:
    for written in (f"{tmp_path}/a, file://{tmp_path}/b/", f"[{tmp_path}/a, {tmp_path}/b]"):
        config = _load(tmp_path, f"local_disk: {written}\nmax_local_disk_size: 1")
        assert config.local_disk == (tmp_path / "a", tmp_path / "b")


def test_the_file_is_named_by_the_environment_and_overridden_by_it(tmp_path: Path) -> None:
    path = _file(tmp_path, "chunk_size: 128\nmax_local_cpu_size: 1.0\n")
    config = load_engine_config(
        environment={
            "LMCACHE_CONFIG_FILE": str(path),
            "LMCACHE_CHUNK_SIZE": "64",
            "LMCACHE_USE_EXPERIMENTAL": "True",
            "PATH": "/bin",
        }
    )
    assert (config.chunk_size, config.max_local_cpu_size) == (64, 1.0)


def test_every_documented_key_is_known() -> None:
    known = {*_SETTINGS, *lmcache_file.ALIASES, *lmcache_file.REFUSED, *lmcache_file.INERT}
    assert set(_DOCUMENTED.split()) <= known


@pytest.mark.parametrize("key", [*sorted(lmcache_file.INERT), "extra_config"])
def test_a_key_without_effect_warns_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    value = "{a: 1}" if key == "extra_config" else "word"
    with caplog.at_level(logging.WARNING):
        _load(tmp_path, f"{key}: {value}")
    assert f"instance.yaml: {key}: " in caplog.text


def test_a_switch_that_is_off_does_not_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        _load(tmp_path, "enable_controller: false\nlocal_cpu_use_hugepages: false")
    assert not caplog.records


@pytest.mark.parametrize("key", sorted(lmcache_file.REFUSED))
def test_a_key_that_asks_for_what_is_not_there_is_an_error(tmp_path: Path, key: str) -> None:
    harmless, _ = lmcache_file.REFUSED[key]
    for value in harmless:
        _load(tmp_path, f"{key}: {value}")
    _load(tmp_path, f"{key}: null")
    asked = "true" if harmless == (False,) else "redis://host:1"
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, f"{key}: {asked}")
    assert caught.value.key == key
    assert "instance.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "key", "hint"),
    [
        ("chunk_sise: 256", "chunk_sise", "did you mean 'chunk_size'?"),
        ("max_local_cpu: 5", "max_local_cpu", "did you mean 'max_local_cpu_size'?"),
        ("zzzzz: 5", "zzzzz", "use one of chunk_size"),
        ("chunk_size: big", "chunk_size", "write a number, at least 1"),
        ("chunk_size: 1.5", "chunk_size", "whole number"),
        ("chunk_size: true", "chunk_size", "whole number"),
        ("chunk_size: 0", "chunk_size", "at least 1"),
        ("max_local_cpu_size: 0", "max_local_cpu_size", "give it some GB"),
        ("max_local_cpu_size: -1", "max_local_cpu_size", "negative"),
        ("max_local_cpu_size: 5GB", "max_local_cpu_size", "write 5.0 for 5 GB"),
        ("max_local_cpu_size: 5368709120", "max_local_cpu_size", "sizes are in GB"),
        ("max_local_cpu_size: .nan", "max_local_cpu_size", "not a number"),
        ("local_cpu: maybe", "local_cpu", "write true or false"),
        ("local_cpu: false", "local_cpu", "set local_cpu: true, or local_disk"),
        ("local_disk: /tmp/x", "max_local_disk_size", "give the disk tier some GB"),
        ("local_disk: redis://x", "local_disk", "file:///path/"),
        ("local_disk: file://", "local_disk", "file:///path/"),
        ("local_disk: [[a]]", "local_disk", "not text"),
        ("cache_policy: RANDOM", "cache_policy", "use ARC or LRU"),
        (
            "cache_policy: FIFO",
            "cache_policy",
            "use ARC (the default: it keeps chunks that are used again) or LRU",
        ),
        (
            "cache_policy: lfu",
            "cache_policy",
            "use ARC (the default: it keeps chunks that are used again) or LRU",
        ),
        (
            "cache_policy: MRU",
            "cache_policy",
            "use ARC (the default: it keeps chunks that are used again) or LRU",
        ),
        ("lmcache_worker_port: 70000", "lmcache_worker_port", "from 0 to 65535"),
        ("lmcache_worker_ports: [1, 2]", "lmcache_worker_ports", "write one"),
        ("put_queue_share: 2", "put_queue_share", "up to 1"),
        ("extra_config: 5", "extra_config", "mapping"),
        ("a: [", "line 1", "not valid YAML"),
        ("just text", "", "write settings as 'key: value' lines"),
        ("lmcache_worker_port: 1\nlmcache_worker_ports: 2", "lmcache_worker_ports", "remove one"),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_fix(
    tmp_path: Path, text: str, key: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, text)
    assert caught.value.key == key
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "instance.yaml"))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file; check the path \(/.*/absent.yaml\)"):
        load_engine_config(tmp_path / "absent.yaml", {})


@pytest.mark.parametrize("text", ["yes", "Yes", "true", "TRUE", "on", "1"])
def test_true_in_every_spelling(text: str) -> None:
    """LMCache reads "yes" as false."""
    assert load_engine_config(environment={"LMCACHE_LOCAL_CPU": text}).local_cpu is True


@pytest.mark.parametrize("text", ["no", "False", "off", "0"])
def test_false_in_every_spelling(text: str) -> None:
    environment = {"LMCACHE_SAVE_DECODE_CACHE": text}
    assert load_engine_config(environment=environment).save_decode_cache is False


def test_an_error_in_a_variable_names_the_variable(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"environment: LMCACHE_MAX_LOCAL_CPU_SIZE: 0 GB is too little"
    ):
        _load(tmp_path, "chunk_size: 256", LMCACHE_MAX_LOCAL_CPU_SIZE="0")
    with pytest.raises(ConfigError, match="did you mean 'LMCACHE_CHUNK_SIZE"):
        _load(tmp_path, "", LMCACHE_CHUNKSIZE="1")


def test_a_variable_can_unset_what_the_file_sets(tmp_path: Path) -> None:
    config = _load(tmp_path, "local_disk: /x\nmax_local_disk_size: 1", LMCACHE_LOCAL_DISK="null")
    assert config.local_disk == ()


def test_a_size_without_a_disk_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _load(tmp_path, "max_local_disk_size: 5")
    assert "has no effect without local_disk" in caplog.text


def test_aliases_of_other_versions(tmp_path: Path) -> None:
    config = _load(tmp_path, "lmcache_worker_ports: [8501]\ncontroller_pull_url: host:1")
    assert (config.lmcache_worker_port, config.controller_url) == (8501, "host:1")
    assert load_engine_config(environment={"LMCACHE_LMCACHE_WORKER_PORT": "1"})


def test_variables_that_are_no_keys(caplog: pytest.LogCaptureFixture) -> None:
    """Kubernetes makes such variables for a service called lmcache-server."""
    with caplog.at_level(logging.WARNING):
        load_engine_config(
            environment={
                "LMCACHE_SERVER_SERVICE_HOST": "10.0.0.1",
                "LMCACHE_SERVER_SERVICE_PORT_HTTP": "80",
                "LMCACHE_SERVER_PORT": "tcp://10.0.0.1:80",
                "LMCACHE_SERVER_PORT_80_TCP_ADDR": "10.0.0.1",
                "LMCACHE_LOG_LEVEL": "INFO",
                "LMCACHE_EC_X": "1",
            }
        )
    assert [record.getMessage() for record in caplog.records] == [
        "LMCACHE_EC_X has no effect: it is for another program of LMCache"
    ]


def test_extra_config_may_be_json(caplog: pytest.LogCaptureFixture) -> None:
    config = load_engine_config(environment={"LMCACHE_EXTRA_CONFIG": '{"a": 1}'})
    assert config.extra_config == {"a": 1}


def test_check_ready_makes_the_directory(tmp_path: Path) -> None:
    config = _load(tmp_path, f"local_disk: {tmp_path}/a/b\nmax_local_disk_size: 1")
    assert not (tmp_path / "a").exists()
    config.check_ready()
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_check_ready_refuses_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = _load(tmp_path, f"local_disk: {tmp_path}/file/x\nmax_local_disk_size: 1")
    with pytest.raises(ConfigError, match=r"local_disk: .* cannot be written") as caught:
        config.check_ready()
    assert str(caught.value).startswith(str(tmp_path / "instance.yaml"))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a read-only file system")
def test_check_ready_does_not_trust_permission_bits() -> None:
    config = EngineConfig(local_disk=(Path("/proc/self"),), max_local_disk_size=1.0)
    with pytest.raises(ConfigError, match="cannot be written"):
        config.check_ready()


def test_check_ready_refuses_more_memory_than_there_is() -> None:
    memory_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1024**3
    with pytest.raises(ConfigError, match="more than this machine's memory"):
        EngineConfig(max_local_cpu_size=memory_gb + 1).check_ready()
    for_one = EngineConfig(max_local_cpu_size=0.6 * memory_gb)
    for_one.check_ready()
    with pytest.raises(ConfigError, match=f"for each of 2 .* set less than {memory_gb / 2:.1f}"):
        for_one.check_ready(ranks=2)
