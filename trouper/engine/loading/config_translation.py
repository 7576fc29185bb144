"""Keys of config.json that mlx-lm's modules read under other names, or not at all."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

Config = Mapping[str, Any]
PACKAGES = ("mlx_lm.models", "mlx_vlm.models")
FULL_ATTENTION = ("full_attention", "global_attention", "attention")
SLIDING_ATTENTION = ("sliding_attention", "local_attention", "chunked_attention")

# Bases of layers with a window: Gemma 3, ModernBERT.
SLIDING_BASES = ("rope_local_base_freq", "local_rope_theta")
FULL_BASES = ("rope_theta", "global_rope_theta")
PATTERN = "sliding_window_pattern"
PERIODIC = ("gemma3_text", "cohere2")
OTHER_THAN_SCALING = ("rope_theta", "partial_rotary_factor")


# transformers 5 writes rope into `rope_parameters`, possibly by layer type. Most of mlx-lm's
# modules do not read that key, and would give wrong tokens or refuse the config.
def translate(config: Config, arguments: type) -> dict[str, Any]:
    """Return changed entries. `arguments`: the architecture's ModelArgs."""
    by_type = not _reads_rope_parameters(arguments)
    changed = _translate_rope(config, by_type=by_type) | _translate_pattern(config)
    if "text_config" not in config and isinstance(config.get("llm_config"), dict):
        changed["text_config"] = config["llm_config"]  # InternVL's name.
    for key, part in {**config, **changed}.items():
        if not isinstance(part, dict):
            continue
        if nested := _translate_rope(part, by_type=by_type) | _translate_pattern(part):
            changed[key] = part | nested
    return changed


def _translate_pattern(config: Config) -> dict[str, Any]:
    """The period of `layer_types`, which modules of Gemma 3 and Cohere 2 read instead."""
    kinds = config.get("layer_types")
    if config.get("model_type") not in PERIODIC or config.get(PATTERN) is not None:
        return {}
    if not isinstance(kinds, list) or "full_attention" not in kinds:
        return {}
    period = kinds.index("full_attention") + 1
    full = [kind == "full_attention" for kind in kinds]
    is_periodic = full == [(at + 1) % period == 0 for at in range(len(kinds))]
    return {PATTERN: period} if is_periodic else {}


def _reads_rope_parameters(arguments: type) -> bool:
    """Also True if an imported module reads `rope_parameters`."""
    own = sys.modules[arguments.__module__]
    modules = {own} | {
        sys.modules[value.__module__] if isinstance(value, type) else value
        for value in vars(own).values()
        if isinstance(value, type | ModuleType)
    }
    return any(
        "rope_parameters" in getattr(value, "__dataclass_fields__", ())
        for module in modules
        if module.__name__.startswith(PACKAGES)
        for value in vars(module).values()
    )


def _translate_rope(config: Config, *, by_type: bool) -> dict[str, Any]:
    """`by_type`: also translate parameters of each layer type."""
    parameters = config.get("rope_parameters")
    part = config.get("partial_rotary_factor")
    renamed = {} if part is None else {"rotary_pct": part}  # GPT-NeoX, since transformers 5.
    if not isinstance(parameters, dict):
        return renamed
    full = _of_layers(parameters, FULL_ATTENTION)
    sliding = _of_layers(parameters, SLIDING_ATTENTION)
    if full is None and sliding is None:
        return renamed | _of_one(parameters)
    if not by_type:
        return renamed
    changed = renamed | _of_one(full or {})
    base = (sliding or {}).get("rope_theta")
    return changed | ({} if base is None else dict.fromkeys(SLIDING_BASES, base))


def _of_layers(parameters: Config, names: Iterable[str]) -> Config | None:
    found = (parameters.get(name) for name in names)
    return next((each for each in found if isinstance(each, dict)), None)


def _of_one(parameters: Config) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    if (base := parameters.get("rope_theta")) is not None:
        changed |= dict.fromkeys(FULL_BASES, base)
    if (part := parameters.get("partial_rotary_factor")) is not None:
        changed |= {"partial_rotary_factor": part, "rotary_pct": part}
    kind = parameters.get("rope_type", parameters.get("type"))
    if kind not in (None, "default"):
        scaling = {key: value for key, value in parameters.items() if key not in OTHER_THAN_SCALING}
        changed["rope_scaling"] = scaling | {"rope_type": kind, "type": kind}
    return changed
