"""Results of earlier self-checks, by a hash of everything that a result depends on."""

from __future__ import annotations

import os
import time
from functools import cache
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import msgspec
from xxhash import xxh3_64

from trouper import workarounds
from trouper.engine.distributed.rank_group import RankGroup
from trouper.engine.platform import device
from trouper.protocol.capabilities import FEATURES, Capabilities, SelfCheck
from trouper.protocol.settings import Settings, default_cache_dir
from trouper.protocol.version import VERSION
from trouper.storage.cache_fingerprint import namespace
from trouper.storage.memo_file import read_memo, write_memo

SWITCHES = ("MLX_ENABLE_TF32", "MLX_METAL_FAST_SYNCH", workarounds.VARIABLE)
"""Environment variables that change results, or the order of MLX's work."""
ENGINE = Path(__file__).parent.parent
# The oldest are removed.
MAX_RESULTS = 200


class CheckResult(msgspec.Struct, frozen=True):
    """off: reason by disabled feature. checked: the models that ran. at: Unix seconds."""

    off: dict[str, str]
    checked: str
    seconds: float
    at: float


def recall(path: Path, key: str) -> CheckResult | None:
    """Find a result; None if missing or damaged."""
    return read_memo(path, CheckResult).get(key)


def remember(path: Path, key: str, result: CheckResult) -> None:
    """Save a result. Raises nothing: a lost result only costs the next start a check."""
    others = {name: known for name, known in read_memo(path, CheckResult).items() if name != key}
    kept = dict(islice(others.items(), max(0, len(others) - MAX_RESULTS + 1), None)) | {key: result}
    write_memo(path, kept)


def results_file() -> Path:
    return default_cache_dir() / "self-checks.json"


def key_of(digest: int, settings: Settings, group: RankGroup, architecture: str = "") -> str:
    """Make the key of a result. `digest`: of the checkpoint (`checkpoint.Checkpoint`).
    `architecture`: identity of code that is not mlx-lm's."""
    return namespace(
        {
            "model": f"{digest:016x}",
            "adapter": _adapter(settings.adapter_path),
            "versions": f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}, trouper {VERSION}",
            "engine": _code(),
            "device": f"{device.name()} {'CPU' if device.is_cpu() else 'GPU'}",
            "switches": ", ".join(os.environ.get(name, "") for name in SWITCHES),
            "kv": f"{settings.kv_bits} {settings.kv_group_size}",
            "rank": f"{group.rank} of {group.size}, {settings.tp_reduce_dtype}",
            "mode": settings.self_check,
            **({"architecture": architecture} if architecture else {}),
        }
    )


@cache
def _code() -> str:
    """Hash the engine's source, since few changes change the version."""
    digest = xxh3_64()
    for path in sorted(ENGINE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _adapter(path: str | None) -> str:
    if path is None:
        return ""
    files = sorted(file for file in Path(path).iterdir() if file.is_file())
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return f"{xxh3_64(repr(stats).encode()).hexdigest()}"


def recalled(key: str) -> tuple[Capabilities, SelfCheck] | None:
    """Read the result of an earlier start; None: there is none."""
    result = recall(results_file(), key)
    if result is None or not set(result.off) <= set(FEATURES):
        return None
    return Capabilities(**result.off), SelfCheck(
        checked=result.checked, seconds=result.seconds, remembered=True
    )


def keep(key: str, capabilities: Capabilities, check: SelfCheck) -> None:
    """Store a result for later starts."""
    remember(
        results_file(),
        key,
        CheckResult(capabilities.off, check.checked, check.seconds, time.time()),
    )
