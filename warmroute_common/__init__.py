"""What the router and the engine share. Imports nothing else of this project."""
