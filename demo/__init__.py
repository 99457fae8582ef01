"""A whole run on one machine. Start it with `make demo`."""
