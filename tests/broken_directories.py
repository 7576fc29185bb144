"""Model directories as people have them: broken, odd, or of another format.

Each case changes a sound directory with a tiny random model. `words` are in the reason for which
the directory is refused; a case without words is served.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx

from tests.families import write_json

Make = Callable[[Path], object]
WEIGHTS = "model.safetensors"
PAGE = "<!DOCTYPE html><html>Sign in</html>"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 3\n"


@attrs.frozen
class BrokenDirectory:
    make: Make
    words: str = ""
    """A regular expression; "" for what is served."""
    named: str = ""
    """The directory below that is given to --model."""


def edit(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    kept = json.loads(path.read_text()) | changes
    write_json(path, {key: value for key, value in kept.items() if value is not None})


def rename_weights(directory: Path, rename: Callable[[str], str]) -> None:
    weights = mx.load(str(directory / WEIGHTS))
    mx.eval(weights)
    renamed = {rename(name): weight for name, weight in weights.items()}  # type: ignore[union-attr]
    mx.save_safetensors(str(directory / WEIGHTS), renamed)


def add_weights(directory: Path, **arrays: mx.array) -> None:
    weights = mx.load(str(directory / WEIGHTS))
    mx.eval(weights)
    mx.save_safetensors(str(directory / WEIGHTS), {**weights, **arrays})  # type: ignore[dict-item]


def no_change(_directory: Path) -> None:
    pass


def alone(name: str) -> Make:
    """Weights of another format alone, without a config."""

    def make(directory: Path) -> None:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / WEIGHTS).rename(directory / name)
        (directory / "config.json").unlink()

    return make


def instead(name: str) -> Make:
    """Weights of another format beside the config."""

    def make(directory: Path) -> None:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / WEIGHTS).rename(directory / name)

    return make


def pipeline(directory: Path) -> None:
    alone("unet.bin")(directory)
    write_json(directory / "model_index.json", {"_class_name": "FluxPipeline"})


def write(name: str, content: str | bytes) -> Make:
    data = content.encode() if isinstance(content, str) else content

    def make(directory: Path) -> None:
        (directory / name).write_bytes(data)

    return make


def remove(*names: str) -> Make:
    def make(directory: Path) -> None:
        for name in names:
            (directory / name).unlink()

    return make


def change(**changes: Any) -> Make:
    return lambda directory: edit(directory, **changes)


def link_to_nothing(name: str) -> Make:
    def make(directory: Path) -> None:
        (directory / name).unlink()
        (directory / name).symlink_to("../../blobs/0a1b2c")

    return make


def becomes_directory(name: str) -> Make:
    def make(directory: Path) -> None:
        (directory / name).unlink()
        (directory / name).mkdir()

    return make


def cut(name: str, size: int) -> Make:
    def make(directory: Path) -> None:
        path = directory / name
        path.write_bytes(path.read_bytes()[:size])

    return make


def move_below(name: str) -> Make:
    def make(directory: Path) -> None:
        shutil.copytree(directory, directory.parent / "copy")
        for path in directory.iterdir():
            path.unlink()
        shutil.move(directory.parent / "copy", directory / name)

    return make


def cached(directory: Path) -> None:
    """One repository of the hub's cache: links into blobs."""
    move_below("snapshots/0a1b2c")(directory)
    (directory / "refs").mkdir()
    (directory / "refs" / "main").write_text("0a1b2c")


def cached_half(directory: Path) -> None:
    model = directory / "models--owner--model"
    (model / "blobs").mkdir(parents=True)
    (model / "snapshots" / "0a1b2c").mkdir(parents=True)
    (model / "blobs" / "0a.incomplete").write_bytes(b"\0" * 10)


def half_downloaded(directory: Path) -> None:
    cache = directory / ".cache" / "huggingface" / "download"
    cache.mkdir(parents=True)
    (directory / WEIGHTS).rename(cache / "0a1b2c.incomplete")


def adapter(file: str, *, config: bool = True) -> Make:
    def make(directory: Path) -> None:
        (directory / WEIGHTS).rename(directory / file)
        (directory / "config.json").unlink()
        if config:
            write_json(directory / "adapter_config.json", {"peft_type": "LORA", "r": 8})

    return make


def unfused(directory: Path) -> None:
    """Weights of a model with LoRA layers that were not fused."""
    name = "model.layers.0.self_attn.q_proj"
    add_weights(directory, **{f"{name}.lora_a": mx.zeros((64, 4)), f"{name}.lora_b": mx.zeros(4)})


def quantized(method: str, suffix: str, **options: Any) -> Make:
    def make(directory: Path) -> None:
        edit(directory, quantization_config={"quant_method": method, **options})
        rename_weights(directory, lambda name: name.replace("_proj.weight", f"_proj.{suffix}"))

    return make


def shards(*present: int, count: int = 2, index: bool = True) -> Make:
    def make(directory: Path) -> None:
        names = [f"model-0000{n}-of-0000{count}.safetensors" for n in range(1, count + 1)]
        weights = mx.load(str(directory / WEIGHTS))
        mx.eval(weights)
        assert isinstance(weights, dict)
        files = {name: names[at % count] for at, name in enumerate(weights)}
        for number in present:
            chosen = {key: weights[key] for key in weights if files[key] == names[number - 1]}
            mx.save_safetensors(str(directory / names[number - 1]), chosen)
        (directory / WEIGHTS).unlink()
        if index:
            write_json(directory / f"{WEIGHTS}.index.json", {"weight_map": files})

    return make


def mixed(directory: Path) -> None:
    """An older quantized file beside the shards of the index."""
    shutil.copy(directory / WEIGHTS, directory / "model-00001-of-00001.safetensors")
    rename_weights(directory, lambda name: f"{name}.biases")
    index = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
    write_json(directory / f"{WEIGHTS}.index.json", index)


def tokenizer_alone(name: str, content: bytes = b"\0") -> Make:
    def make(directory: Path) -> None:
        (directory / "tokenizer.json").unlink()
        (directory / name).write_bytes(content)

    return make


def tokenizer_of_code(*names: str) -> Make:
    def make(directory: Path) -> None:
        (directory / "tokenizer.json").unlink()
        for name in names:
            (directory / name).write_bytes(b"\0")
        code = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
        config = {"tokenizer_class": "OwnTokenizer", "auto_map": code}
        write_json(directory / "tokenizer_config.json", config)

    return make


def small_tokenizer(directory: Path) -> None:
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] = {"a": 0, "b": 1}
    content["model"]["merges"] = []
    content["added_tokens"] = []
    write_json(path, content)


def with_modules(directory: Path) -> None:
    (directory / "1_Pooling").mkdir()
    write_json(directory / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    (directory / "modules.json").write_text("[]")


OTHER = r"\), which is not read here; use a version with config.json and model"
AGAIN = "download it again"

CASES: dict[str, BrokenDirectory] = {
    # -- what is served
    "sound": BrokenDirectory(no_change),
    "no template": BrokenDirectory(write("tokenizer_config.json", "{}")),
    "template with a fault": BrokenDirectory(write("chat_template.jinja", "{% if %}")),
    "generation_config broken": BrokenDirectory(write("generation_config.json", "{")),
    "index of the source": BrokenDirectory(
        write(f"{WEIGHTS}.index.json", '{"weight_map": {"w": "model-00001-of-00009.safetensors"}}')
    ),
    "fused": BrokenDirectory(write("adapter_config.json", '{"fine_tune_type": "lora"}')),
    "two formats": BrokenDirectory(write("model-Q4_K_M.gguf", b"GGUF")),
    "whole shards": BrokenDirectory(shards(1, 2)),
    "whole shards without an index": BrokenDirectory(shards(1, 2, index=False)),
    # -- config.json
    "empty": BrokenDirectory(
        remove(WEIGHTS, "config.json", "tokenizer.json", "tokenizer_config.json"),
        "has no config.json: it is not a model directory",
    ),
    "no config": BrokenDirectory(remove("config.json"), "has no config.json"),
    "config empty": BrokenDirectory(write("config.json", ""), f"config.json is empty: {AGAIN}"),
    "config cut": BrokenDirectory(cut("config.json", 40), "config.json cannot be read"),
    "config with a BOM": BrokenDirectory(write("config.json", b"\xef\xbb\xbf{}"), "BOM"),
    "config a list": BrokenDirectory(write("config.json", "[]"), "is not a JSON object"),
    "config a directory": BrokenDirectory(becomes_directory("config.json"), "no regular file"),
    "config a link": BrokenDirectory(link_to_nothing("config.json"), "is a link to .*blobs/0a1b2c"),
    "config a page": BrokenDirectory(write("config.json", PAGE), "config.json is a web page"),
    "config a pointer": BrokenDirectory(write("config.json", POINTER), "git lfs pull"),
    "config without a type": BrokenDirectory(change(model_type=None), "names no model_type"),
    "unknown type": BrokenDirectory(
        change(model_type="llamma"), "no architecture for model_type 'llamma'.*'llama'"
    ),
    "vision alone": BrokenDirectory(
        change(model_type="siglip_vision_model"), "no architecture for .*siglip_vision_model"
    ),
    "a layer too many": BrokenDirectory(change(num_hidden_layers=9), "and [0-9]+ more missing"),
    "another width": BrokenDirectory(change(hidden_size=32), "do not make a model"),
    "another rope": BrokenDirectory(
        change(final_logit_softcapping=30.0), "final_logit_softcapping"
    ),
    # -- weights
    "no weights": BrokenDirectory(remove(WEIGHTS), "has no weights"),
    "weights empty": BrokenDirectory(write(WEIGHTS, ""), f"{WEIGHTS} is empty: {AGAIN}"),
    "weights cut": BrokenDirectory(cut(WEIGHTS, 5000), "is truncated"),
    "header no JSON": BrokenDirectory(
        write(WEIGHTS, b"\x05\0\0\0\0\0\0\0{no}!" + b"\0" * 20), "is not a safetensors file"
    ),
    "weights a page": BrokenDirectory(write(WEIGHTS, PAGE), "is a web page"),
    "weights a pointer": BrokenDirectory(write(WEIGHTS, POINTER), "git lfs pull"),
    "weights a link": BrokenDirectory(link_to_nothing(WEIGHTS), f"is a link to .*{AGAIN}"),
    "weights a directory": BrokenDirectory(becomes_directory(WEIGHTS), "no regular file"),
    "GGUF under another name": BrokenDirectory(write(WEIGHTS, b"GGUF" + b"\3" * 90), "is GGUF"),
    "PyTorch under another name": BrokenDirectory(
        write(WEIGHTS, b"PK\3\4" + b"\3" * 90), "is a zip archive, as PyTorch"
    ),
    "a shard missing": BrokenDirectory(shards(1), "has no model-00002-of-00002"),
    "a shard missing without an index": BrokenDirectory(
        shards(1, 3, count=3, index=False), "has no model-00002-of-00003"
    ),
    "half a download": BrokenDirectory(
        half_downloaded, f"0a1b2c.incomplete, a download that has not ended: {AGAIN}"
    ),
    "an older file": BrokenDirectory(mixed, f"{WEIGHTS} is in no index"),
    "not fused": BrokenDirectory(unfused, "lora_a.* not in the model"),
    # -- other formats
    "GGUF": BrokenDirectory(alone("model-Q4_K_M.gguf"), rf"model-Q4_K_M.gguf \(GGUF{OTHER}"),
    "ONNX": BrokenDirectory(instead("onnx/model.onnx"), rf"onnx/model.onnx \(ONNX{OTHER}"),
    "PyTorch": BrokenDirectory(instead("pytorch_model.bin"), rf"weights of PyTorch{OTHER}"),
    "PyTorch, a shard": BrokenDirectory(
        instead("pytorch_model-00001-of-00002.bin"), rf"weights of PyTorch{OTHER}"
    ),
    "pt": BrokenDirectory(alone("model.pt"), rf"model.pt \(weights of PyTorch{OTHER}"),
    "pth": BrokenDirectory(alone("consolidated.00.pth"), rf"weights of PyTorch{OTHER}"),
    "Flax": BrokenDirectory(instead("flax_model.msgpack"), rf"weights of Flax{OTHER}"),
    "TensorFlow": BrokenDirectory(instead("tf_model.h5"), rf"weights of TensorFlow{OTHER}"),
    "OpenVINO": BrokenDirectory(instead("openvino_model.bin"), rf"OpenVINO{OTHER}"),
    "Mistral": BrokenDirectory(instead("consolidated.safetensors"), "Mistral's own format"),
    "npz": BrokenDirectory(instead("weights.npz"), "MLX's former format"),
    "another name": BrokenDirectory(instead("pytorch_model.safetensors"), "rename it"),
    "diffusers": BrokenDirectory(pipeline, "a pipeline of diffusers"),
    "adapter of PEFT": BrokenDirectory(
        adapter("adapter_model.safetensors"), "adapter_model.safetensors: an adapter: .*--adapter"
    ),
    "adapter of PEFT in .bin": BrokenDirectory(adapter("adapter_model.bin"), ": an adapter: "),
    "adapter of mlx-lm": BrokenDirectory(
        adapter("adapters.safetensors", config=False), "--adapter"
    ),
    # -- quantized by others
    "FP8": BrokenDirectory(quantized("fp8", "weight_scale_inv"), "quantized by fp8"),
    "compressed-tensors FP8": BrokenDirectory(
        quantized("compressed-tensors", "weight_scale", format="float-quantized"),
        "quantized by compressed-tensors",
    ),
    "bitsandbytes": BrokenDirectory(
        quantized("bitsandbytes", "weight.absmax", load_in_4bit=True), "quantized by bitsandbytes"
    ),
    "HQQ": BrokenDirectory(quantized("hqq", "W_q"), "quantized by hqq"),
    "exl2": BrokenDirectory(quantized("exl2", "q_weight"), "quantized by exl2"),
    "GPTQ with an order": BrokenDirectory(quantized("gptq", "g_idx", bits=4), "by gptq: .*g_idx"),
    "AWQ in 3 bits": BrokenDirectory(quantized("awq", "qweight", bits=3), "by awq: .*bits"),
    # -- tokenizers
    "no tokenizer": BrokenDirectory(remove("tokenizer.json"), f"has no tokenizer.json: {AGAIN}"),
    "tekken": BrokenDirectory(tokenizer_alone("tekken.json", b"{}"), "tekken.json, which is not"),
    "tiktoken": BrokenDirectory(tokenizer_alone("tiktoken.model"), "tiktoken.model, which is not"),
    "SentencePiece": BrokenDirectory(tokenizer_alone("tokenizer.model"), "of SentencePiece"),
    "tokenizer of code": BrokenDirectory(tokenizer_of_code(), "tokenization_own.OwnTokenizer"),
    "tiktoken and code": BrokenDirectory(
        tokenizer_of_code("tiktoken.model"), "tiktoken.model, which is not"
    ),
    "tokenizer empty": BrokenDirectory(write("tokenizer.json", ""), "tokenizer.json is empty"),
    "tokenizer a pointer": BrokenDirectory(write("tokenizer.json", POINTER), "git lfs pull"),
    "tokenizer no JSON": BrokenDirectory(
        write("tokenizer.json", "{"), "tokenizer.json cannot be read"
    ),
    "tokenizer a link": BrokenDirectory(link_to_nothing("tokenizer.json"), "is a link to"),
    "tokenizer of another model": BrokenDirectory(small_tokenizer, "is of another model"),
    # -- directories of directories
    "hub's cache of a model": BrokenDirectory(cached, "snapshots/0a1b2c"),
    "hub's cache": BrokenDirectory(
        move_below("models--owner--model/snapshots/0a"), "hub's cache: .* as owner/model"
    ),
    "hub's cache of half a model": BrokenDirectory(
        cached_half, "models pull owner/model", "models--owner--model"
    ),
    "models below": BrokenDirectory(move_below("4bit"), "models are below it: 4bit"),
    "a module of an embedder": BrokenDirectory(with_modules, "names no model_type", "1_Pooling"),
}


def build(name: str, sound: Path, directory: Path) -> Path:
    """A copy of the sound model with the fault; returns what is given to --model."""
    case = CASES[name]
    shutil.copytree(sound, directory)
    case.make(directory)
    return directory / case.named
