"""Credentials from files: TLS contexts, and the secret that the fleet shares."""

import os
import ssl
from pathlib import Path

from router.config.clients import ReplicaTlsConfig, TlsConfig
from router.config.settings import RouterConfig
from warmroute_common.config_error import Place
from warmroute_common.fleet_secret import (
    FILE_KEY,
    VARIABLE,
    BadSecretError,
    FleetSecret,
    read_fleet_secret,
)


def server_context(tls: TlsConfig) -> ssl.SSLContext:
    """Return what a port with this certificate takes; raise OSError for files that do not fit."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_certificate(context, tls)
    return context


def load_certificate(context: ssl.SSLContext, tls: TlsConfig) -> None:
    """Show this certificate from now on; raise OSError for files that do not fit."""
    # A password is never asked for: the router would wait at a terminal that it may not have.
    context.load_cert_chain(tls.cert_file, tls.key_file, password=lambda: "")


def client_context(tls: ReplicaTlsConfig) -> ssl.SSLContext | bool:
    """Return what aiohttp's ``ssl`` takes; raise OSError for a file without certificates."""
    if not tls.verify or tls.ca_file is None:
        return tls.verify
    return ssl.create_default_context(cafile=tls.ca_file)


def load_fleet_secret(config: RouterConfig, at: Place | None = None) -> FleetSecret | None:
    """Return the secret; None where there is none. Raises `ConfigError` for one of no use."""
    file = config.fleet_secret_file
    try:
        return read_fleet_secret(None if file is None else Path(file), os.environ)
    except BadSecretError as error:
        here = (
            Place("the environment", VARIABLE) if file is None else (at or Place("")).at(FILE_KEY)
        )
        raise here.error(error.problem, error.fix) from None
