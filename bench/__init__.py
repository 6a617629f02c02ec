"""Measurements of Warmroute, and what they need: a model, real text, a demo."""
