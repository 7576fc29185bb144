from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import attrs
import mlx.core as mx
import msgspec
from mlx import nn
from xxhash import xxh3_64, xxh3_64_intdigest

from trouper import workarounds
from trouper.engine.architectures.architecture_lookup import find_architecture
from trouper.engine.distributed.rank_group import RankGroup
from trouper.engine.kv.quantized_kv import KvFormat
from trouper.engine.platform import device
from trouper.engine.platform.error_text import is_out_of_memory
from trouper.engine.self_check.accuracy import WrongAloneError
from trouper.engine.self_check.checking import STEPS, Check
from trouper.protocol.capabilities import (
    FEATURES,
    IMAGE_FEATURES,
    Capabilities,
    Feature,
    SelfCheck,
    SelfCheckMode,
)
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.settings import Settings, default_cache_dir
from trouper.protocol.version import VERSION, installed_version
from trouper.storage.cache_fingerprint import namespace
from trouper.storage.memos import add_to_memo, read_memo

SWITCHES = ("MLX_ENABLE_TF32", "MLX_METAL_FAST_SYNCH", workarounds.VARIABLE)
"""Environment variables that change results, or the order of MLX's work."""
BLAS = "scipy-openblas32"
SOURCES = (Path(__file__).parent.parent, Path(workarounds.__file__).parent)
KINDS = (".py", ".cuh")
"""Suffixes of code that computes."""
# The oldest are removed.
MAX_RESULTS = 200


class CheckResult(msgspec.Struct, frozen=True):
    """off: reason by disabled feature. checked: the models that ran. at: Unix seconds."""

    off: dict[str, str]
    checked: str
    seconds: float
    at: float


def results_file() -> Path:
    return default_cache_dir() / "self-checks.json"


def key_of(digest: int, settings: Settings, group: RankGroup, architecture: str = "") -> str:
    """`digest`: of the checkpoint (`checkpoint.Checkpoint`). `architecture`: identity of code that
    is not mlx-lm's."""
    split = "pipeline" if settings.pipeline else settings.tp_reduce_dtype
    return namespace(
        {
            "model": f"{digest:016x}",
            "adapter": _adapter(settings.adapter_path),
            "versions": f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}, trouper {VERSION}",
            "engine": _code(),
            "blas": installed_version(BLAS, ""),
            "device": f"{device.name()} {'CPU' if device.is_cpu() else 'GPU'}",
            "switches": ", ".join(os.environ.get(name, "") for name in SWITCHES),
            "kv": f"{settings.kv_bits} {settings.kv_group_size}",
            "rank": f"{group.rank} of {group.size}, {split}",
            "mode": settings.self_check,
            **({"architecture": architecture} if architecture else {}),
        }
    )


@cache
def _code() -> str:
    """Hash the source of what computes, since few changes change the version."""
    digest = xxh3_64()
    for path in sorted(path for source in SOURCES for path in source.rglob("*.*")):
        if path.suffix in KINDS:
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
    result = read_memo(results_file(), CheckResult).get(key)
    if result is None or not set(result.off) <= set(FEATURES):
        return None
    return Capabilities(**result.off), SelfCheck(
        checked=result.checked, seconds=result.seconds, remembered=True
    )


STAGE = "self-check, once for each model"
REMEDY = "--self-check off serves it all the same"


@attrs.frozen(eq=False, kw_only=True)
class Candidate:
    """A model in memory, and its checkpoint. digest: the checkpoint's."""

    model: nn.Module
    config: Mapping[str, Any]
    directory: Path
    digest: int
    vocabulary: int
    kv: KvFormat


def self_check(
    candidate: Candidate,
    settings: Settings,
    group: RankGroup,
    report: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> tuple[Capabilities, SelfCheck]:
    """Run or recall the self-check. progress: called with steps done and in all. Raises
    `ModelUnusable` for a model that is wrong for one row."""
    mode = cast(SelfCheckMode, settings.self_check)
    key = key_of(candidate.digest, settings, group, find_architecture(candidate.config).identity)
    known = recalled(key) if mode != "off" else None
    if _all_know(known, group):
        assert known is not None
        capabilities, check = known[0], attrs.evolve(known[1], mode=mode)
    else:
        capabilities, check = _run(candidate, mode, group, progress)
        if check.mode != "off":
            _remember(key, capabilities.off, check.checked, check.seconds)
    report(line_of(capabilities, check))
    return capabilities, check


def line_of(capabilities: Capabilities, check: SelfCheck) -> str:
    off = "; ".join(f"{feature} off: {reason}" for feature, reason in capabilities.off.items())
    if check.mode == "off":
        return f"self-check: off, guessed from the model's caches{': ' if off else ''}{off}"
    how = "remembered" if check.remembered else f"{check.seconds:.2f} s"
    return f"self-check ({how}; {check.checked}): {off or 'nothing is turned off'}"


def check_images(
    candidate: Candidate,
    settings: Settings,
    group: RankGroup,
    check: Callable[[], Mapping[Feature, str]],
) -> Mapping[Feature, str]:
    """Run or recall the check of images. Returns the features that are off, with reasons."""
    architecture = find_architecture(candidate.config).identity
    key = key_of(candidate.digest, settings, group, f"{architecture} with images")
    result = read_memo(results_file(), CheckResult).get(key)
    known = None if result is None else _image_features(result.off)
    if _same_everywhere(known, group):
        assert known is not None
        return known
    began = time.perf_counter()
    off = check()
    _remember(key, off, "images", round(time.perf_counter() - began, 3))
    return off


def _image_features(off: Mapping[str, str]) -> Mapping[Feature, str]:
    return {feature: off[feature] for feature in IMAGE_FEATURES if feature in off}


def _all_know(known: tuple[Capabilities, SelfCheck] | None, group: RankGroup) -> bool:
    return _same_everywhere(None if known is None else known[0].off, group)


def _same_everywhere(off: Mapping[Any, str] | None, group: RankGroup) -> bool:
    """Whether the same features are off on all ranks. None: unknown on this one."""
    number_here = 0 if off is None else 1 + (xxh3_64_intdigest(repr(sorted(off)).encode()) >> 2)
    numbers = group.gather(number_here)
    return numbers[0] != 0 and len(set(numbers)) == 1


def _run(
    candidate: Candidate,
    mode: SelfCheckMode,
    group: RankGroup,
    progress: Callable[[int, int], None],
) -> tuple[Capabilities, SelfCheck]:
    began, done = time.perf_counter(), 0

    def advance() -> None:
        nonlocal done
        done += 1
        progress(min(done, STEPS), STEPS)

    if mode != "off":
        progress(0, STEPS)
    try:
        found = Check(
            candidate.model,
            candidate.config,
            candidate.vocabulary,
            candidate.kv,
            mode,
            group=group,
            advance=advance,
        ).run()
    except WrongAloneError as error:
        raise ModelUnusable(
            f"{candidate.directory} is wrong even for one row alone: {error}", REMEDY
        ) from error
    mx.clear_cache()
    seconds = round(time.perf_counter() - began, 3) if mode != "off" else 0.0
    return found.capabilities, SelfCheck(mode=mode, checked=found.checked, seconds=seconds)


def _remember(key: str, off: Mapping[Any, str], checked: str, seconds: float) -> None:
    """Keep a result, unless a feature is off for lack of memory."""
    if not any(map(is_out_of_memory, off.values())):
        result = CheckResult(dict(off), checked, seconds, time.time())
        add_to_memo(results_file(), CheckResult, {key: result}, MAX_RESULTS)
