"""Routers compared on the clock, before one simulated fleet."""
