"""A folder for ``PYTHONPATH``: every Python process then tells what its heap holds."""
