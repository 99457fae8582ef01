"""trl_async_bucket."""
