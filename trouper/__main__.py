"""`python -m trouper` is `trouper`."""

from __future__ import annotations

from trouper.cli import main

main(prog_name="trouper")
