"""What a URL and LMCache's keys make of Mooncake's settings."""

import json
from pathlib import Path
from typing import Any

import pytest

from cacheengine.tiers.mooncake_store import (
    CONFIG_FILE_VARIABLE,
    DEFAULT_BUFFER_BYTES,
    MooncakeSettings,
    mooncake_settings,
)
from warmroute_common.config_reader import BadValueError

URL = "mooncakestore://localhost:50051/"


def settings(extra: dict[str, Any], url: str = URL) -> MooncakeSettings:
    return mooncake_settings(url, extra, {})


def test_a_url_alone_is_enough() -> None:
    found = settings({})
    assert found.master_server_address == "localhost:50051"
    assert (found.metadata_server, found.protocol) == ("P2PHANDSHAKE", "tcp")
    assert found.global_segment_size == 3355443200


def test_lmcaches_own_example_is_understood() -> None:
    """The extra_config of its documentation of this backend."""
    found = settings(
        {
            "use_exists_sync": True,
            "save_chunk_meta": False,
            "local_hostname": "localhost",
            "metadata_server": "http://localhost:8080/metadata",
            "protocol": "rdma",
            "device_name": "",
            "global_segment_size": 21474836480,
            "master_server_address": "localhost:50051",
            "local_buffer_size": 0,
            "mooncake_prefer_local_alloc": True,
            "transfer_timeout": 1,
            "storage_root_dir": "",
        }
    )
    assert found == MooncakeSettings(
        master_server_address="localhost:50051",
        local_hostname="localhost",
        metadata_server="http://localhost:8080/metadata",
        protocol="rdma",
        global_segment_size=21474836480,
        local_buffer_size=DEFAULT_BUFFER_BYTES,
        prefer_local_alloc=True,
        transfer_timeout=1.0,
    )


def test_the_url_names_master_and_device_whatever_the_keys_say() -> None:
    extra = {"master_server_address": "elsewhere:1", "device_name": "mlx5_0"}
    found = settings(extra, "mooncakestore://[::1]:7/?device=mlx5_1")
    assert (found.master_server_address, found.device_name) == ("[::1]:7", "mlx5_1")


def test_keys_may_have_the_prefix_of_later_releases() -> None:
    assert settings({"mooncake_protocol": "rdma"}).protocol == "rdma"
    assert settings({"mooncake_protocol": "rdma", "protocol": "rdma"}).protocol == "rdma"


def test_a_file_named_by_the_environment_goes_before_the_keys(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.json"
    file.write_text(json.dumps({"protocol": "rdma", "device_name": "a"}))
    extra = {"protocol": "tcp", "local_hostname": "me"}
    found = mooncake_settings(URL, extra, {CONFIG_FILE_VARIABLE: str(file)})
    assert (found.protocol, found.device_name, found.local_hostname) == ("rdma", "a", "me")


@pytest.mark.parametrize("content", ["no json", "[1]", None])
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "mooncake.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(BadValueError, match=r"mooncake\.json"):
        mooncake_settings(URL, {}, {CONFIG_FILE_VARIABLE: str(file)})


@pytest.mark.parametrize(
    ("key", "value", "problem", "fix"),
    [
        ("protocol", "udp", "protocol: 'udp' is not supported", "tcp or rdma"),
        ("metadata_server", "localhost", "not a metadata server", "P2PHANDSHAKE"),
        ("global_segment_size", "4GB", "is not a whole number", "write a number"),
        ("global_segment_size", 4, "too little", "at least 16777216"),
        ("global_segment_size", True, "is not a whole number", ""),
        ("local_buffer_size", -1, "out of range", "at least 0"),
        ("transfer_timeout", 0, "out of range", "seconds"),
        ("local_hostname", "two words", "is not a name", "without spaces"),
        ("prefer_local_alloc", "perhaps", "prefer_local_alloc", ""),
        ("storage_root_dir", "/ssd", "is not supported", "mooncake_client"),
        ("global_segment_sise", 1, "is not a known key", "did you mean global_segment_size?"),
        ("metadata_servers", 1, "is not a known key", "did you mean metadata_server?"),
        ("mooncake_colour", 1, "mooncake_colour is not a known key", "use one of"),
        ("mooncake_page_first_multi_buffer", True, "is not supported", "remove it"),
    ],
)
def test_what_cannot_work_says_what_to_write(
    key: str, value: object, problem: str, fix: str
) -> None:
    with pytest.raises(BadValueError) as caught:
        settings({key: value})
    assert key in caught.value.problem
    assert problem in caught.value.problem
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("mooncakestore://h:1/?dev=a", "no option 'dev'"),
        ("mooncakestore://h:1/path", "more than a host and a port"),
        ("mooncakestore://h1:1,h2:2/", "several hosts"),
    ],
)
def test_urls_that_cannot_work_are_refused(url: str, problem: str) -> None:
    with pytest.raises(BadValueError, match=problem):
        settings({}, url)


def test_keys_of_other_parts_are_left_alone() -> None:
    others = {"use_odirect": True, "gds_io_threads": 4, "remote_storage_plugins": ["x"], "max": 1}
    assert settings(others) == settings({})
