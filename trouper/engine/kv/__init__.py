"""KV caches and recurrent states of rows, and the cached blocks copied from rows."""
