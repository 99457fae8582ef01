"""One module per seam in TRL: what we rely on there, probed at import."""
