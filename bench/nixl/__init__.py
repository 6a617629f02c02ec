"""Stock vLLM with NixlConnector, for tests on machines without GPUs."""
