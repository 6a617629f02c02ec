"""Clients of stores in processes of their own: a crash there is an outage here."""
