"""Imported before MLX: the process is prepared as a server's is, with OpenBLAS."""

from trouper.process import prepare_process

prepare_process()
