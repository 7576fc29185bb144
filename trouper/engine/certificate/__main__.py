"""`python -m trouper.engine.certificate PROGRAM JSON`: one measurement of `trouper certify`, in a
process of its own.

Each line on stdout is a JSON object: a row that was measured. A process of its own gives its memory
back, may be ended when it takes too long, and takes nothing with it when the device's driver
crashes.
"""

# ruff: noqa: E402 - MLX is imported once the process is prepared.
from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import attrs

from trouper.process import prepare_process

prepare_process()  # Before MLX is imported.

from trouper.engine import probe
from trouper.engine.certificate import bare_loop, family_checks, loaded_copy, own_noise
from trouper.engine.certificate.family_configs import FAMILIES
from trouper.engine.kv.pass_shapes import of_device
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.loading.model_loading import EvaluatedModel, load
from trouper.engine.loading.weights import bytes_of
from trouper.engine.platform import device
from trouper.engine.products import linear_layers
from trouper.engine.self_check.accuracy import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    TENSOR_FLOAT32,
    arithmetic_of,
    is_routed,
)
from trouper.engine.self_check.matrix import SEEDS, subject_of
from trouper.lifeline import end_with_launcher
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.settings import Settings
from trouper.workarounds import mlx_reference_blas

Row = dict[str, Any]
ARITHMETIC = {
    FLOAT32: "float32",
    TENSOR_FLOAT32: "float32, products in TF32",
    FLOAT16: "float16",
    BFLOAT16: "bfloat16",
}


def describe_device(_: Row) -> Iterator[Row]:
    """The device, its speed, the versions of what computes."""
    blas = mlx_reference_blas.load_fast()
    packages = ("mlx", "mlx-lm", "transformers", "trio", "numpy")
    yield {
        "name": device.name(),
        "computes_on": "CPU" if device.is_cpu() else "GPU",
        "architecture": device.architecture(),
        "memory_bytes": device.memory_limit_bytes(),
        "float32_gflops": round(probe.product_gflops(), 1),
        "rounds_to_tf32": device.rounds_factors(),
        "prepares_shapes": of_device().rounded,
        "blas": blas.name if blas else "",
        "packages": {name: _version(name) for name in packages},
        "families": list(FAMILIES),
        "formats": list(family_checks.FORMATS),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed as a package"


def check_families(given: Row) -> Iterator[Row]:
    """A row for each family named, as soon as it is known. `jobs`: [family, format or "",
    dtype]."""
    for name, quantized, dtype in given["jobs"]:
        yield family_checks.check(name, quantized, dtype)


def describe_model(given: Row) -> Iterator[Row]:
    """The user's model: the stages of loading it, what it is, then how far mlx-lm's loop differs
    from itself."""
    # With the self-check of a start, which changes how rows are laid out.
    settings = Settings(model=given["model"], no_ssd=True)
    loaded = load(settings, lambda stage: _write({"stage": stage}))
    arithmetic = arithmetic_of(loaded.model, PLAIN)
    named = next(name for known, name in ARITHMETIC.items() if known.floor == arithmetic.floor)
    card = loaded.card
    yield {
        "directory": str(loaded.directory),
        "architecture": card.architecture,
        "stored": _stored(loaded.config),
        "arithmetic": named,
        "routed": is_routed(loaded.model),
        "weights_bytes": bytes_of(loaded.model),
        "token_bytes": card.kv.token_bytes,
        "cached": card.kv.cached,
        "kv": attrs.asdict(card.kv),
        "context_tokens": card.context_length,
        "vocabulary": card.vocab_size,
    }
    yield own_noise.own_noise(loaded.model, card.vocab_size)


def check_model(given: Row) -> Iterator[Row]:
    """A row for each scenario on the user's model itself."""
    loaded = _loaded(given)
    yield from family_checks.rows_of(
        subject_of(loaded.model, loaded.card.vocab_size, SEEDS[0], of_device())
    )


def _stored(config: Row) -> str:
    quantization = config.get("quantization") or config.get("quantization_config") or {}
    bits = quantization.get("bits")
    return (
        f"{quantization.get('mode', 'affine')}, {bits} bits"
        if bits
        else str(config.get("torch_dtype") or "plain")
    )


def run_bare_loop(given: Row) -> Iterator[Row]:
    """A row for each number of streams, by a model that multiplies as MLX does."""
    loaded = _loaded(given)
    linear_layers.unprepare(loaded.model)
    for rows in given["streams"]:
        yield bare_loop.bare_loop(
            loaded.model, rows, given["steps"], given["rounds"], loaded.card.vocab_size
        )


def copy_model(given: Row) -> Iterator[Row]:
    loaded_copy.save_copy(_loaded(given), Path(given["target"]))
    yield {"target": given["target"]}


def _loaded(given: Row) -> EvaluatedModel:
    return load(Settings(model=given["model"], no_ssd=True, self_check="off"), lambda _: None)


PROGRAMS: dict[str, Callable[[Row], Iterator[Row]]] = {
    "device": describe_device,
    "families": check_families,
    "model": describe_model,
    "scenarios": check_model,
    "bare": run_bare_loop,
    "copy": copy_model,
}


def _write(row: Row) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def main() -> None:
    end_with_launcher()
    program, given = PROGRAMS[sys.argv[1]], json.loads(sys.argv[2])
    try:
        for row in program(given):
            _write(row)
    except ModelUnusable as unusable:
        sys.exit(f"{unusable.message}; {unusable.remedy}" if unusable.remedy else unusable.message)


if __name__ == "__main__":
    main()
