"""Stock vLLM replicas with stock LMCache servers, and our engine beside them, as processes of this
machine: for tests and the demo of the real thing.
"""
