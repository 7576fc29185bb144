"""How to get an optional part of Trouper, as it was installed here.

An unqualified `pip install trouper[...]` names an index's package, perhaps a stranger's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "trouper"


def command_for(extra: str) -> str:
    """The command that installs an extra, such as `otel`, beside this Trouper."""
    origin = read_origin()
    if origin is None:
        return _install(f"{DISTRIBUTION}[{extra}]")
    if origin.get("dir_info", {}).get("editable"):
        return f"uv sync --frozen --inexact --extra {extra}"
    url = str(origin.get("url", ""))
    if url.startswith("file:"):
        return _install(f"{unquote(urlsplit(url).path)}[{extra}]")
    return _install(f"{DISTRIBUTION}[{extra}] @ {url}")


def _install(requirement: str) -> str:
    # uv writes this file into the environment of a tool, which has no pip.
    is_tool = (Path(sys.prefix) / "uv-receipt.toml").exists()
    return f"{'uv tool install --force' if is_tool else 'pip install'} '{requirement}'"


@cache
def read_origin() -> Mapping[str, Any] | None:
    """Where the package was installed from (PEP 610); None: an index has it. Without installation
    it is a checkout."""
    # The import takes longer than `trouper --version`.
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        text = distribution(DISTRIBUTION).read_text("direct_url.json")
    except PackageNotFoundError:
        return {"dir_info": {"editable": True}}
    return None if text is None else dict(json.loads(text))
