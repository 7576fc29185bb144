"""How to get an optional part of Trouper, as it was installed here.

An unqualified `pip install trouper[...]` names an index's package, perhaps a stranger's.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "trouper"


def command_for(extra: str) -> str:
    """The command that installs an extra, such as `otel`, beside this Trouper."""
    origin = read_origin()
    if origin is not None and origin.get("dir_info", {}).get("editable"):
        return f"uv sync --frozen --inexact --extra {extra}"
    # uv writes this file into the environment of a tool, which has no pip.
    receipt = Path(sys.prefix) / "uv-receipt.toml"
    if not receipt.exists():
        return f"pip install '{_requirement(origin, extra)}'"
    extras = sorted({*_extras_in(receipt), extra})  # uv makes the environment anew.
    return f"uv tool install --force '{_requirement(origin, ','.join(extras))}'"


def _requirement(origin: Mapping[str, Any] | None, extras: str) -> str:
    if origin is None:
        return f"{DISTRIBUTION}[{extras}]"
    url = str(origin.get("url", ""))
    if url.startswith("file:"):
        return f"{unquote(urlsplit(url).path)}[{extras}]"
    return f"{DISTRIBUTION}[{extras}] @ {url}"


def _extras_in(receipt: Path) -> Iterator[str]:
    """The extras that a tool of uv was installed with."""
    tool = tomllib.loads(receipt.read_text("utf-8")).get("tool", {})
    for requirement in tool.get("requirements", ()):
        if requirement.get("name") == DISTRIBUTION:
            yield from requirement.get("extras", ())


@cache
def read_origin() -> Mapping[str, Any] | None:
    """Where the package was installed from (PEP 610); None: an index has it. Without installation
    it is a checkout."""
    try:
        text = distribution(DISTRIBUTION).read_text("direct_url.json")
    except PackageNotFoundError:
        return {"dir_info": {"editable": True}}
    return None if text is None else dict(json.loads(text))
