"""Fault injection for minutes: is a request lost, is a byte wrong, does anything grow?"""
