"""API keys: rights, limits, usage, and the file."""
