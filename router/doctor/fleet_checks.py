"""Whether replicas fit together, and what the file says of all of them fits what they are. Pure."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Final, TypeVar

from router.config import RouterConfig
from router.doctor.findings import Section
from router.doctor.replica_checks import Examined, hash_in_words
from warmroute_common.agent_protocol import InstanceInfo

_NAMED: Final = 5

_Key = TypeVar("_Key", bound=Hashable)
_T = TypeVar("_T")


def check_fleet(config: RouterConfig, replicas: Sequence[Examined], section: Section) -> None:
    """Compare the replicas that answer with each other and with the file."""
    seen = [each for each in replicas if each.answers]
    if not seen:
        section.trouble("up", "no replica answers: every request is refused with 503")
        return
    _check_models(config.model_aliases, seen, section)
    _check_versions(seen, section)
    _check_agents(seen, section)
    _check_stock_hashes(seen, section)
    _check_lmcache_workers(config, section)


def _check_models(aliases: Mapping[str, str], seen: Sequence[Examined], section: Section) -> None:
    telling = [each for each in seen if each.entries]
    served = set(chain.from_iterable(each.models for each in telling))
    for model in sorted(served):
        missing = [each.name for each in telling if model not in each.models]
        if missing:
            found = f"'{model}' is not served by {_listed(missing)}: its requests go to the others"
            section.note("models-differ", found)
    if len(telling) < len(seen):
        return  # what the others serve is not known
    for alias, real in aliases.items():
        if real not in served:
            found = f"model_aliases: '{alias}' stands for '{real}', which no replica serves"
            section.trouble("alias", found, f"name one that is: {_listed(sorted(served))}")
        elif alias in served:
            found = f"model_aliases: '{alias}' hides a model of that name, and stands for '{real}'"
            section.note("alias", found)


def _check_versions(seen: Sequence[Examined], section: Section) -> None:
    versions = _groups((each.version, each.name) for each in seen if each.version)
    if len(versions) > 1:
        found = f"versions of vLLM differ: {_told(versions)}"
        mend = "finish the upgrade: answers and keys of KV may differ between them"
        section.trouble("versions", found, mend)


def _check_agents(seen: Sequence[Examined], section: Section) -> None:
    infos = [(each.info, each.name) for each in seen if each.info is not None]
    for names in _groups((info.incarnation, name) for info, name in infos).values():
        if len(names) > 1:
            found = f"{_listed(names)} have one and the same agent"
            section.trouble("agent-url", found, "give each its own agent_url")
    for model, of_model in _groups((info.model, (info, name)) for info, name in infos).items():
        _check_alike(model, of_model, section)


def _check_alike(
    model: str, replicas: Sequence[tuple[InstanceInfo, str]], section: Section
) -> None:
    """See that replicas of a model can give each other KV."""
    hashes = _groups(
        (hash_in_words(info.hash_algorithm, info.hash_seed), name) for info, name in replicas
    )
    sizes = _groups((info.chunk_tokens, name) for info, name in replicas)
    layouts = _groups((info.layout, name) for info, name in replicas)
    if len(hashes) > 1:
        found = f"hash seeds differ between replicas of '{model}': {_told(hashes)}"
        mend = (
            "start all with the same PYTHONHASHSEED and --prefix-caching-hash-algo: else none "
            "can give another its KV"
        )
        section.trouble("hash-differs", found, mend)
    if len(sizes) > 1:
        found = f"chunk_size differs between replicas of '{model}': {_told(sizes)}"
        section.trouble("chunk-size", found, "give all the same: else none can give another its KV")
    elif len(layouts) > 1 and len(hashes) == 1:
        apart = "; ".join(_listed(names) for names in layouts.values())
        found = f"replicas of '{model}' lay out KV differently, and can give each other none: "
        mend = "start all with the same weights, dtype, kv_cache_dtype and parallel sizes"
        section.trouble("layout", found + apart, mend)
    without = [name for info, name in replicas if info.transfer_port is None]
    if len(replicas) > 1 and without:
        found = f"{_listed(without)} give other replicas no KV: they have no distributed_url"
        section.note("copies", found, "set it in the replica's file to have KV copied")


def _check_stock_hashes(seen: Sequence[Examined], section: Section) -> None:
    """Compare the hashes that KV events have shown, where there is no agent."""
    shapes = [(each.replica.shape, each.name) for each in seen if each.info is None]
    schemes = [(shape.scheme, name) for shape, name in shapes if shape is not None]
    hashes = _groups(
        (hash_in_words(scheme.algorithm, scheme.seed), name)
        for scheme, name in schemes
        if scheme is not None
    )
    if len(hashes) > 1:
        found = f"hash seeds differ: {_told(hashes)}; the router hashes each prompt for each"
        section.note("hash-differs", found, "start all with the same PYTHONHASHSEED")


def _check_lmcache_workers(config: RouterConfig, section: Section) -> None:
    workers = config.lmcache_workers
    if workers is None or workers.pre_caching_hash_algorithm != "builtin":
        return
    unknown = [
        each.name for each in config.replicas if each.agent_url is None and each.hash_seed is None
    ]
    if unknown:
        found = f"LMCache's builtin hash needs the hash_seed of {_listed(unknown)}"
        mend = "set PYTHONHASHSEED there, and hash_seed in the file, to the same number"
        section.trouble("lmcache-hash", found, mend)


def _groups(pairs: Iterable[tuple[_Key, _T]]) -> dict[_Key, list[_T]]:
    """Return what belongs to each key, in the order of its first."""
    found: dict[_Key, list[_T]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def _told(groups: Mapping[_Key, Sequence[str]]) -> str:
    return "; ".join(f"{key} ({_listed(names)})" for key, names in groups.items())


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"
