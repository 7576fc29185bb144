from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal

from trouper.protocol.paths import encodable
from trouper.protocol.problems import SettingsInvalid

Kind = Literal["generator", "embedder", "reranker"]
"""Purpose of a model."""
# Model that is served without --model.
EMBEDDED = "SmolLM2-135M-Instruct"
FLAG = "--served-model-name"
ALIAS_FLAG = "--model-alias"
# Default aliases with one model, for clients that insist on a name.
ANY_NAME = ("*",)
NO_ALIASES = ("off",)
DRAFT_FLAG = "--draft-model"
ADAPTER_FLAG = "--adapter"


def names_of(model: str, aliases: Sequence[str], *, default: bool) -> tuple[str, ...]:
    named = [
        name for name, meant in map(_parted, aliases) if meant == model or (default and not meant)
    ]
    return tuple(dict.fromkeys(map(encodable, [*named, model])))


def require_names(models: Sequence[str], aliases: Sequence[str]) -> None:
    """Raises `SettingsInvalid` for a name without effect. `models`: --model, in order."""
    meant_by: dict[str, str] = {}
    for alias in aliases:
        name, meant = _parted(alias)
        model = models[0] if meant is None else meant
        if not name.strip():
            raise SettingsInvalid(f"{FLAG} {alias!r} has no name; give NAME, or NAME=MODEL", FLAG)
        if model not in models:
            raise SettingsInvalid(
                f"{FLAG} {alias}: {model!r} is none of --model ({', '.join(models)}); give "
                "NAME=MODEL with one of them, "
                "or NAME alone for the first",
                FLAG,
            )
        if meant_by.setdefault(name, model) != model:
            raise SettingsInvalid(
                f"{FLAG} {name} is given to two models; give each a name of its own", FLAG
            )


def _parted(alias: str) -> tuple[str, str | None]:
    # Split an alias into name and model; None: the default model.
    name, given, model = alias.partition("=")
    return name, model if given else None


def require_aliases(models: Sequence[str], names: Sequence[str], aliases: Sequence[str]) -> None:
    """Raises `SettingsInvalid` for an alias without effect. `models`, `names`: --model,
    --served-model-name."""
    known = {*models, *(_parted(name)[0] for name in names)}
    if NO_ALIASES[0] in aliases and tuple(aliases) != NO_ALIASES:
        raise SettingsInvalid(f"{ALIAS_FLAG} off excludes other aliases; leave it out", ALIAS_FLAG)
    for alias in aliases:
        pattern, model = _parted(alias)
        if not pattern.strip():
            raise SettingsInvalid(
                f"{ALIAS_FLAG} {alias!r} has no pattern; give PATTERN, or PATTERN=MODEL", ALIAS_FLAG
            )
        if model is not None and model not in known:
            raise SettingsInvalid(
                f"{ALIAS_FLAG} {alias}: {model!r} is not served ({', '.join(models)}); give "
                "PATTERN=MODEL with one of them",
                ALIAS_FLAG,
            )


def aliases_in_use(aliases: Sequence[str], models: int) -> tuple[str, ...]:
    """The configured aliases, else any name if there is one model."""
    if tuple(aliases) == NO_ALIASES:
        return ()
    return tuple(aliases) or (ANY_NAME if models == 1 else ())


def aliased(name: str, aliases: Sequence[str], names: Sequence[Sequence[str]]) -> int | None:
    """Index of the model for an unknown name; None: no alias matches. `names`: of each model, the
    default first."""
    for pattern, model in map(_parted, aliases):
        if fnmatchcase(name, pattern):
            found = (index for index, own in enumerate(names) if model is None or model in own)
            return next(found, None)
    return None


def draft_models(models: Sequence[str], given: Sequence[str]) -> dict[str, str]:
    """Draft model by model. `given`: --draft-model, DRAFT for the first model or MODEL=DRAFT.
    Raises `SettingsInvalid` for an empty one, and for two of one model."""
    drafts: dict[str, str] = {}
    for text in given:
        name, named, value = text.partition("=")
        model, draft = (name, value) if named and name in models else (models[0], text)
        if not draft.strip():
            raise SettingsInvalid(
                f"{DRAFT_FLAG} {text!r} names no model; give a directory or a hub id, or "
                "MODEL=DIR-OR-ID",
                DRAFT_FLAG,
            )
        if drafts.setdefault(model, draft) != draft:
            raise SettingsInvalid(
                f"{DRAFT_FLAG}: {model} would have two draft models; give each model of --model at "
                "most one, as MODEL=DIR-OR-ID",
                DRAFT_FLAG,
            )
    return drafts


def adapters_of(given: Sequence[str]) -> dict[str, str]:
    """Directory by name of adapter. `given`: --adapter. Raises `SettingsInvalid`."""
    adapters: dict[str, str] = {}
    for text in given:
        name, _, directory = text.partition("=")
        if not name.strip() or ":" in name or not directory.strip():
            raise SettingsInvalid(
                f"{ADAPTER_FLAG} {text!r} is not NAME=DIR; give a name without a colon, and a "
                "directory",
                ADAPTER_FLAG,
            )
        if name in adapters:
            raise SettingsInvalid(
                f"{ADAPTER_FLAG} {name} is given twice; give each adapter a name of its own",
                ADAPTER_FLAG,
            )
        adapters[name] = directory
    return adapters


def require_adapters(models: Sequence[str], names: Sequence[str], given: Sequence[str]) -> None:
    """Raises `SettingsInvalid` for an adapter with a model's name. `models`, `names`: --model,
    --served-model-name."""
    taken = {*models, *(_parted(name)[0] for name in names)}
    if name := next((name for name in adapters_of(given) if name in taken), None):
        raise SettingsInvalid(
            f"{ADAPTER_FLAG} {name} has the name of the model; give it another", ADAPTER_FLAG
        )
