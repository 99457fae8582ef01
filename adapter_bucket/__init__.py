"""adapter_bucket."""
