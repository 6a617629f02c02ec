"""Settings that were removed are refused by name, with what to do instead."""

import pytest

from router.config.loading import router_config
from warmroute_common.config_reader import ConfigError


def test_a_removed_setting_is_named() -> None:
    settings = {"replicas": [{"url": "http://a:8000"}], "picker": {"envoy_port": 9004}}
    with pytest.raises(ConfigError) as caught:
        router_config(settings, path="router.yaml")
    assert "router.yaml: picker.envoy_port: was removed; delete it" in str(caught.value)
