"""KV caches and recurrent state of a batch of rows, and the cached blocks that are copied out of
them."""
