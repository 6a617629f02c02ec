"""A fleet in discrete events: no sockets, no clock."""
