"""Takes the user's directories out of a certificate: an error quotes the path of what it is about,
and a certificate is for others to read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trouper.cli.commands.certify.certificate import Json

PART = r"/[^\s/\\:;,'\"`()<>\[\]{}]+"
PATH = re.compile(rf"(?<![\w.:/-])(?:~(?:{PART})+|(?:{PART}){{2,}})")
"""An absolute path of several parts, or one below a home directory. A path of one part, as /health,
is nobody's directory; nor is a URL's."""


def without_directories(certificate: Json, names: Mapping[str, str]) -> Json:
    """Return the certificate with the last part of each path in place of the path. `names`: what
    stands for directories that are known, which may have spaces in them; those that are no absolute
    paths stay, as hub ids do."""
    known = {path: name for path, name in names.items() if path.startswith("/") and path != "/"}
    changed: Json = _changed(
        certificate, dict(sorted(known.items(), key=lambda item: -len(item[0])))
    )
    return changed


def _changed(value: Any, names: Mapping[str, str]) -> Any:
    match value:
        case str():
            for path, name in names.items():
                value = value.replace(path, name)
            return PATH.sub(lambda found: Path(found[0]).name, value)
        case dict():
            return {key: _changed(each, names) for key, each in value.items()}
        case list() | tuple():
            return [_changed(each, names) for each in value]
        case _:
            return value
