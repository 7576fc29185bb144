"""`trouper launch`: run the ranks of one model as processes."""

from __future__ import annotations

import json
import re
import sys
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path

import click
import trio

from trouper.cli.exits import refuse
from trouper.cli.process_group import Hosts, LocalRanks, RankLauncher, Supervisor
from trouper.system import temporary_directory

BACKENDS = ("any", "ring", "jaccl", "jaccl-ring", "nccl", "mpi")
HOST = re.compile(r"[\w][\w.:%@-]*", re.ASCII)  # An option of ssh would begin with a dash.
ON_THIS_MACHINE = ("ring", "nccl")  # Backends whose ranks on one machine need only variables


@click.command(context_settings={"ignore_unknown_options": False})
@click.option(
    "-n",
    "ranks",
    type=click.IntRange(1, 256),
    default=2,
    show_default=True,
    help="Ranks on this machine.",
)
@click.option(
    "--hostfile",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File that names the hosts of the ranks, as mlx.launch reads it.",
)
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="any",
    show_default=True,
    help=(
        "How tensors travel; any: NCCL where there are NVIDIA GPUs and MLX's CUDA build, else "
        "ring, or what --hostfile says."
    ),
)
@click.option(
    "--restarts",
    type=click.IntRange(0),
    default=None,
    help="How often lost ranks are started again. Default: always.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def launch(
    ranks: int, hostfile: Path | None, backend: str, restarts: int | None, command: tuple[str, ...]
) -> None:
    """Start ranks that serve one model together, as in `trouper launch -n 2 -- serve --model DIR`.
    When one is lost all are started again. Each line of their output begins with the rank."""
    if command[0] != "serve":
        refuse(
            "launch starts `serve`, as in `trouper launch -n 2 -- serve --model DIR`; not "
            f"{command[0]!r}; `trouper connect AGENT --run` starts a coding agent"
        )
    temporary_directory.keep_private()  # The hostfile lies there, and all ranks share it.
    group = _group(ranks, hostfile, backend, command)
    sys.exit(trio.run(Supervisor(group, restarts).run))


def _require_hosts(hostfile: Path) -> None:
    """Refuse a file without hosts, and names that ssh would take as options."""
    with suppress(OSError, ValueError):
        content = json.loads(hostfile.read_bytes())
        hosts = content.get("hosts", True) if isinstance(content, dict) else content
        if not hosts:
            refuse(f"--hostfile {hostfile} names no host; give one for each rank")
        for host in hosts if isinstance(hosts, list) else ():
            name = host.get("ssh") if isinstance(host, dict) else None
            if isinstance(name, str) and not HOST.fullmatch(name):
                refuse(f"--hostfile {hostfile}: {name!r} is no name of a host for ssh")


def _group(
    ranks: int, hostfile: Path | None, backend: str, command: tuple[str, ...]
) -> RankLauncher:
    if hostfile is None and backend == "any":
        backend = "nccl" if _has_cuda() else "ring"
    if hostfile is None and backend in ON_THIS_MACHINE:
        return LocalRanks(ranks, backend, (sys.executable, "-P", "-m", "trouper", *command))
    if hostfile is not None:
        _require_hosts(hostfile)
    program = Path(sys.executable).with_name("trouper")
    return Hosts(ranks, hostfile, None if backend == "any" else backend, (str(program), *command))


def _has_cuda() -> bool:
    built = any(
        (distribution.name or "").startswith("mlx-cuda") for distribution in distributions()
    )
    return built and any(Path("/dev").glob("nvidia[0-9]*"))
