"""From what `--model` says to a directory: a local one, one of the hub's, or the embedded model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from mlx_lm.utils import _download  # the hub files that mlx-lm reads, and ModelScope on request

from trouper.engine import embedded
from trouper.protocol.errors import ModelUnusable
from trouper.protocol.loading import LoadWatch, nobody_watches

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve(model: str | None, report: Callable[[str], None], watch: LoadWatch = nobody_watches) -> Path:
    """The model's directory; downloads it unless it is there. `watch` hears how far the embedded one has come; the hub's
    client shows bars of its own. Raises `ModelUnusable`."""
    if model is None:
        report(f"no --model: serving the embedded {embedded.NAME}")
        return embedded.directory(None, report, watch)
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if model == embedded.NAME:
        return embedded.directory(None, report, watch)
    if path.exists():
        raise ModelUnusable(f"--model {model} is a file: give the directory that holds config.json and the weights")
    if not HUB_ID.fullmatch(model) or model.startswith((".", "~")):
        raise ModelUnusable(f"--model {model}: no such directory, and not a hub id (owner/name) either")
    report(f"fetching {model} from the model hub, unless it is cached")
    return _fetch(model)


def _fetch(hub_id: str) -> Path:
    try:
        return Path(_download(hub_id))
    except GatedRepoError as error:
        raise ModelUnusable(f"{hub_id} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelUnusable(f"the hub has no {hub_id}, or it is private: then set HF_TOKEN") from error
    except LocalEntryNotFoundError as error:
        raise ModelUnusable(
            f"{hub_id} is neither a directory nor cached, and the model hub cannot be reached"
        ) from error
    except HFValidationError as error:
        raise ModelUnusable(f"--model {hub_id}: not a hub id: {error}") from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelUnusable(f"{hub_id} could not be downloaded: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
