"""Hostile model directories, files and adapters: what each has in it, and the words of its error.

`build(directory, tiny_model)` makes all of them beside a sound model. The campaign of a running
server and the tests of loading play the same ones.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import attrs

Kind = Literal["model", "adapter", "gguf"]
Make = Callable[[Path], None]
DEEP = "[" * 200_000 + "]" * 200_000
HUGE = 2**62
BILLION = 10**9
BACKTRACKS = "(a+)+!"
"""An expression that takes 2**n steps for n times an a."""
ESCAPES = "\x1b]0;owned\x07\x1b[2J\nERROR all is lost"
"""What changes a terminal's title, clears it, and begins another line of a log."""


@attrs.frozen
class Case:
    """One hostile thing. `words`: each must be in its error; none: it may also be served."""

    name: str
    path: Path
    kind: Kind
    words: tuple[str, ...]


@attrs.frozen
class _Recipe:
    name: str
    kind: Kind
    words: tuple[str, ...]
    make: Make


RECIPES: list[_Recipe] = []


def case(kind: Kind, *words: str) -> Callable[[Make], Make]:
    """Add a recipe that changes a sound directory. `words`: of its error."""

    def added(make: Make) -> Make:
        RECIPES.append(_Recipe(make.__name__.lstrip("_"), kind, words, make))
        return make

    return added


def build(directory: Path, tiny_model: Path, *names: str) -> list[Case]:
    """Make all cases below `directory`, or those whose names begin with one of `names`, from a
    sound model with a tokenizer and a template."""
    config = json.loads((tiny_model / "config.json").read_text())
    cases = []
    for recipe in RECIPES:
        if names and not recipe.name.startswith(names):
            continue
        path = directory / recipe.name
        if recipe.kind == "adapter":
            path.mkdir(parents=True)
            save_adapter(path, int(config["hidden_size"]))
        else:
            shutil.copytree(tiny_model, path)
        recipe.make(path)
        found = path / "model.gguf" if recipe.kind == "gguf" else path
        cases.append(Case(recipe.name, found, recipe.kind, recipe.words))
    return cases


def remove(directory: Path) -> None:
    """Remove what `build` made, files without rights among it."""
    for path in directory.rglob("*"):
        if not path.is_symlink() and path.is_dir():
            path.chmod(0o700)
    shutil.rmtree(directory)


# -- what the recipes are made of ----------------------------------------------------------------


def edit(path: Path, **changes: Any) -> None:
    """Change entries of a JSON object."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def replace(path: Path, content: str | bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def template(path: Path, source: str) -> None:
    edit(path / "tokenizer_config.json", chat_template=source)


def tokenizer(path: Path, **changes: Any) -> None:
    edit(path / "tokenizer.json", **changes)


def safetensors(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    """Write a file of weights with any header and any length of it."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    replace(path, struct.pack("<Q", len(raw) if length is None else length) + raw + data)


def tensor(shape: list[Any], begin: int = 0, end: int = 16, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def one_tensor(path: Path, entry: dict[str, Any], name: str = "model.norm.weight") -> None:
    safetensors(path / "model.safetensors", {name: entry}, bytes(16))


LAYER = "model.layers.0.self_attn.o_proj"


def save_adapter(
    path: Path, hidden: int, layers: tuple[str, ...] = (LAYER,), **config: Any
) -> None:
    """A sound adapter of PEFT's for square layers, rank 4."""
    header, data = dict[str, Any](), b""
    for layer in layers:
        for side, shape in (("A", [4, hidden]), ("B", [hidden, 4])):
            end = len(data) + 16 * hidden
            header[f"base_model.model.{layer}.lora_{side}.weight"] = tensor(shape, len(data), end)
            data += struct.pack("<f", 0.01) * (4 * hidden)
    safetensors(path / "adapter_model.safetensors", header, data)
    sound = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "init_lora_weights": True}
    (path / "adapter_config.json").write_text(json.dumps(sound | config))


def hidden_of(path: Path) -> int:
    """The size that the sound adapter has which lies here."""
    raw = (path / "adapter_model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return int(next(iter(header.values()))["shape"][1])


# -- configs -------------------------------------------------------------------------------------


@case("model", "config.json", "nested too deeply")
def config_deep(path: Path) -> None:
    replace(path / "config.json", DEEP)


@case("model", "config.json", "not a JSON object")
def config_list(path: Path) -> None:
    replace(path / "config.json", "[1, 2]")


@case("model", "config.json", "not a JSON object")
def config_number(path: Path) -> None:
    replace(path / "config.json", "NaN")


@case("model", "config.json", "is empty")
def config_empty(path: Path) -> None:
    replace(path / "config.json", "")


@case("model", "config.json", "cannot be read")
def config_binary(path: Path) -> None:
    replace(path / "config.json", bytes(range(256)) * 16)


@case("model", "config.json", "cannot be read")
def config_utf_16(path: Path) -> None:
    replace(path / "config.json", (path / "config.json").read_text().encode("utf-16"))


@case("model", "config.json", "cannot be read")
def config_bom(path: Path) -> None:
    replace(path / "config.json", b"\xef\xbb\xbf" + (path / "config.json").read_bytes())


@case("model", "config.json", "cannot be read")
def config_number_of_100000_digits(path: Path) -> None:
    replace(path / "config.json", f'{{"model_type": "llama", "hidden_size": 1{"0" * 100_000}}}')


@case("model", "config.json", "bytes")
def config_of_32_mb(path: Path) -> None:
    edit(path / "config.json", note="x" * 2**25)


@case("model")
def config_keys_twice(path: Path) -> None:
    text = (path / "config.json").read_text()
    replace(path / "config.json", text[:-1] + ', "hidden_size": 7}')


@case("model", "config.json", "no regular file")
def config_fifo(path: Path) -> None:
    (path / "config.json").unlink()
    os.mkfifo(path / "config.json")


@case("model", "config.json", "no regular file")
def config_device(path: Path) -> None:
    (path / "config.json").unlink()
    (path / "config.json").symlink_to("/dev/zero")


@case("model", "config.json", "no regular file")
def config_directory(path: Path) -> None:
    (path / "config.json").unlink()
    (path / "config.json").mkdir()


@case("model", "config.json")
def config_loop_of_links(path: Path) -> None:
    (path / "config.json").unlink()
    (path / "config.json").symlink_to("config.json")


@case("model", "model_type")
def config_escapes(path: Path) -> None:
    edit(path / "config.json", model_type=ESCAPES)


@case("model", "model_type")
def config_model_type_of_a_megabyte(path: Path) -> None:
    edit(path / "config.json", model_type="llama" * 200_000)


def config_value(name: str, key: str, value: Any, *words: str) -> None:
    """A recipe of one wrong value."""

    def make(path: Path) -> None:
        edit(path / "config.json", **{key: value})

    # No weight of the sound model is quantized.
    unused = isinstance(value, dict) and "bits" in value
    named = () if unused else words or (f"config_{name}",)
    RECIPES.append(_Recipe(f"config_{name}", "model", named, make))


config_value("hidden_size_2_62", "hidden_size", HUGE)
config_value("hidden_size_million", "hidden_size", 2**20)
config_value("hidden_size_negative", "hidden_size", -64)
config_value("hidden_size_zero", "hidden_size", 0)
config_value("hidden_size_float", "hidden_size", 64.5)
config_value("hidden_size_text", "hidden_size", "64")
config_value("hidden_size_list", "hidden_size", [64])
config_value("hidden_size_null", "hidden_size", None)
config_value("hidden_size_nan", "hidden_size", float("nan"))
config_value("layers_billion", "num_hidden_layers", BILLION, "num_hidden_layers")
config_value("layers_2_62", "num_hidden_layers", HUGE, "num_hidden_layers")
config_value("layers_negative", "num_hidden_layers", -1)
config_value("heads_zero", "num_attention_heads", 0)
config_value("heads_billion", "num_attention_heads", BILLION)
config_value("head_dim_2_62", "head_dim", HUGE)
config_value("vocab_2_62", "vocab_size", HUGE)
config_value("vocab_mismatch", "vocab_size", 511)
config_value("rope_scaling_text", "rope_scaling", "much")
config_value("rope_scaling_unknown", "rope_scaling", {"rope_type": "x", "factor": "y"})
config_value("quantization_bits_0", "quantization", {"bits": 0, "group_size": 64})
config_value("quantization_group_negative", "quantization", {"bits": 4, "group_size": -1})
config_value("quantization_text", "quantization", "four")
config_value("quantization_deep", "quantization", {"bits": [[]], "group_size": {}})


@case("model", "config.json")
def config_experts_billion(path: Path) -> None:
    edit(
        path / "config.json",
        model_type="mixtral",
        num_local_experts=BILLION,
        num_experts_per_tok=BILLION,
    )


@case("model")
def config_eos_out_of_range(path: Path) -> None:
    edit(path / "config.json", eos_token_id=[HUGE, -5, 10**30, 511])


@case("model")
def config_context_2_62(path: Path) -> None:
    edit(path / "config.json", max_position_embeddings=HUGE)


@case("model", "generation_config.json", "nested too deeply")
def generation_config_deep(path: Path) -> None:
    replace(path / "generation_config.json", DEEP)


@case("model", "generation_config.json", "no regular file")
def generation_config_fifo(path: Path) -> None:
    os.mkfifo(path / "generation_config.json")


# -- weights -------------------------------------------------------------------------------------


@case("model", "model.safetensors", "truncated")
def weights_header_of_2_63(path: Path) -> None:
    safetensors(path / "model.safetensors", {}, bytes(16), length=2**63)


@case("model", "model.safetensors", "header of 524288000 bytes")
def weights_header_of_500_mb(path: Path) -> None:
    safetensors(path / "model.safetensors", {}, length=500 * 2**20)
    os.truncate(path / "model.safetensors", 501 * 2**20)


@case("model", "model.safetensors", "not a safetensors file")
def weights_header_deep(path: Path) -> None:
    safetensors(path / "model.safetensors", b'{"a": ' + DEEP.encode() + b"}")


@case("model", "model.safetensors", "not a safetensors file")
def weights_header_list(path: Path) -> None:
    safetensors(path / "model.safetensors", [1, 2])


@case("model", "model.safetensors", "truncated")
def weights_beyond_the_file(path: Path) -> None:
    one_tensor(path, tensor([2**20], 0, 2**22))


@case("model", "model.safetensors", "bytes of its shape")
def weights_negative_offsets(path: Path) -> None:
    one_tensor(path, tensor([4], -16, 0))


@case("model", "model.safetensors", "share bytes")
def weights_overlapping(path: Path) -> None:
    header = {f"model.layers.{index}.weight": tensor([4]) for index in range(10_000)}
    safetensors(path / "model.safetensors", header, bytes(16))


@case("model", "unsupported dtype F4096")
def weights_of_unknown_dtype(path: Path) -> None:
    one_tensor(path, tensor([4], dtype="F4096"))


@case("model", "model.safetensors", "shape")
def weights_shape_overflows(path: Path) -> None:
    one_tensor(path, tensor([HUGE, HUGE]))


@case("model", "model.safetensors", "shape")
def weights_shape_wraps_to_its_bytes(path: Path) -> None:
    one_tensor(path, tensor([2**31 - 1, 2**31 - 1, 2**31 - 1]))


@case("model", "model.safetensors", "shape")
def weights_of_a_million_axes(path: Path) -> None:
    one_tensor(path, tensor([2**31 - 1] * 1_000_000))


@case("model", "model.safetensors", "not a safetensors file")
def weights_shape_of_text(path: Path) -> None:
    one_tensor(path, tensor(["4"]))


@case("model")
def weights_names_with_escapes(path: Path) -> None:
    one_tensor(path, tensor([4]), ESCAPES + "\x00")


@case("model")
def weights_name_of_a_megabyte(path: Path) -> None:
    one_tensor(path, tensor([4]), "x" * 2**20)


@case("model", "model.safetensors", "no regular file")
def weights_fifo(path: Path) -> None:
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")


@case("model", "model.safetensors", "no regular file")
def weights_socket(path: Path) -> None:
    (path / "model.safetensors").unlink()
    here = Path.cwd()
    os.chdir(path)  # The path of a socket may have some 100 characters.
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind("model.safetensors")
    finally:
        os.chdir(here)


@case("model", "model.safetensors", "no regular file")
def weights_directory(path: Path) -> None:
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").mkdir()


@case("model", "model.safetensors")
def weights_loop_of_links(path: Path) -> None:
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to("model.safetensors")


@case("model", "model.safetensors", "truncated")
def weights_cut(path: Path) -> None:
    os.truncate(path / "model.safetensors", 5000)


@case("model", "passwd")
def index_outside(path: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../../../../etc/passwd"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


@case("model", "has no")
def index_of_escapes(path: Path) -> None:
    index = {"weight_map": {str(number): f"{ESCAPES}{number}" for number in range(10_000)}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


@case("model", "index.json", "nested too deeply")
def index_deep(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text(DEEP)


# -- tokenizers ----------------------------------------------------------------------------------


@case("model", "tokenizer")
def tokenizer_deep(path: Path) -> None:
    replace(path / "tokenizer.json", DEEP)


@case("model", "tokenizer")
def tokenizer_config_deep(path: Path) -> None:
    replace(path / "tokenizer_config.json", DEEP)


@case("model", "tokenizer")
def tokenizer_config_list(path: Path) -> None:
    replace(path / "tokenizer_config.json", "[]")


@case("model", "tokenizer.json", "no regular file")
def tokenizer_fifo(path: Path) -> None:
    (path / "tokenizer.json").unlink()
    os.mkfifo(path / "tokenizer.json")


@case("model", "tokenizer.json", "no regular file")
def tokenizer_device(path: Path) -> None:
    (path / "tokenizer.json").unlink()
    (path / "tokenizer.json").symlink_to("/dev/zero")


@case("model", "chat_template.jinja", "no regular file")
def template_fifo(path: Path) -> None:
    os.mkfifo(path / "chat_template.jinja")


@case("model")
def tokenizer_strings_of_a_megabyte(path: Path) -> None:
    model = json.loads((path / "tokenizer.json").read_text())["model"]
    vocabulary = {
        key + "x" * 2**20 * (index < 8): index for index, key in enumerate(model["vocab"])
    }
    tokenizer(path, model={**model, "vocab": vocabulary})


@case("model", "tokenizer.json", "added")
def tokenizer_million_added_tokens(path: Path) -> None:
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": True,
        "special": True,
    }
    tokenizer(
        path, added_tokens=[{"id": n, "content": f"<{n}>", **flags} for n in range(1_000_000)]
    )


@case("model", "tokenizer")
def tokenizer_ids_of_2_32(path: Path) -> None:
    model = json.loads((path / "tokenizer.json").read_text())["model"]
    tokenizer(
        path, model={**model, "vocab": {key: 2**32 - 1 - n for n, key in enumerate(model["vocab"])}}
    )


@case("model", "tokenizer")
def tokenizer_splits_without_end(path: Path) -> None:
    split = {
        "type": "Split",
        "pattern": {"Regex": BACKTRACKS},
        "behavior": "Isolated",
        "invert": False,
    }
    tokenizer(path, pre_tokenizer=split)


@case("model", "tokenizer")
def tokenizer_replaces_without_end(path: Path) -> None:
    pattern = {"Regex": BACKTRACKS}
    tokenizer(path, normalizer={"type": "Replace", "pattern": pattern, "content": "b"})


@case("model", "tokenizer")
def tokenizer_grows_text(path: Path) -> None:
    grow = [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}] * 20
    tokenizer(path, normalizer={"type": "Sequence", "normalizers": grow})


@case("model", "tokenizer")
def tokenizer_nested_normalizers(path: Path) -> None:
    nested: Any = {"type": "Lowercase"}
    for _ in range(100):
        nested = {"type": "Sequence", "normalizers": [nested]}
    tokenizer(path, normalizer=nested, model={"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]})


@case("model", "tokenizer")
def tokenizer_unigram_nonsense(path: Path) -> None:
    tokenizer(path, model={"type": "Unigram", "unk_id": 7, "vocab": [["a", 1e308], ["b", -1e308]]})


# -- chat templates ------------------------------------------------------------------------------


def template_case(name: str, source: str, *words: str) -> None:
    """A recipe of one template."""

    def make(path: Path) -> None:
        template(path, source)

    RECIPES.append(_Recipe(f"template_{name}", "model", words, make))


LOOPS = "{% for a in range(99999) %}" * 4 + "x" + "{% endfor %}" * 4
ENDLESS = ("chat template",)
template_case("loops", LOOPS, *ENDLESS)
template_case("loops_without_output", LOOPS.replace("x", ""), *ENDLESS)
template_case("recurses", "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}")
template_case(
    "recurses_twice_30_deep",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(30) }}",
    *ENDLESS,
)
template_case(
    "doubles_text", "{% set s = 'aaaaaaaa' %}" + "{% set s = s ~ s %}" * 60 + "{{ s }}", *ENDLESS
)
template_case("multiplies_text", "{{ 'a' * 10**10 }}", *ENDLESS)
template_case("power", "{{ 10**(10**10) }}", *ENDLESS)
template_case("power_of_variables", "{% set a = 10 %}{{ a ** (a ** a) }}", *ENDLESS)
template_case("range_of_10_10", "{{ range(10**10) | list | length }}")
template_case("centres", "{{ 'a' | center(10**11) }}", *ENDLESS)
template_case("pads", "{{ 'a'.ljust(10**11) }}", *ENDLESS)
template_case("formats", "{{ '%999999999999d' % 1 }}")
template_case("lipsum", "{{ lipsum(n=10**8) }}", *ENDLESS)
template_case(
    "lists_of_lists",
    "{% set l = ['aaaaaaaa'] %}" + "{% set l = [l, l] %}" * 60 + "{{ l | tojson }}",
    *ENDLESS,
)
template_case("escapes", "{{ raise_exception('\x1b]0;owned\x07\\n' ~ messages) }}")
template_case("raises_odd_things", "{{ messages.nothing.at.all() / 0 }}")
template_case("includes", "{% include '/etc/passwd' %}{% import 'os' as os %}{% extends 'x' %}")
template_case(
    "leaves_the_sandbox",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ cycler.__init__.__globals__ }}",
)
template_case("deep_parentheses", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")
template_case("deep_blocks", "{% if 1 %}" * 3000 + "{% endif %}" * 3000)
template_case("of_10_mb", "{# x #}{{ messages }}" * 500_000, *ENDLESS)


@case("model")
def template_is_a_number(path: Path) -> None:
    edit(path / "tokenizer_config.json", chat_template=7)


# -- adapters ------------------------------------------------------------------------------------


def adapter_config(name: str, words: tuple[str, ...], **changes: Any) -> None:
    """A recipe of wrong values in an adapter's config."""

    def make(path: Path) -> None:
        edit(path / "adapter_config.json", **changes)

    RECIPES.append(_Recipe(f"adapter_{name}", "adapter", words, make))


@case("adapter", "alpha_pattern", BACKTRACKS)
def adapter_alpha_backtracks(path: Path) -> None:
    layer = "a" * 40 + ".layers.0.self_attn.o_proj"
    save_adapter(path, hidden_of(path), (layer,), alpha_pattern={BACKTRACKS: 8})


@case("adapter", "alpha_pattern")
def adapter_alpha_backtracks_slowly(path: Path) -> None:
    layer = "a" * 400 + ".layers.0.self_attn.o_proj"
    save_adapter(path, hidden_of(path), (layer,), alpha_pattern={"a*" * 50 + "!": 8})


adapter_config("alternatives", ("alpha_pattern",), alpha_pattern={"(m|m)(o|o)" * 30 + "!": 8})
adapter_config("alpha_list", ("alpha_pattern",), alpha_pattern=["q_proj"])
adapter_config("alpha_many", ("alpha_pattern",), alpha_pattern={f"[a]{n}": 8 for n in range(5000)})
adapter_config("alpha_text", ("gives no scale",), lora_alpha="much")
adapter_config("alpha_nan", ("not finite",), lora_alpha=float("nan"))
adapter_config("alpha_infinite", ("not finite",), lora_alpha=float("inf"))
adapter_config("ranks_by_pattern", (), rank_pattern={BACKTRACKS: 8}, target_modules=BACKTRACKS)
adapter_config("target_backtracks", (), target_modules=BACKTRACKS, exclude_modules="(.*)*!")
adapter_config("rank_billion", (), r=BILLION)
adapter_config("dora", ("use_dora",), use_dora=True)
adapter_config("modules_to_save", ("modules_to_save",), modules_to_save=[ESCAPES] * 10_000)
adapter_config("of_escapes", ("peft_type",), peft_type=ESCAPES)
adapter_config("large", ("adapter_config.json", "bytes"), note="x" * 2**21)


@case("adapter", "nested too deeply")
def adapter_deep(path: Path) -> None:
    replace(path / "adapter_config.json", DEEP)


@case("adapter", "not a JSON object")
def adapter_list(path: Path) -> None:
    replace(path / "adapter_config.json", "[]")


@case("adapter", "has no adapter")
def adapter_fifo(path: Path) -> None:
    (path / "adapter_model.safetensors").unlink()
    os.mkfifo(path / "adapter_model.safetensors")


@case("adapter", "has no adapter")
def adapter_device(path: Path) -> None:
    (path / "adapter_config.json").unlink()
    (path / "adapter_config.json").symlink_to("/dev/zero")


@case("adapter", "adapter_model.safetensors")
def adapter_header_of_2_63(path: Path) -> None:
    safetensors(path / "adapter_model.safetensors", {}, bytes(16), length=2**63)


@case("adapter", "adapter_model.safetensors", "header")
def adapter_header_of_8_mb(path: Path) -> None:
    header = {f"{LAYER}.{number}.lora_A.weight": tensor([4]) for number in range(100_000)}
    safetensors(path / "adapter_model.safetensors", header, bytes(16))


@case("adapter", "share bytes")
def adapter_overlapping(path: Path) -> None:
    header = {f"{LAYER}.lora_{side}.weight": tensor([2, 2]) for side in "AB"}
    safetensors(path / "adapter_model.safetensors", header, bytes(16))


@case("adapter", "20000 matrices")
def adapter_10000_layers(path: Path) -> None:
    save_adapter(path, 1, tuple(f"model.layers.{number}.mlp" for number in range(10_000)))


@case("adapter", "twice")
def adapter_a_layer_twice(path: Path) -> None:
    save_adapter(path, hidden_of(path), (LAYER, LAYER.replace("model.", "other.")))


@case("adapter", "name of")
def adapter_long_name(path: Path) -> None:
    save_adapter(path, hidden_of(path), ("a" * 100_000 + ".layers.0.self_attn.o_proj",))


@case("adapter", "no LoRA of a linear layer")
def adapter_names_with_escapes(path: Path) -> None:
    save_adapter(path, hidden_of(path), (f"{ESCAPES}.o_proj",))


@case("adapter", "outputs of")
def adapter_rank_mismatch(path: Path) -> None:
    save_adapter(path, hidden_of(path) + 1)


@case("adapter")
def adapter_of_zero_size(path: Path) -> None:
    header = {f"{LAYER}.lora_A.weight": tensor([0, hidden_of(path)], 0, 0)}
    header[f"{LAYER}.lora_B.weight"] = tensor([hidden_of(path), 0], 0, 0)
    safetensors(path / "adapter_model.safetensors", header)


@case("adapter", "not finite")
def adapter_nan(path: Path) -> None:
    file = path / "adapter_model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-4] + struct.pack("<f", float("nan")))


@case("adapter", "one of its two matrices")
def adapter_half(path: Path) -> None:
    hidden = hidden_of(path)
    header = {f"{LAYER}.lora_A.weight": tensor([4, hidden], 0, 16 * hidden)}
    safetensors(path / "adapter_model.safetensors", header, bytes(16 * hidden))


@case("adapter", "shape")
def adapter_shape_overflows(path: Path) -> None:
    header = {f"{LAYER}.lora_A.weight": tensor([HUGE, HUGE])}
    safetensors(path / "adapter_model.safetensors", header, bytes(16))


@case("adapter", "is empty")
def adapter_empty(path: Path) -> None:
    safetensors(path / "adapter_model.safetensors", {})


@case("adapter", "scale")
def adapter_of_mlx_lm_nonsense(path: Path) -> None:
    hidden = hidden_of(path)
    (path / "adapter_model.safetensors").unlink()
    header = {
        f"{LAYER}.lora_a": tensor([hidden, 4], 0, 16 * hidden),
        f"{LAYER}.lora_b": tensor([4, hidden], 16 * hidden, 32 * hidden),
    }
    safetensors(path / "adapters.safetensors", header, struct.pack("<f", 0.01) * (8 * hidden))
    nonsense = {"lora_parameters": {"scale": [1]}, "num_layers": BILLION, "rank": HUGE}
    replace(path / "adapter_config.json", json.dumps(nonsense))


# -- GGUF ----------------------------------------------------------------------------------------


def gguf_case(name: str, content: bytes) -> None:
    """A recipe of one GGUF file, which a server does not take."""

    def make(path: Path) -> None:
        (path / "model.gguf").write_bytes(content)

    RECIPES.append(_Recipe(f"gguf_{name}", "gguf", ("is a file",), make))


gguf_case("counts_of_2_63", b"GGUF" + struct.pack("<IQQ", 3, 2**63, 2**63))
gguf_case("string_of_2_63", b"GGUF" + struct.pack("<IQQQ", 3, 1, 1, 2**63))
gguf_case("unknown_type", b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 99))
gguf_case("cut", b"GGUF")
