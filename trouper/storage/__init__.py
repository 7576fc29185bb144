"""The cache directory: files of blocks on disk. Imports neither Trio nor MLX."""
