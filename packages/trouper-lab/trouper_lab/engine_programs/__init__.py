"""Measurements of `trouper certify`, each in a process."""

from trouper.process import prepare_process

prepare_process()  # Before MLX is imported.
