"""`python -m tests.zoo_files [FAMILY...]`: play each family, or those named; all of them write the
table of docs/models.md."""

# ruff: noqa: T201
from __future__ import annotations

import sys
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory

import click

import tests.conftest  # noqa: F401 - the threads of BLAS, before MLX

# isort: split
import mlx.core as mx

from tests.zoo.__main__ import progress
from tests.zoo_files.checking import Outcome, play
from tests.zoo_files.families import FAMILIES
from tests.zoo_files.table import row, write


@click.command()
@click.argument("names", nargs=-1, metavar="[FAMILY]...")
def main(names: tuple[str, ...]) -> None:
    """Play each FAMILY of tests/zoo_files/families.py, or all; all of them write the table of
    docs/models.md."""
    for name in names:
        if name not in FAMILIES:
            near = ", ".join(get_close_matches(name, FAMILIES)) or ", ".join(FAMILIES)
            raise click.BadParameter(f"there is no family {name!r}; there is {near}")
    chosen, outcomes, faults = names or tuple(FAMILIES), list[Outcome](), list[str]()
    for done, name in enumerate(chosen):
        progress(done, len(chosen), name, len(faults))
        with TemporaryDirectory() as directory:
            outcomes.append(play(FAMILIES[name], Path(directory) / "model"))
        faults += [f"{name}: {fault}" for fault in outcomes[-1].faults]
        mx.clear_cache()
    progress(len(chosen), len(chosen), "", len(faults))
    print()
    print("\n".join([*map(row, outcomes), *faults]))
    if not names and not faults:
        write(outcomes)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
