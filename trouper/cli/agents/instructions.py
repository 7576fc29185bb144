"""What `trouper connect AGENT` prints: the client's configuration, for a person to read and
copy."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from trouper.cli.agents.agent import Agent, ServedModel, Setup
from trouper.cli.agents.config_files import short
from trouper.cli.agents.merging import KEY_VARIABLE, Secret, plain


def instructions(agent: Agent, served: ServedModel, setup: Setup) -> str:
    """Return the text. It holds no key."""
    return "\n".join(_lines(agent, served, setup)) + "\n"


def _lines(agent: Agent, served: ServedModel, setup: Setup) -> Iterator[str]:
    yield (
        f"# {agent.title}: {served.model} at {served.url}, context {served.context}, output "
        f"{served.output}"
    )
    for file in setup.files:
        yield f"\n# {short(file.path)}"
        yield file.format.dump(plain(file.values, shown=True)).rstrip("\n")
    variables = setup.exports if setup.files else setup.variables
    if variables:
        yield "\n# variables"
        yield from exported(variables)
        yield from (f"unset {name}" for name in setup.unset if not setup.files)
    if setup.notes:
        yield ""
    yield from (f"# {note}" for note in setup.notes)
    yield ""
    if agent.why_no_write:
        yield f"# no --write; {agent.why_no_write}"
    else:
        yield (
            f"# trouper connect {agent.name} --write    merges this into the "
            f"file{'s' * (len(setup.files) > 1)}"
        )
    if agent.why_no_run:
        yield f"# no --run; {agent.why_no_run}"
    else:
        yield f"# trouper connect {agent.name} --run      starts {agent.program} so, once"


def exported(variables: Mapping[str, str | Secret]) -> Iterator[str]:
    """Yield the variables as a shell takes them. Keys are given by a reference to the variable that
    has the server's."""
    for name, value in variables.items():
        if not isinstance(value, Secret):
            yield f"export {name}={shlex.quote(value)}"
        elif name == KEY_VARIABLE:
            yield f"export {name}=...    # the server's key"
        else:
            yield f'export {name}="${KEY_VARIABLE}"'
