"""Every number in the docs comes from a command here. `make bench` runs the timed ones."""
