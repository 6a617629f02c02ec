"""TLS on both sides of the router, with a certificate that is made here."""

import ssl
import subprocess
import urllib.error
import urllib.request
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from click.testing import CliRunner

from router.cli.commands import main
from router.config.credentials import server_context
from router.config.loading import load_router_config
from router.config.settings import ReplicaConfig, ReplicaTlsConfig, TlsConfig
from tests.router.cli.helpers import serving
from tests.router.conftest import Fleet
from warmroute_common.config_reader import ConfigError


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``cert.pem``, which is its own authority, ``key.pem`` and ``locked.pem``."""
    folder = tmp_path_factory.mktemp("tls")
    new = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days 2 -subj /CN=test"
    names = "-addext subjectAltName=DNS:localhost,IP:127.0.0.1"
    lock = "ec -in key.pem -aes128 -passout pass:x -out locked.pem"
    for command in (f"{new} {names} -keyout key.pem -out cert.pem", lock):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    return folder


def test_the_router_is_reached_by_https_alone(files: Path) -> None:
    path = files / "router.yaml"
    path.write_text(
        "replicas: [{url: 'http://127.0.0.1:1'}]\nport: 0\n"
        "tls: {cert_file: cert.pem, key_file: key.pem}\n"
    )
    trusting = ssl.create_default_context(cafile=str(files / "cert.pem"))
    with serving("--config", str(path)) as (process, url):
        assert url.startswith("https://127.0.0.1:")
        with urllib.request.urlopen(f"{url}/ui", context=trusting) as response:
            assert response.status == 200
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(f"{url}/ui")
        with pytest.raises(OSError):
            urllib.request.urlopen(f"http{url.removeprefix('https')}/ui")
        process.terminate()
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_a_new_certificate_is_shown_without_a_restart(files: Path, tmp_path: Path) -> None:
    """By links, as Kubernetes exchanges them; connections that are open stay so."""
    new = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days 2 -subj /CN=new"
    names = "-addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
    second = tmp_path / "second"
    second.mkdir()
    subprocess.run(
        ["openssl", *f"{new} {names}".split()], cwd=second, check=True, capture_output=True
    )
    mounted = tmp_path / "mounted"
    mounted.symlink_to(files)
    path = tmp_path / "router.yaml"
    path.write_text(
        "replicas: [{url: 'http://127.0.0.1:1'}]\nport: 0\n"
        "tls: {cert_file: mounted/cert.pem, key_file: mounted/key.pem}\n"
    )
    before, after = (
        ssl.create_default_context(cafile=str(each / "cert.pem")) for each in (files, second)
    )
    with serving("--config", str(path)) as (process, url):
        with urllib.request.urlopen(f"{url}/ui", context=before) as response:
            assert response.status == 200
        (tmp_path / "other").symlink_to(second)
        (tmp_path / "other").replace(mounted)
        assert process.stderr is not None
        for line in process.stderr:
            if "configuration reloaded" in line:
                break
        with urllib.request.urlopen(f"{url}/ui", context=after) as response:
            assert response.status == 200
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(f"{url}/ui", context=before)
        process.terminate()


@pytest.mark.parametrize(
    ("ca_file", "verify", "status"),
    [(None, True, 503), ("cert.pem", True, 200), (None, False, 200)],
)
async def test_a_replicas_certificate_is_verified(  # noqa: PLR0917  (fixtures)
    fleet: Fleet,
    client: aiohttp.ClientSession,
    files: Path,
    ca_file: str | None,
    verify: bool,
    status: int,
) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m"}]})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    tls = TlsConfig(cert_file=str(files / "cert.pem"), key_file=str(files / "key.pem"))
    async with AsyncExitStack() as stack:
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server_context(tls)).start()
        url = f"https://127.0.0.1:{runner.addresses[0][1]}"
        ca = None if ca_file is None else str(files / ca_file)
        router = await fleet.router(
            replicas=(ReplicaConfig(url=url, instance_id="one"),),
            replica_tls=ReplicaTlsConfig(ca_file=ca, verify=verify),
        )
        async with client.post(
            f"{router.url}/v1/completions", json={"model": "m", "prompt": "x"}
        ) as response:
            assert response.status == status
        await router.runner.cleanup()


@pytest.mark.parametrize(
    ("tls", "said"),
    [
        ("tls: {cert_file: none.pem}", "tls.cert_file: 'none.pem' does not exist"),
        ("tls: {cert_file: cert.pem}", "cert.pem has no private key"),
        ("tls: {cert_file: cert.pem, key_file: locked.pem}", "locked.pem has a password"),
        ("replica_tls: {ca_file: key.pem}", "key.pem has no certificate"),
    ],
)
def test_files_that_do_not_fit_are_told_at_start(files: Path, tls: str, said: str) -> None:
    path = files / "wrong.yaml"
    path.write_text(f"replicas: [{{url: 'http://a:1'}}]\n{tls}\n")
    with pytest.raises(ConfigError, match=r"PEM file|existing file|password") as caught:
        load_router_config(path)
    assert said in str(caught.value)


def test_commands_say_how_to_reach_a_router_with_tls(files: Path) -> None:
    path = files / "commands.yaml"
    path.write_text(
        "replicas: [{url: 'http://127.0.0.1:1'}]\nport: 0\n"
        "tls: {cert_file: cert.pem, key_file: key.pem}\n"
    )

    def resume(*arguments: str) -> str:
        return CliRunner().invoke(main, ["resume", "one", *arguments]).output

    with serving("--config", str(path)) as (_, url):
        plain = f"http{url.removeprefix('https')}"
        assert f"if it speaks TLS, write --router {url}" in resume("--router", plain)
        assert "is not trusted (self-signed certificate)" in resume("--router", url)
        known = resume("--router", url, "--ca-file", str(files / "cert.pem"))
        assert "Error: " in known and "'one'" in known, "the router itself answers"
