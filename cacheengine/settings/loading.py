"""Reading the configuration: LMCache's file, environment and keys.

A YAML file named by ``LMCACHE_CONFIG_FILE``, then ``LMCACHE_*`` variables over
it. Sizes are in GB (1024**3 bytes). Nothing is ignored in silence: an unknown
key is an error, one that LMCache knows and this engine does not serve is an
error or a warning (`lmcache_keys` has the lists).
"""

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import yaml

from cacheengine.settings import lmcache_keys as keys
from cacheengine.settings.settings import ConfigError, EngineConfig
from warmroute_common import config_values as values
from warmroute_common.fleet_secret import FILE_KEY, VARIABLE, BadSecretError, read_fleet_secret

logger = logging.getLogger("vllm.warmroute")

CONFIG_FILE_VARIABLE: Final = "LMCACHE_CONFIG_FILE"
_PREFIX: Final = "LMCACHE_"
_WITH_EXTRA_CONFIG: Final = ("mooncakestore://", "infinistore://")

# Kubernetes gives every pod variables like these for each service in its
# namespace; a service called lmcache-server must not stop a replica.
_SERVICE_VARIABLE: Final = re.compile(
    r"LMCACHE_\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?)"
)


_PARSERS: Final[Mapping[str, Callable[[object], object]]] = {
    each.name: each.metadata["parse"] for each in fields(EngineConfig) if each.metadata
}


@dataclass(frozen=True)
class _Given:
    """One value as a person wrote it, and where."""

    where: str
    written_key: str
    value: object

    def error(self, problem: str, fix: str) -> ConfigError:
        return ConfigError(self.where, self.written_key, problem, fix)


def load_engine_config(
    path: str | Path | None = None, environment: Mapping[str, str] | None = None
) -> EngineConfig:
    """Read the configuration file, if any, and the variables over it.

    ``path`` defaults to what ``LMCACHE_CONFIG_FILE`` names. Raises
    `ConfigError`; logs a warning for each key without effect. Looks at nothing
    else of the machine: that is `EngineConfig.check_ready`.
    """
    environment = os.environ if environment is None else environment
    path = path or environment.get(CONFIG_FILE_VARIABLE) or None
    given: dict[str, _Given] = {}
    if path is not None:
        given.update(_by_key(_from_file(Path(path))))
    given.update(_by_key(_from_environment(environment)))
    settings = {key: _parse(key, each) for key, each in given.items() if _is_setting(key, each)}
    known: dict[str, Any] = {key: value for key, value in settings.items() if value is not None}
    try:
        known["fleet_secret"] = read_fleet_secret(known.get(FILE_KEY), environment)
    except BadSecretError as error:
        source = given[FILE_KEY].where if FILE_KEY in given else "environment"
        name = FILE_KEY if FILE_KEY in given else VARIABLE
        raise ConfigError(source, name, error.problem, error.fix) from None
    try:
        config = EngineConfig(source=str(path or "environment"), **known)
    except ConfigError as error:
        if error.key not in given:
            raise
        raise given[error.key].error(error.problem, error.fix) from None
    if config.max_local_disk_size > 0 and not config.local_disk:
        _warn(given["max_local_disk_size"], "has no effect without local_disk")
    if config.controller_url and not config.enable_controller:
        _warn(given["controller_url"], "has no effect without enable_controller: true")
    if config.remote_serde != EngineConfig.remote_serde and not config.remote_url:
        _warn(given["remote_serde"], "has no effect without remote_url")
    reads_extra = (config.remote_url or "").lower().startswith(_WITH_EXTRA_CONFIG)
    if config.extra_config and not reads_extra:
        _warn(given["extra_config"], "has no effect but on " + " and ".join(_WITH_EXTRA_CONFIG))
    return config


def _from_file(path: Path) -> Iterator[_Given]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise ConfigError(str(path), "", problem, f"check {CONFIG_FILE_VARIABLE}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = " ".join(f"is not YAML: {error}".split())
        raise ConfigError(str(path), "", problem, "correct that line") from None
    if content is None:
        return
    if not isinstance(content, dict):
        raise ConfigError(str(path), "", "has no keys", "write lines such as chunk_size: 256")
    for key, value in content.items():
        yield _Given(str(path), str(key), value)


def _from_environment(environment: Mapping[str, str]) -> Iterator[_Given]:
    for name, text in sorted(environment.items()):
        if not name.startswith(_PREFIX) or name in keys.OTHER_VARIABLES:
            continue
        if name.startswith(keys.OTHER_PREFIXES):
            logger.warning("%s has no effect: it is for another program of LMCache", name)
            continue
        key = name.removeprefix(_PREFIX).lower()
        if not _is_known(key) and _SERVICE_VARIABLE.fullmatch(name):
            continue
        yield _Given("environment", name, text)


def _by_key(all_given: Iterator[_Given]) -> dict[str, _Given]:
    result: dict[str, _Given] = {}
    for given in all_given:
        key = given.written_key.removeprefix(_PREFIX).lower()
        if not _is_known(key):
            raise given.error("is no known key", _nearest(given.written_key, key))
        key = keys.ALIASES.get(key, key)
        if key in result:
            raise given.error(f"says again what {result[key].written_key} says", "remove one")
        result[key] = given
    return result


def _is_known(key: str) -> bool:
    return any(key in known for known in (_PARSERS, keys.ALIASES, keys.REFUSED, keys.INERT))


def _nearest(written: str, key: str) -> str:
    known = [*_PARSERS, *keys.REFUSED, *keys.INERT]
    if written.startswith(_PREFIX):
        return values.suggestion(written, [_PREFIX + each.upper() for each in known], _PARSERS)
    return values.suggestion(key, known, _PARSERS)


def _is_setting(key: str, given: _Given) -> bool:
    """Whether the engine serves the key; else warn, or raise `ConfigError`."""
    if key in _PARSERS:
        return True
    if values.is_null(given.value):
        return False
    if key in keys.INERT:
        _warn(given, f"has no effect here: {keys.INERT[key]}")
        return False
    harmless, reason = keys.REFUSED[key]
    if not any(_means(given.value, value) for value in harmless):
        allowed = f"remove it or set it to {str(harmless[0]).lower()}" if harmless else "remove it"
        raise given.error(f"{given.value!r} is not supported: {reason}", allowed)
    return False


def _warn(given: _Given, text: str) -> None:
    logger.warning("%s: %s: %s", given.where, given.written_key, text)


def _means(value: object, harmless: object) -> bool:
    if isinstance(harmless, bool):
        try:
            return values.parse_bool(value) is harmless
        except values.BadValueError:
            return False
    return value == harmless or str(value).strip().lower() == str(harmless)


def _parse(key: str, given: _Given) -> object:
    if values.is_null(given.value):
        return None
    try:
        return _PARSERS[key](given.value)
    except values.BadValueError as error:
        raise given.error(error.problem, error.fix) from None
