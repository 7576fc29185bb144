"""`python -m trouper_lab.engine_programs PROGRAM JSON`: a measurement, with a JSON row per line."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import BatchKVCache, KVCache, make_prompt_cache
from numpy.typing import NDArray

from trouper.engine import probe
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.loading.model_loading import EvaluatedModel, load
from trouper.engine.loading.weights import bytes_of
from trouper.engine.passes.pass_shapes import of_device
from trouper.engine.platform import device
from trouper.engine.platform.error_text import line_of
from trouper.engine.products import linear_layers
from trouper.engine.self_check.accuracy import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    TENSOR_FLOAT32,
    arithmetic_of,
    is_routed,
    random_texts,
)
from trouper.engine.self_check.matrix import SEEDS, subject_of
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.settings import Settings
from trouper.system.lifeline import end_with_launcher
from trouper.workarounds import mlx_reference_blas
from trouper_lab.engine_programs import family_checks
from trouper_lab.engine_programs.family_configs import FAMILIES

Row = dict[str, Any]
ARITHMETIC = {
    FLOAT32: "float32",
    TENSOR_FLOAT32: "float32, products in TF32",
    FLOAT16: "float16",
    BFLOAT16: "bfloat16",
}


def describe_device(_: Row) -> Iterator[Row]:
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
    """`jobs`: [family, format or "", dtype]."""
    for name, quantized, dtype in given["jobs"]:
        yield family_checks.check(name, quantized, dtype)


def describe_model(given: Row) -> Iterator[Row]:
    """Stages of loading, a description, and mlx-lm's own deviation."""
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
    yield {"stage": "how far mlx-lm alone differs between batches"}
    yield own_noise(loaded.model, card.vocab_size)


def check_model(given: Row) -> Iterator[Row]:
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
    """With MLX's products."""
    loaded = _loaded(given)
    linear_layers.unprepare(loaded.model)
    for rows in given["streams"]:
        yield bare_loop(loaded.model, rows, given["steps"], given["rounds"], loaded.card.vocab_size)


def copy_model(given: Row) -> Iterator[Row]:
    save_copy(_loaded(given), Path(given["target"]))
    yield {"target": given["target"]}


def _loaded(given: Row) -> EvaluatedModel:
    return load(Settings(model=given["model"], no_ssd=True, self_check="off"), lambda _: None)


PROMPT, SETTLING = 50, 3
"""Prompt tokens of a row; uncounted steps."""


def bare_loop(
    model: nn.Module, rows: int, steps: int, rounds: int, vocabulary: int
) -> dict[str, Any]:
    """Tokens a second (median of `rounds`), and gaps. Like a server, launch a step before reading
    the last."""
    rates, gaps = [], []
    for seed in range(rounds):
        mx.random.seed(seed)
        cache = _cache(model, rows)
        prompt = mx.random.randint(1, vocabulary // 2, (rows, PROMPT))
        last = mx.argmax(model(prompt, cache=cache)[:, -1], -1)
        for _ in range(SETTLING):
            last = mx.argmax(model(last[:, None], cache=cache)[:, -1], -1)
        mx.eval(last)
        times = [time.perf_counter()]
        for _ in range(steps):
            following = mx.argmax(model(last[:, None], cache=cache)[:, -1], -1)
            mx.async_eval(following)
            last.tolist()
            times.append(time.perf_counter())
            last = following
        mx.eval(last)
        rates.append(rows * steps / (time.perf_counter() - times[0]))
        gaps += [later - earlier for earlier, later in pairwise(times)]
    return {"streams": rows, "tokens_per_s": median(rates), "gap_ms": 1000 * median(gaps)}


def _cache(model: nn.Module, rows: int) -> list[Any]:
    """mlx-lm's caches for a batch, if any, else for one row."""
    caches = make_prompt_cache(model)
    plain = all(type(cache) is KVCache for cache in caches)
    return [BatchKVCache([0] * rows) for _ in caches] if plain else caches


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)


def save_copy(loaded: EvaluatedModel, target: Path) -> None:
    target.mkdir(parents=True)
    mx.save_safetensors(
        str(target / "model.safetensors"),
        dict(tree_flatten(loaded.model.parameters())),
        {"format": "mlx"},
    )
    config = {
        key: value for key, value in loaded.config.items() if not key.startswith("quantization")
    }
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in TOKENIZER_FILES:
        if (loaded.directory / name).exists():
            shutil.copy(loaded.directory / name, target)


COMPANY = (2, 8)
NOISE_PROMPT, DECODED = 40, 24

Floats = NDArray[np.float32]


def own_noise(model: nn.Module, vocabulary: int) -> dict[str, Any]:
    """Largest changes of the best token's lead (log-probability), with equal rows and in one
    pass."""
    [text] = random_texts([NOISE_PROMPT + DECODED], vocabulary, 3)
    alone = _decoded(model, text, 1)
    second, best = np.argsort(alone, -1)[:, -2:].T
    leads: dict[str, Any] = {}
    for rows in COMPANY:
        try:
            leads[f"{rows} equal rows"] = _change(alone, _decoded(model, text, rows), best, second)
        except Exception as error:  # noqa: BLE001 - some architectures of mlx-lm batch by other caches only
            leads[f"{rows} equal rows"] = line_of(error)
    leads["one pass"] = _change(alone, _in_one_pass(model, text), best, second)
    return {"lead_changes": leads, "median_lead": float(np.median(_lead(alone, best, second)))}


def _decoded(model: nn.Module, text: list[int], rows: int) -> Floats:
    """(DECODED, vocabulary) log-probabilities of the first row."""
    cache, found = make_prompt_cache(model), []
    mx.eval(model(mx.array([text[:NOISE_PROMPT]] * rows), cache=cache)[:, -1])
    for token in text[NOISE_PROMPT:]:
        found.append(model(mx.array([[token]] * rows), cache=cache)[0, -1])
        mx.async_eval(found[-1])
    return _log_probabilities(mx.stack(found))


def _in_one_pass(model: nn.Module, text: list[int]) -> Floats:
    return _log_probabilities(
        model(mx.array([text]), cache=make_prompt_cache(model))[0, NOISE_PROMPT:]
    )


def _log_probabilities(logits: mx.array) -> Floats:
    logits = logits.astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, -1, keepdims=True))


def _lead(found: Floats, best: NDArray[np.int64], second: NDArray[np.int64]) -> Floats:
    index = np.arange(len(found))
    lead: Floats = found[index, best] - found[index, second]
    return lead


def _change(
    alone: Floats, other: Floats, best: NDArray[np.int64], second: NDArray[np.int64]
) -> float:
    return float(np.abs(_lead(other, best, second) - _lead(alone, best, second)).max())


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
