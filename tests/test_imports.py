"""What importing the server costs: the garbage collector waits."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from trouper.garbage import collected_later


def test_it_is_as_it_was_afterwards_also_after_an_error() -> None:
    with collected_later():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), collected_later():
        raise ImportError
    assert gc.isenabled()
    with collected_later(), collected_later():
        pass
    assert gc.isenabled()


def test_who_has_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with collected_later():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_server_is_imported_without_a_full_collection() -> None:
    """In a process of its own. A full collection is what grows with the number of modules."""
    program = """
import gc, sys
full = []
gc.callbacks.append(lambda phase, info: full.append(info) if info["generation"] == 2 else None)
from trouper.cli import main
list(main.commands.values())
assert gc.isenabled()
from trouper.garbage import collected_later
with collected_later():
    from trouper.cli.server_process import _import_engine
_import_engine()
assert "mlx.core" in sys.modules and gc.get_freeze_count() > 100_000
assert gc.isenabled()
assert not full, full
"""
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
