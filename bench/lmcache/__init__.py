"""Replicas with stock LMCache servers, and with our engine for comparison, as processes of this
machine: for tests and the demo.
"""
