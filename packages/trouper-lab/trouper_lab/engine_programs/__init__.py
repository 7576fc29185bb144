"""Measurements of `trouper certify` on the device, in processes of their own: tiny models of every
family, the user's model, its bare loop."""

import trouper.engine  # noqa: F401 - sets up the process and loads the BLAS before MLX
