"""Which replica LMCache's workers are inside of. Pure.

The replica whose ``instance_id`` is their ``lmcache_instance_id``. Without that it is the one on
their host, if there is one such instance and one such replica on that host.
"""

from collections.abc import Mapping

from router.config import ReplicaConfig, join_host_port, server_key


def bound(
    replicas: Mapping[str, ReplicaConfig], instances: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the replica of each instance, and why others have none, for a person.

    ``instances`` are the hosts of instances by their ids.
    """
    found = {each: each for each in instances if each in replicas}
    plain: dict[str, list[str]] = {}
    for name, each in replicas.items():
        if name not in found and each.agent_url is None and each.lmcache is None:
            plain.setdefault(_host(each.url), []).append(name)
    nameless = {each: _host(_url(ip)) for each, ip in instances.items() if each not in found}
    problems = {}
    for instance, host in nameless.items():
        here = plain.get(host, [])
        beside = [each for each, its in nameless.items() if its == host and each != instance]
        if len(here) == 1 and not beside:
            found[instance] = here[0]
        else:
            problems[instance] = _unclear(instance, instances[instance], here, beside)
    return found, problems


def _url(ip: str) -> str:
    return f"http://{join_host_port(ip, 80)}"


def _host(url: str) -> str:
    return server_key(url)[1]


def _unclear(instance: str, ip: str, here: list[str], beside: list[str]) -> str:
    if not here:
        why = f"no other replica's url names its host {ip}"
    elif beside:
        why = f"{', '.join(beside)} is at {ip} too"
    else:
        why = f"{', '.join(here)} are all at {ip}"
    return (
        f"which replica the LMCache instance '{instance}' is inside of is not clear: {why}; write "
        f"'instance_id: {instance}' at its replica"
    )
