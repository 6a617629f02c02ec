"""What is real in a simulated replica: its cache engine, agent and transfers."""
