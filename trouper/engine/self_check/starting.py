"""The self-check during loading, or its remembered result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import attrs
import mlx.core as mx
from mlx import nn
from xxhash import xxh3_64_intdigest

from trouper.engine.architectures.architecture_lookup import find_architecture
from trouper.engine.distributed.rank_group import RankGroup
from trouper.engine.kv.quantized_kv import KvFormat
from trouper.engine.platform.error_text import is_out_of_memory
from trouper.engine.self_check.alone import WrongAloneError
from trouper.engine.self_check.checking import STEPS, Check
from trouper.engine.self_check.remembering import keep, key_of, recalled
from trouper.protocol.capabilities import Capabilities, SelfCheck, SelfCheckMode
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.settings import Settings

STAGE = "checking what it does right"
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
        if check.mode != "off" and not _transient(capabilities):
            keep(key, capabilities, check)
    report(line_of(capabilities, check))
    return capabilities, check


def line_of(capabilities: Capabilities, check: SelfCheck) -> str:
    """Describe a result in one line."""
    off = "; ".join(f"{feature} off: {reason}" for feature, reason in capabilities.off.items())
    if check.mode == "off":
        return f"self-check: off, guessed from the model's caches{': ' if off else ''}{off}"
    how = "remembered" if check.remembered else f"{check.seconds:.2f} s"
    return f"self-check ({how}; {check.checked}): {off or 'rows may do everything'}"


def _all_know(known: tuple[Capabilities, SelfCheck] | None, group: RankGroup) -> bool:
    """Whether every rank remembers the same result."""
    number_here = (
        0 if known is None else 1 + (xxh3_64_intdigest(repr(sorted(known[0].off)).encode()) >> 2)
    )
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


def _transient(capabilities: Capabilities) -> bool:
    """Whether a feature is off for lack of memory."""
    return any(map(is_out_of_memory, capabilities.off.values()))
