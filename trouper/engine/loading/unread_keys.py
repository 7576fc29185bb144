"""Keys of config.json that no code of the architecture reads.

The self-check compares mlx-lm with itself and misses such keys. An unread key that changes tokens
refuses the model.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache, partial
from types import ModuleType
from typing import Any

import attrs
from mlx_lm import utils
from mlx_lm.models import rope_utils

from trouper.engine.architectures.architecture_lookup import Classes
from trouper.engine.loading.config_translation import PACKAGES, translate

Config = Mapping[str, Any]
OF_IMAGES = re.compile(r"vision|image|audio|processing")
NUMBER = re.compile(r"[\w.]+")
WITHOUT_ROPE = re.compile(r"use_rope|no_?rope|nope", re.IGNORECASE)
HALF = re.compile(r"head_dim // 2|0\.5 \*|\* 0\.5")
ROTATED = frozenset(("partial_rotary_factor", "rotary_pct"))
WORD = re.compile(r"\w+")
ROPES = ("rope_scaling", "rope_parameters")
QUANTIZATIONS = ("quantization_config", "quantization")
TEXT_PARTS = ("text_config", "llm_config", "language_config")


@attrs.frozen
class Unread:
    """`wrong`: whether tokens would be wrong."""

    key: str
    value: Any
    effect: str
    wrong: bool

    @property
    def line(self) -> str:
        value = str(self.value)
        return f"{self.key} ({value if len(value) <= 60 else value[:60] + '...'}): {self.effect}"


def list_unread(config: dict[str, Any], classes: Classes) -> list[Unread]:
    """List keys that neither the module of the classes nor modules used there read."""
    model, arguments = classes
    # Text models within vision models have one class, which is bound to their module.
    name = model.args[0].__name__ if isinstance(model, partial) else arguments.__module__
    source = _source_of(name)
    words, names = frozenset(WORD.findall(source)), _names_read(source)
    if "rope_parameters" not in words:
        config = config | translate(config, arguments)
    if words & ROTATED:  # Two names of one number.
        words, names = words | ROTATED, names | ROTATED
    parts = [config, *(config[key] for key in TEXT_PARTS if isinstance(config.get(key), dict))]
    return [unread for part in parts for unread in _of_part(part, source, words, names)]


def _of_part(
    config: Config, source: str, words: frozenset[str], names: frozenset[str]
) -> Iterator[Unread]:
    """Yield the keys of a config that the code does not read and that may change tokens. `words`:
    of the code, which may compute what `names` does not show; these refuse nothing."""
    named = [*_of_rope(config, names), *_of_quantization(config)]
    for key, value in config.items():
        is_read_or_harmless = key in names or key in HARMLESS or key in TEXT_PARTS
        if is_read_or_harmless or _is_neutral(value):
            continue
        if (rule := RULES.get(key)) is not None:
            if effect := rule.effect(value, config, source):
                yield Unread(key, value, effect, rule.wrong and key not in words)
        elif MAY_MATTER.search(key) and not key.endswith("_config"):
            named.append((key, value))
    for key, value in named:
        yield Unread(key, value, "it may change answers", wrong=False)


def _of_rope(config: Config, names: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Parts of rope, possibly by the type of a layer."""
    names |= _names_read(inspect.getsource(rope_utils))
    for key in ROPES:
        found = config.get(key)
        if not isinstance(found, dict):
            continue
        levels = [found, *(part for part in found.values() if isinstance(part, dict))]
        for name, value in (item for part in levels for item in part.items()):
            is_read = name in names or name in OF_ROPE.split() or isinstance(value, dict)
            if not is_read and not _is_neutral(value):
                yield f"{key}.{name}", value


def _of_quantization(config: Config) -> Iterator[tuple[str, Any]]:
    names = _names_read(inspect.getsource(utils))
    for key in QUANTIZATIONS:
        found = config.get(key)
        for name, value in found.items() if isinstance(found, dict) else ():
            is_read = name in names or name in OF_QUANTIZATION or isinstance(value, dict)
            if not is_read and not _is_neutral(value) and CHANGES_WEIGHTS.search(name):
                yield f"{key}.{name}", value


def list_unapplied(generation_config: Config, applied: Collection[str] = ()) -> list[str]:
    """List what a generation_config.json asks of every request, and no request gets."""
    return [
        f"{key} ({value})"
        for key, value in generation_config.items()
        if key in OF_ANSWERS.split()
        and key not in applied
        and not _is_neutral(value)
        and value != NEUTRAL.get(key)
    ]


def _is_neutral(value: object) -> bool:
    return value is None or value is False or value in ("", 0, "default", "none") or value == []


@cache
def _source_of(name: str) -> str:
    """Includes the source of used architecture modules, and of its package."""
    used = {name}
    package = name if hasattr(sys.modules[name], "__path__") else name.rpartition(".")[0]
    if package not in ("", *PACKAGES):
        inside = (each for each in sys.modules if each.startswith(f"{package}."))
        used |= {each for each in inside if not OF_IMAGES.search(each)}
    for _ in range(2):  # A language model may be another one's subclass.
        used |= {other for each in used for other in _names_used(sys.modules[each])}
    return "\n".join(inspect.getsource(sys.modules[each]) for each in used)


def _names_used(module: ModuleType) -> Iterator[str]:
    """Yield the names of architecture modules from which `module` has classes or that it has."""
    for value in vars(module).values():
        if isinstance(value, type | ModuleType):
            name = value.__module__ if isinstance(value, type) else value.__name__
            if name.startswith(PACKAGES):
                yield name


@cache
def _names_read(source: str) -> frozenset[str]:
    """Fields, attributes, and texts that look up an entry; a local variable reads no key."""
    names, texts = set[str](), list[ast.expr | None]()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self")):
                pass
            case ast.Attribute(attr=name):
                names.add(name)
            case ast.Subscript(slice=key) | ast.Compare(left=key):
                texts.append(key)
            case ast.Call(args=values) | ast.Dict(keys=values):
                texts += values
            case ast.Tuple(elts=values) | ast.List(elts=values) | ast.Set(elts=values):
                texts += values
    for text in texts:
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            names.add(text.value)
    return frozenset(names)


# -- rules -----------------------------------------------------------------------------------------

Effect = Callable[[Any, Config, str], str]
"""From value, config and source to the fault, or ""."""


@attrs.frozen
class Rule:
    effect: Effect
    wrong: bool = True


def _differs(text: str, *neutral: object) -> Rule:
    """A number that counts unless in `neutral` or in the code."""
    return Rule(
        lambda value, _config, source: (
            "" if value in neutral or _is_written(value, source) else text
        )
    )


def _is_written(value: object, source: str) -> bool:
    return not isinstance(value, bool) and str(value) in NUMBER.findall(source)


def _base(value: Any, _config: Config, source: str) -> str:
    is_read = value == 10000 or "rope" not in source
    return "" if is_read else "another base of rope is computed"


def _scaling(value: Any, _config: Config, source: str) -> str:
    if not isinstance(value, dict) or "rope" not in source:
        return ""
    kind = value.get("rope_type", value.get("type"))
    return "" if kind in (None, "default", "mrope") else f"positions are not scaled by {kind}"


ACTIVATIONS = {
    "silu": ("silu", "swiglu"),
    "swish": ("silu", "swiglu"),
    "gelu": ("gelu",),
    "relu": ("relu",),
    "tanh": ("tanh",),
}


def _activation(value: Any, _config: Config, source: str) -> str:
    written = source.lower()
    for begin, names in ACTIVATIONS.items():
        if str(value).lower().startswith(begin):
            used = any(name in written for name in names)
            return "" if used else "another activation is computed"
    return "" if str(value).lower() in written else "another activation is computed"


def _window(value: Any, config: Config, source: str) -> str:
    if config.get("use_sliding_window") is False or "sliding_window" in source:
        return ""
    context = config.get("max_position_embeddings") or 0
    within = isinstance(value, int) and isinstance(context, int) and value >= context
    return "" if within else f"tokens attend beyond {value} others"


def _no_rope(value: Any, _config: Config, source: str) -> str:
    """A list of numbers, or an interval."""
    if WITHOUT_ROPE.search(source) or "rope" not in source:
        return ""
    return "all layers are rotated" if not isinstance(value, list) or not all(value) else ""


def _rotated(value: Any, config: Config, source: str) -> str:
    """MLA counts dimensions instead."""
    if value in (1, 1.0) or "rope" not in source or "qk_rope_head_dim" in config:
        return ""
    return "" if HALF.search(source) else "all of a head is rotated"


def _position(value: Any, _config: Config, source: str) -> str:
    kinds = {"alibi": "alibi", "nope": "nope", "relative": "relative"}
    named = next((word for kind, word in kinds.items() if kind in str(value).lower()), "")
    return "positions are computed in another way" if named and named not in source else ""


def _scoring(value: Any, _config: Config, source: str) -> str:
    return "" if str(value) in source else "experts are scored by another function"


RULES: Mapping[str, Rule] = {
    "rope_theta": Rule(_base),
    "rotary_emb_base": Rule(_base),
    "rope_scaling": Rule(_scaling),
    "partial_rotary_factor": Rule(_rotated),
    "rotary_pct": Rule(_rotated),
    "rope_interleave": Rule(
        lambda value, _config, source: (
            "pairs of rope are others" if value and "traditional=True" not in source else ""
        )
    ),
    "no_rope_layers": Rule(_no_rope),
    "no_rope_layer_interval": Rule(_no_rope),
    "nope_layer_interval": Rule(_no_rope),
    "alibi": _differs("positions are computed in another way"),
    "use_alibi": _differs("positions are computed in another way"),
    "position_embedding_type": Rule(_position),
    "hidden_act": Rule(_activation),
    "hidden_activation": Rule(_activation),
    "activation_function": Rule(_activation),
    "attn_logit_softcapping": _differs("logits of attention have no cap"),
    "final_logit_softcapping": _differs("logits have no cap"),
    "logits_soft_cap": _differs("logits have no cap"),
    "embedding_multiplier": _differs("embeddings are not scaled", 1, 1.0),
    "scale_emb": _differs("embeddings are not scaled", 1, 1.0),
    "residual_multiplier": _differs("layers are not scaled", 1, 1.0),
    "scale_depth": _differs("layers are not scaled", 1, 1.0),
    "attention_multiplier": _differs("attention has another scale"),
    "attention_scale": _differs("attention has another scale"),
    "query_pre_attn_scalar": Rule(
        lambda value, config, _source: (
            "" if value == config.get("head_dim") else "attention has another scale"
        )
    ),
    "logits_scaling": _differs("logits are not scaled", 1, 1.0),
    "logit_scale": _differs("logits are not scaled", 1, 1.0),
    "lm_head_multiplier": _differs("logits are not scaled", 1, 1.0),
    "routed_scaling_factor": _differs("experts are not scaled", 1, 1.0),
    "scoring_func": Rule(_scoring),
    "score_function": Rule(_scoring),
    "swiglu_limit": _differs("the activation has no limit"),
    "use_parallel_residual": _differs("attention and MLP are computed one after the other"),
    "parallel_attn": _differs("attention and MLP are computed one after the other"),
    "attention_chunk_size": Rule(
        lambda value, _config, _source: f"tokens attend beyond chunks of {value}", wrong=False
    ),
    "sliding_window": Rule(_window, wrong=False),
    "norm_topk_prob": Rule(
        lambda _value, _config, _source: "weights of experts are not normalized", wrong=False
    ),
}
"""Keys that change tokens."""

MAY_MATTER = re.compile(
    r"rope|rotary|ntk|attn|attention|mask|causal|bidirectional|norm|gamma|soft_?cap|clip|sink|"
    r"scal(?:e|ing)|alpha|multiplier|residual|parallel|window|chunk|position|alibi|temperature|"
    r"router|expert_|score|activation|(?:^|_)act(?:_|$)"
)
CHANGES_WEIGHTS = re.compile(
    r"activation|rotat|hadamard|scale|scaling|smooth|clip|outlier|kv_cache"
)

# Keys of a cache that is unused here, and of layers as they are stored.
OF_QUANTIZATION = frozenset(("kv_cache_scheme", "ignored_layers", "modules_to_not_convert"))

# Read, by the translation too, or without effect on text alone.
OF_ROPE = """
    type rope_type rope_theta partial_rotary_factor rotary_pct original_max_position_embeddings
    truncate mrope_section mrope_interleaved factor
"""
OF_ANSWERS = """
    temperature top_p top_k min_p typical_p epsilon_cutoff eta_cutoff repetition_penalty
    presence_penalty frequency_penalty encoder_repetition_penalty no_repeat_ngram_size
    bad_words_ids suppress_tokens begin_suppress_tokens forced_bos_token_id forced_eos_token_id
    sequence_bias exponential_decay_length_penalty guidance_scale min_length min_new_tokens
    max_length max_new_tokens stop_strings watermarking_config
"""
NEUTRAL: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1.0,
    "max_length": 20,
}
TRAINING = """
    attention_dropout attn_dropout attn_pdrop attention_probs_dropout_prob embd_pdrop resid_pdrop
    hidden_dropout hidden_dropout_prob residual_dropout classifier_dropout initializer_range
    initializer_factor router_aux_loss_coef router_z_loss_coef output_router_logits router_dtype
    router_jitter_noise aux_loss_alpha seq_aux num_nextn_predict_layers pretraining_tp
"""
OF_TRANSFORMERS = """
    use_cache attn_implementation _attn_implementation attn_implementation_autoset
    _attn_implementation_autoset output_attentions experts_implementation cache_implementation
    scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn moe_router_dtype
    attention_softmax_in_fp32 fused_rms_norm use_flash_attn flash_attention rms_norm_fused
"""

# Loading refuses unread weights.
OF_WEIGHTS = """
    attention_bias attention_out_bias attn_bias use_qk_norm qk_norm qk_layernorm use_qkv_bias bias
    qkv_bias mlp_bias use_bias sandwich_norm post_norm use_post_norm tie_word_embeddings
"""

# By the context, by `config_translation`, by `embeddings.pooling`, and above.
READ_HERE = """
    max_position_embeddings original_max_position_embeddings max_sequence_length n_positions
    max_trained_positions
    rope_parameters global_rope_theta local_rope_theta rope_local_base_freq
    use_bidirectional_attention is_causal use_sliding_window max_window_layers
"""

# Repeated by another key, or by shapes of weights.
DUPLICATES = """
    num_attention_heads num_key_value_heads head_dim attn_head_dim attention_head_dim layer_types
    sliding_window_pattern rms_norm_eps norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon
    num_experts_per_tok n_group topk_group position_embedding_size rope_ratio mm_token_type
"""
HARMLESS = frozenset(
    word
    for text in (TRAINING, OF_TRANSFORMERS, OF_WEIGHTS, READ_HERE, DUPLICATES)
    for word in text.split()
)
