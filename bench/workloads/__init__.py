"""What the replay sends: sessions of turns, read from a trace or generated from a seed."""
