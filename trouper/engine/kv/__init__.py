"""KV caches and recurrent state of a batch of rows, and the blocks that are stored of them."""
