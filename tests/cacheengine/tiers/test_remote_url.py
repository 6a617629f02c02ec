"""``remote_url`` and ``remote_serde``: what is served, what is refused, and that no one reads a
password in it."""

import logging
from pathlib import Path

import pytest

from cacheengine.settings.engine_config import EngineConfig
from cacheengine.settings.lmcache_file import load_engine_config
from cacheengine.tiers.redis_store import RedisServer, TlsSettings
from cacheengine.tiers.remote_url import parse_remote_url
from warmroute_common.config_reader import BadValueError, ConfigError


def _server(text: str) -> RedisServer:
    return RedisServer.from_url(parse_remote_url(text))


@pytest.mark.parametrize(
    ("text", "server"),
    [
        ("redis://h", RedisServer(host="h")),
        ("valkey://h:1", RedisServer(host="h", port=1)),
        ("REDIS://h:1/", RedisServer(host="h", port=1)),
        ("redis://h:1/3", RedisServer(host="h", port=1, database=3)),
        ("redis://[::1]:7", RedisServer(host="::1", port=7)),
        ("redis://:p%40ss%2F@h", RedisServer(host="h", password="p@ss/")),
        ("redis://u:p@h", RedisServer(host="h", user="u", password="p")),
        ("redis://:p@ss@h", RedisServer(host="h", password="p@ss")),
        ("rediss://h", RedisServer(host="h", tls=TlsSettings())),
        ("valkeys://h?tls_verify=false", RedisServer(host="h", tls=TlsSettings(verify=False))),
        (
            "rediss://h?tls_ca_file=/c&tls_cert_file=/d&tls_key_file=/k",
            RedisServer(
                host="h",
                tls=TlsSettings(ca_file=Path("/c"), cert_file=Path("/d"), key_file=Path("/k")),
            ),
        ),
        (
            "redis://h?timeout_s=0.5&connect_timeout_s=9&connections=3",
            RedisServer(host="h", timeout_s=0.5, connect_timeout_s=9.0, connections=3),
        ),
        ("unix:///run/r.sock", RedisServer(socket_path="/run/r.sock", port=0)),
        (
            "unix://:p@/run/r.sock?database=2",
            RedisServer(socket_path="/run/r.sock", port=0, password="p", database=2),
        ),
        (
            "redis-sentinel://u:p@h,[::1]:7/3",
            RedisServer(
                host="h",
                port=26379,
                more_hosts=(("::1", 7),),
                user="u",
                password="p",
                database=3,
                service_name="redismaster",
            ),
        ),
        (
            "valkey-sentinel://h:1?service_name=main&connections=3",
            RedisServer(host="h", port=1, service_name="main", connections=3),
        ),
        (
            "redis-cluster://h:7000,i:7001,j",
            RedisServer(
                host="h", port=7000, more_hosts=(("i", 7001), ("j", 6379)), is_cluster=True
            ),
        ),
        ("valkey-cluster://h", RedisServer(host="h", is_cluster=True)),
    ],
)
def test_what_a_url_means(text: str, server: RedisServer) -> None:
    assert _server(text) == server


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("localhost:6379", "write redis://"),
        ("redsi://h", "did you mean 'redis://"),
        ("memcached://h", "use one of redis://"),
        ("lm://h:1", "LMCache's own server"),
        ("rediss-sentinel://h:1", "without TLS only"),
        ("rediss-cluster://h:1", "without TLS only"),
        ("redis-cluster://h/1", "database 0 only"),
        ("redis-cluster://h:1,", "cannot be read"),
        ("redis-cluster://h:1,i:x", "cannot be read"),
        ("redis-sentinel://,h:1", "names no host"),
        ("redis-cluster://h?service_name=x", "no option 'service_name'"),
        ("s3://bucket", "object stores are not served"),
        ("fs://h:0/path", "set local_disk"),
        ("redis://", "names no host"),
        ("redis://a:1,b:2", "one server"),
        ("redis://a,b", "several hosts"),
        ("valkey://a:1,b:2", "valkey-cluster://"),
        ("redis://h:0", "from 1 to 65535"),
        ("redis://h:65536", "from 1 to 65535"),
        ("redis://h:x", "from 1 to 65535"),
        ("redis://[::1", "cannot be read"),
        ("redis://h/db", "not a database number"),
        ("redis://h/-1", "not a database number"),
        ("redis://h#1", "cannot be read"),
        ("redis://u@h", "without a password"),
        ("redis://h?tls_verify=false", "no option 'tls_verify'"),
        ("rediss://h?tls_verfy=false", "did you mean 'tls_verify'?"),
        ("rediss://h?tls_verify=maybe", "neither true nor false"),
        ("rediss://h?tls_key_file=/k", "set both"),
        ("redis://h?timeout_s", "name=value"),
        ("redis://h?timeout_s=0", "timeout_s: 0 s is out of range"),
        ("redis://h?timeout_s=nan", "timeout_s: 'nan' is not a number"),
        ("redis://h?connections=1.5", "connections: '1.5' is not a whole number"),
        ("redis://h?timeout_s=1&timeout_s=2", "twice"),
        ("unix://run/r.sock", "names no socket"),
        ("unix:///", "names no socket"),
    ],
)
def test_what_is_refused_is_refused_when_the_configuration_is_loaded(text: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_engine_config(environment={"LMCACHE_REMOTE_URL": text})
    assert hint in str(caught.value)
    assert str(caught.value).startswith("environment: LMCACHE_REMOTE_URL: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "redis://:hunter2@h:x",
        "redis://:hunter2@h:99999",
        "redis://:hun/ter2@h",
        "redis://u:1/ter2@h",
        "redis://u:1?ter2@h",
        "redis://u:1?a=ter2@h",
        "redis://u:1#ter2@h",
        "redis://:hunter2@a,b",
        "redis-sentinel://:hunter2@a,b:x",
        "redis://:hunter2@h/x",
        ":hunter2@h:1",
        "redis://:hunter2@h?typo=1",
        "rdis://:hunter2@h",
        "lm://:hunter2@h",
        "redis://:hunter2@",
        "redis://:hunter2@[::1",
    ],
)
def test_no_message_repeats_a_password(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(remote_url=text)
    assert "ter2" not in f"{caught.value} {caught.value!r}"
    assert caught.value.__suppress_context__


def test_what_is_shown_of_a_url_has_no_password() -> None:
    text = "rediss://u:hunter2@h:1/3?tls_verify=false"
    url = parse_remote_url(text)
    assert str(url) == "rediss://u@h:1/3"
    for shown in (repr(url), repr(RedisServer.from_url(url)), repr(EngineConfig(remote_url=text))):
        assert "hunter2" not in shown
    assert str(parse_remote_url("unix://:hunter2@/run/s")) == "unix:///run/s"
    several = "redis-sentinel://u:hunter2@h,i:1/3?service_name=main"
    assert str(parse_remote_url(several)) == "redis-sentinel://u@h:26379,i:1/3"
    assert str(parse_remote_url("redis://[::1]")) == "redis://[::1]:6379"


def test_the_master_that_sentinels_are_asked_for_has_lmcaches_variable() -> None:
    url = parse_remote_url("redis-sentinel://h")
    server = RedisServer.from_url(url, environment={"REDIS_SERVICE_NAME": "main"})
    assert server.service_name == "main"


def test_a_file_of_certificates_must_be_there_before_vllm_starts(tmp_path: Path) -> None:
    config = EngineConfig(remote_url=f"rediss://h?tls_ca_file={tmp_path}/absent.pem")
    with pytest.raises(ConfigError, match=r"remote_url: .*absent\.pem cannot be read"):
        config.check_ready()


@pytest.mark.parametrize(
    ("scheme", "package"),
    [("mooncakestore", "mooncake-transfer-engine-non-cuda"), ("infinistore", "infinistore")],
)
def test_a_store_whose_package_is_missing_names_it(
    scheme: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = EngineConfig(remote_url=f"{scheme}://h:1")
    with pytest.raises(ConfigError, match=f"remote_url: .*pip install {package}"):
        config.check_ready()


@pytest.mark.parametrize("name", ["naive", "lossless", "cachegen"])
def test_a_serde_that_there_is(name: str) -> None:
    environment = {"LMCACHE_REMOTE_SERDE": name, "LMCACHE_REMOTE_URL": "redis://h"}
    assert load_engine_config(environment=environment).remote_serde == name


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lossles", "did you mean 'lossless'?"),
        ("CacheGen", "did you mean 'cachegen'?"),
        ("zip", "use one of naive, lossless, cachegen"),
    ],
)
def test_a_serde_that_there_is_not(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_engine_config(environment={"LMCACHE_REMOTE_SERDE": name})
    assert caught.value.key == "LMCACHE_REMOTE_SERDE"
    assert hint in str(caught.value)


def test_a_serde_without_a_server_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_engine_config(environment={"LMCACHE_REMOTE_SERDE": "lossless"})
    assert "has no effect without remote_url" in caplog.text


def test_a_bad_value_is_raised_and_nothing_else() -> None:
    with pytest.raises(BadValueError):
        parse_remote_url("")
