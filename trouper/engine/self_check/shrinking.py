"""Makes a small config of the same architecture from a model's config. `tiny` tries whether a
config builds and its model runs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

# The meaning of a key follows from its name. Widths and counts of heads are divided by common
# factors, so that relations between them (heads * head size = hidden size; heads a multiple of KV
# heads; a mixer's heads * head size = a multiple of the hidden size) are preserved.

Config = dict[str, Any]
WINDOW, VOCABULARY, EXPERTS, ACTIVE, STATE = 16, 512, 8, 2, 16
HEAD_DIM, HIDDEN = 16, 32
"""Minimum sizes of heads and hidden states."""

COUNTS_HEADS = re.compile(
    r"(^|_)(n_heads?|heads?)($|_per_layer$)|^num_attention_groups$|^n_kv_heads$"
)
SIZES_HEADS = re.compile(r"head_dim$|d_head$|^kv_channels$|^rotary_dim$|_per_head$")
WIDTHS = re.compile(
    r"hidden_size|intermediate_size|^hidden_dim$|^d_model$|^n_embd$|^model_dim$|^n_inner$"
    r"|lora_rank$|low_rank_dim$|_rank$"
    r"|^block_(ff_)?dim$|^mamba_d_ssm$|^embedding_size$|^dim_model_base$|expert_dim$|^lru_width$"
)
HIDDEN_SIZES = re.compile(r"^(hidden_size|hidden_dim|d_model|n_embd|model_dim)$")
VOCABULARIES = re.compile(r"(^|_)vocab_size($|_per)")
WINDOWS = re.compile(r"(^|_)window(_size)?$|^sliding_window_size$|attention_chunk_size$")
FIRST_POSITIONS = re.compile(
    r"^original_max_position_embeddings$|^floor_scale$|^log_scaling_n_floor$|^index_topk$"
)
"""Numbers of positions beyond which a model's arithmetic may be another one."""
LAYERS = re.compile(r"^(num_hidden_layers|n_layers?|num_layers|num_transformer_layers)$")
LAYER_NUMBERS = re.compile(r"layers?$|_idxs?$|layer_ids$")
PARTS_OF_LAYERS = re.compile(r"^num_kv_(shared|reuse)_layers$")
FIRST_LAYERS = re.compile(r"^(first_k_dense_replace|num_dense_layers|moe_layer_start_index)$")
COUNTS_EXPERTS = re.compile(r"^(moe_)?(num|n)_(local_|routed_)?experts$|^zero_expert_num$")
ACTIVE_EXPERTS = re.compile(
    r"^num_experts_per_tok(en)?$|^moe_(top_?)?k$|^moe_topk$|^top_k_experts$"
)
EXPERT_GROUPS = re.compile(r"^n_group$|^num_expert_group$")
ACTIVE_GROUPS = re.compile(r"^topk_group$|^num_limited_group$")
STATES = re.compile(r"d_state$|state_size$")
GROUPS = re.compile(r"n_groups$|^group_norm_size$")
HALVES_OF_HEADS = re.compile(r"(short|long)_factor$")
SECTIONS_OF_HEADS = re.compile(r"mrope_section$")
OTHER_SENSES = re.compile(r"vision|audio|quantization|image|speech|projector")


@attrs.frozen
class Factors:
    """Divisors of the number and the size of heads. layers, vocabulary: the numbers that remain."""

    heads: int
    sizes: int
    layers: int
    vocabulary: int = VOCABULARY

    @property
    def widths(self) -> int:
        return self.heads * self.sizes


def layers_of(config: Mapping[str, Any]) -> int:
    return max(
        (value for key, value in values(config) if LAYERS.search(key) and isinstance(value, int)),
        default=0,
    )


def values(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys and values of all levels that concern text."""
    for key, value in config.items():
        if OTHER_SENSES.search(key):
            continue
        if isinstance(value, Mapping):
            yield from values(value)
        else:
            yield key, value


def _integers(config: Mapping[str, Any], key: re.Pattern[str]) -> list[int]:
    found = (value for name, value in values(config) if key.search(name))
    numbers = (
        number for value in found for number in (value if isinstance(value, list) else [value])
    )
    return [
        number
        for number in numbers
        if isinstance(number, int) and not isinstance(number, bool) and number > 0
    ]


def factors(config: Mapping[str, Any], layers: int) -> Iterator[Factors]:
    """Yield factors, smallest model first."""
    heads, sizes = _head_factor(config), _size_factor(config)
    yield from (
        Factors(*each, layers)
        for each in dict.fromkeys([(heads, sizes), (heads, 1), (1, sizes), (1, 1)])
    )


def _head_factor(config: Mapping[str, Any]) -> int:
    counts = _integers(config, COUNTS_HEADS) or [_implied_heads(config)]
    common = math.gcd(*counts)
    fits = (
        factor
        for factor in range(common, 0, -1)
        if common % factor == 0
        and max(counts) // factor >= min(4, max(counts))
        and all(count // factor >= min(2, count) for count in counts)
    )
    return next(fits, 1)


def _implied_heads(config: Mapping[str, Any]) -> int:
    """Number of heads of configs that name only the size of heads."""
    return max(
        1, _hidden(config) // max(_integers(config, SIZES_HEADS), default=max(1, _hidden(config)))
    )


def _hidden(config: Mapping[str, Any]) -> int:
    return max(_integers(config, HIDDEN_SIZES), default=0)


def _size_factor(config: Mapping[str, Any]) -> int:
    """Largest power of two by which all sizes of heads are divided so that none, nor the hidden
    size, becomes too small."""
    sizes, hidden = _integers(config, SIZES_HEADS), _hidden(config)
    heads = max(
        _integers(config, re.compile(r"^(num_attention_heads|num_heads|n_heads?)$")), default=0
    )
    if hidden and heads and not any(key == "head_dim" for key, value in values(config) if value):
        sizes.append(hidden // heads)
    factor = 1
    while sizes and all(
        size % (4 * factor) == 0 and size // (2 * factor) >= min(HEAD_DIM, size) for size in sizes
    ):
        factor *= 2
    while factor > 1 and hidden // (factor * _head_factor(config)) < HIDDEN:
        factor //= 2
    return factor


def shrunk(config: Mapping[str, Any], by: Factors) -> Config:
    """Return a config with smaller numbers, without images, audio and quantization."""
    num_layers = layers_of(config)
    rules = _rules(by, num_layers)

    def small(level: Mapping[str, Any]) -> Config:
        return {
            key: each(key, value) for key, value in level.items() if not OTHER_SENSES.search(key)
        }

    def each(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return small(value)
        rule = next((rule for pattern, rule in rules if pattern.search(key)), None)
        if isinstance(value, list | str):
            return _sequence(key, value, rule, by, num_layers)
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return rule(value) if rule is not None and is_number else value

    return small(config)


def encoders(config: Mapping[str, Any]) -> Config:
    """The entries of a config, as they are, that say how images and sound are read."""
    return {
        key: value
        for key, value in config.items()
        if OTHER_SENSES.search(key) and "quantization" not in key
    }


Rule = Callable[[int], int]


def _rules(by: Factors, num_layers: int) -> list[tuple[re.Pattern[str], Rule]]:
    """List the rules: the first pattern that matches a key decides."""
    return [
        (VOCABULARIES, lambda value: min(value, by.vocabulary)),
        (LAYERS, lambda _: by.layers),
        (
            PARTS_OF_LAYERS,
            lambda value: max(1, round(value * by.layers / max(num_layers, 1))) if value else 0,
        ),
        (FIRST_LAYERS, lambda value: min(value, 1)),
        (COUNTS_EXPERTS, lambda value: min(value, EXPERTS)),
        (ACTIVE_EXPERTS, lambda value: min(value, ACTIVE)),
        (EXPERT_GROUPS, lambda value: min(value, 2)),
        (ACTIVE_GROUPS, lambda value: min(value, 1)),
        (WINDOWS, lambda value: min(value, WINDOW)),
        (FIRST_POSITIONS, lambda value: min(value, WINDOW)),
        (SIZES_HEADS, lambda value: max(1, value // by.sizes)),
        (COUNTS_HEADS, lambda value: max(1, value // by.heads)),
        (STATES, lambda value: min(value, STATE)),
        (GROUPS, lambda value: max(1, value // by.heads)),
        (WIDTHS, lambda value: _width(value, by.widths)),
    ]


def _width(value: int, factor: int) -> int:
    """Divide a width, rounded up to a multiple of 8."""
    small = value // factor
    return small if value % factor == 0 and small >= 8 else max(8, -(-small // 8) * 8)


def _sequence(
    key: str, value: list[Any] | str, rule: Rule | None, by: Factors, num_layers: int
) -> list[Any] | str:
    """Shrink a sequence: one entry for each layer, indices of layers, or parts of a head."""
    if HALVES_OF_HEADS.search(key):
        return value[: max(1, len(value) // by.sizes)]
    if SECTIONS_OF_HEADS.search(key) and not isinstance(value, str):
        return [max(1, part // by.sizes) for part in value]
    if isinstance(value, str):
        return value[: by.layers] if len(value) == num_layers > 4 else value
    if (
        LAYER_NUMBERS.search(key)
        and len(value) < num_layers
        and all(type(each) is int for each in value)
    ):
        return [
            number for number in value if number <= by.layers - (0 if num_layers in value else 1)
        ]
    shortened = value[: by.layers] if len(value) == num_layers else value
    return [rule(each) if rule and type(each) is int else each for each in shortened]
