"""The router's settings, and how its file is read and checked."""
