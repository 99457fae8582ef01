"""Standalone proxy that makes several vLLM replicas look like one server."""
