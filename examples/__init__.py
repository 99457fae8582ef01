"""Programs to read, run and change. Each has a ``--tiny`` mode for a machine without GPU."""
