"""Resolves `--model` to a directory: local, from the hub, or bundled."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

import httpx2
from huggingface_hub import snapshot_download
from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import tqdm, validate_repo_id

# From the hub, or ModelScope (MLXLM_USE_MODELSCOPE).
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from trouper.engine.loading import bundled_model
from trouper.engine.platform.error_text import line_of
from trouper.protocol.loading import LoadWatch, nobody_watches
from trouper.protocol.paths import exists, expanded, is_directory, is_file
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.settings import LM_STUDIO, OMLX
from trouper.protocol.suggested_models import no_hub_id
from trouper.storage.foreign_files import OTHER_VERSION, format_of
from trouper.storage.other_programs import directory_of_program

FILES = [*DEFAULT_ALLOW_PATTERNS, "[1-9]_*/model.safetensors"]
SHAPES = Path(__file__).parents[3] / "examples" / "shapes"
"""The tiny model that sees, in checkouts only."""
OFFLINE = "HF_HUB_OFFLINE is set: unset it, or give a directory"
MIRROR = "HF_ENDPOINT to a mirror, or give a directory"
LISTED = "`trouper models ls` lists the models that are here"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve(
    model: str | None,
    report: Callable[[str], None],
    watch: LoadWatch = nobody_watches,
    flag: str = "--model",
    *,
    bar: type[tqdm] | None = None,
) -> Path:
    """Downloads a missing model. `watch` gets the bundled model's progress. `flag`: source of the
    name. `bar`: shows the hub's downloads. Raises `ModelUnusable`."""
    if model is None:
        report(f"no --model: serving the embedded {bundled_model.NAME}")
    directory: Path | None
    match source_of(model, flag):
        case Path() as directory:
            if model is not None and (may_download(model) or model == bundled_model.NAME):
                what = f"the directory {directory.absolute()}, not the model of that name elsewhere"
                report(f"{flag} {model} is {what}")
            return directory
        case None:
            return bundled_model.directory(None, report, watch)
        case hub_id:
            if cached(hub_id) is None and (directory := _of_other_program(hub_id)) is not None:
                report(f"{flag} {hub_id} is in {directory}, and is not downloaded again")
                return directory
            report(f"fetching {hub_id} from the model hub, unless it is cached")
            return _fetch(hub_id, bar)


def source_of(model: str | None, flag: str = "--model") -> Path | str | None:
    """A directory, a hub id, or None for the bundled model. Raises `ModelUnusable`."""
    if model is None:
        return None
    path = expanded(model)
    if is_directory(path):
        return path
    if model == bundled_model.NAME:
        return None
    if model == SHAPES.name and is_directory(SHAPES):
        return SHAPES
    if exists(path):
        raise ModelUnusable(f"{flag} {model} is a file: {_remedy_for_file(path)}")
    if not HUB_ID.fullmatch(model) or model.startswith((".", "~")):
        if "/" not in model and (directory := _of_other_program(model)) is not None:
            return directory
        problem = f"{flag} {model}: no such directory, and not a hub id (owner/name) either"
        if "://" in model:
            hub_id = "/".join(urlsplit(model).path.split("/")[1:3]) or "owner/name"
            raise ModelUnusable(f"{flag} {model} is a URL", f"give the hub id alone, as {hub_id}")
        is_name = "/" not in model or ":" in model
        raise ModelUnusable(problem, no_hub_id(model) if is_name else LISTED)
    try:
        validate_repo_id(model)
    except HFValidationError as error:
        raise ModelUnusable(f"{flag} {model}: not a hub id: {line_of(error)}") from error
    return model


def _remedy_for_file(path: Path) -> str:
    if form := format_of(path):
        return f"{form} is not read here; {OTHER_VERSION}"
    return "give the directory that holds config.json and the weights"


def may_download(model: str | None) -> bool:
    """Reads no file system, which may hang."""
    return model is None or bool(HUB_ID.fullmatch(model) and not model.startswith((".", "~")))


def cached(hub_id: str) -> Path | None:
    """None unless completely cached. Uses no network."""
    try:
        return Path(snapshot_download(hub_id, local_files_only=True, allow_patterns=FILES))
    except LocalEntryNotFoundError:
        return None


def _of_other_program(name: str) -> Path | None:
    """The directory of a program whose models `trouper models ls` lists under the same names."""
    directories = [directory_of_program(source) / name for source in (LM_STUDIO, OMLX)]
    return next((each for each in directories if is_file(each / "config.json")), None)


def local(model: str | None) -> Path:
    """Raises `ModelUnusable`."""
    source = source_of(model)
    if not isinstance(source, str):
        return resolve(model, lambda _: None)
    if (directory := cached(source) or _of_other_program(source)) is None:
        raise ModelUnusable(
            f"{source} is not here, or not all of it", "`trouper models pull` downloads it"
        )
    return directory


def _remedy() -> str:
    if getproxies().get(urlsplit(ENDPOINT).scheme):
        return f"look at the proxy that the environment names, set {MIRROR}"
    return f"set HTTPS_PROXY to your proxy or {MIRROR}"


def _fetch(hub_id: str, bar: type[tqdm] | None) -> Path:
    try:
        return Path(snapshot_download(hub_id, allow_patterns=FILES, tqdm_class=bar))
    except GatedRepoError as error:
        raise ModelUnusable(
            f"{hub_id} is gated: accept its terms on the hub and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelUnusable(
            f"the hub has no {hub_id}, or it is private: then set HF_TOKEN"
        ) from error
    except IncompleteSnapshotError as error:
        message = f"only a part of {hub_id} is cached, and the model hub cannot be reached"
        raise ModelUnusable(message, f"`trouper models pull {hub_id}` fetches the rest") from error
    except LocalEntryNotFoundError as error:
        message = f"{hub_id} is neither a directory nor cached, and the model hub cannot be reached"
        raise ModelUnusable(message, OFFLINE if HF_HUB_OFFLINE else _remedy()) from error
    except (
        httpx2.HTTPError,
        httpx2.InvalidURL,
        OSError,
        ImportError,
    ) as error:
        # ImportError: of a proxy by SOCKS.
        raise ModelUnusable(f"{hub_id} could not be downloaded: {line_of(error)}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ModelUnusable(f"{ENDPOINT} does not answer as a model hub does", _remedy()) from error
