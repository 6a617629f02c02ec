"""Warmroute behind a gateway: the endpoint picker (ext_proc), and Envoy's configuration."""
