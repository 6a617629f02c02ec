"""TLS contexts from files."""

import ssl

from router.config.clients import ReplicaTlsConfig, TlsConfig


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
