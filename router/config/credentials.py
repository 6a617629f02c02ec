"""Credentials from files: TLS contexts, and the secret that the fleet shares."""

import os
import ssl
from pathlib import Path

from router.config.settings import ReplicaTlsConfig, RouterConfig, TlsConfig
from warmroute_common.config_reader import BadValueError, ConfigLocation
from warmroute_common.fleet_secret import (
    FILE_KEY,
    VARIABLE,
    FleetSecret,
    read_fleet_secret,
)


def server_context(tls: TlsConfig) -> ssl.SSLContext:
    """Return the TLS context of a listening port; raise OSError for unusable files."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_certificate(context, tls)
    return context


def load_certificate(context: ssl.SSLContext, tls: TlsConfig) -> None:
    """Replace the certificate in a context; raise OSError for unusable files."""
    # With an empty password OpenSSL never asks for one at a terminal.
    context.load_cert_chain(tls.cert_file, tls.key_file, password=lambda: "")


def client_context(tls: ReplicaTlsConfig) -> ssl.SSLContext | bool:
    """Return a value for aiohttp's ``ssl``; raise OSError for a file without certificates."""
    if not tls.verify or tls.ca_file is None:
        return tls.verify
    return ssl.create_default_context(cafile=tls.ca_file)


def load_fleet_secret(config: RouterConfig, at: ConfigLocation | None = None) -> FleetSecret | None:
    """Return the fleet's secret, or None. Raises `ConfigError` for one that cannot be used."""
    file = config.fleet_secret_file
    try:
        return read_fleet_secret(None if file is None else Path(file), os.environ)
    except BadValueError as error:
        here = ConfigLocation("the environment", VARIABLE)
        if file is not None:
            here = (at or ConfigLocation("")).at(FILE_KEY)
        raise here.error(error.problem, error.fix) from None
