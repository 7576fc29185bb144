"""Measurements of `trouper certify` on the device, in processes of their own: tiny models of every
family, the user's model, its bare loop."""

from trouper.process import prepare_process

prepare_process()  # Before MLX is imported.
