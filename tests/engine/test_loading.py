"""Models that load: quantized, adapted, sharded. Models that cannot: one clear line for each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from tests.arithmetic import cpu_only
from tests.families import FAMILIES, build, prompts, reference, save, write_json
from trouper.engine.loading import bundled_model, checkpoint, model_source, precision
from trouper.engine.loading.model_loading import EvaluatedModel, load
from trouper.engine.platform import device
from trouper.protocol.loading import Loading
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.settings import Settings
from trouper.storage import context
from trouper.system import main_memory

PROMPT = prompts()[1]
on_cpu = pytest.mark.skipif(
    not device.is_cpu(), reason="elsewhere the checkpoint's own precision is kept"
)


def load_from(directory: Path, **settings: Any) -> EvaluatedModel:
    return load(Settings(model=str(directory), **settings), lambda line: None)


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    kept = {**json.loads(path.read_text()), **changes}
    write_json(path, {key: value for key, value in kept.items() if value is not None})


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save("llama", tmp_path / "llama")


def test_loads_and_answers_as_built(llama: Path) -> None:
    said: list[str] = []
    loaded = load(Settings(model=str(llama)), said.append)
    assert reference(loaded.model, PROMPT, 8) == reference(build("llama"), PROMPT, 8)
    assert loaded.directory == llama
    assert (loaded.card.id, loaded.card.architecture, loaded.card.context_length) == (
        str(llama),
        "llama",
        2048,
    )
    assert loaded.card.weights_bytes == sum(
        array.nbytes for _, array in tree_flatten(loaded.model.parameters())
    )
    assert any("MiB" in line for line in said)


def test_what_is_adapted_to_the_chat_template_is_one_line_and_on_the_card(llama: Path) -> None:
    """This template shows the text of each message, and no calls."""
    said: list[str] = []
    loaded = load(Settings(model=str(llama)), said.append)
    assert dict(loaded.card.adapted_messages) == {"calls": "earlier calls become text"}
    assert [line for line in said if "earlier calls become text" in line] == [
        "messages are adapted to the chat template: calls: earlier calls become text"
    ]


def test_who_watches_sees_all_bytes_go_by(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the weights, and of the files that are read again for their digests; and the steps of the
    self-check."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("trouper.engine.loading.weights.EVALUATION_BYTES", 100_000)
    seen: list[Loading] = []
    load(Settings(model=str(llama)), lambda _: None, seen.append)
    stages = {one.stage: [each for each in seen if each.stage == one.stage] for one in seen}
    tokenizer, weights, checks, digests = stages.values()
    assert [one.done_bytes for one in tokenizer] == [0, 1]
    assert len(weights) > 3
    assert [one.unit for one in (weights[0], checks[0], digests[0])] == ["bytes", "steps", "bytes"]
    for steps in (weights, checks, digests):
        assert {(one.model, one.total_bytes) for one in steps} == {
            (str(llama), steps[-1].done_bytes)
        }
        assert [one.done_bytes for one in steps] == sorted(one.done_bytes for one in steps)
    assert weights[0].done_bytes == 0


@cpu_only
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3", "gemma3_text"])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 64)])
@on_cpu
@pytest.mark.long(but=("8-64-llama", "4-32-qwen3_moe", "4-32-deepseek_v3"))
def test_quantized_layers_become_float32(
    tmp_path: Path, name: str, bits: int, group_size: int
) -> None:
    """Linear, embedding, experts and MLA's heads. The tokens are the quantized model's own."""
    directory = save(name, tmp_path)
    model = build(name)

    def fits(path: str, module: nn.Module) -> bool:
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size == 0

    nn.quantize(model, group_size=group_size, bits=bits, class_predicate=fits)
    mx.save_safetensors(
        str(directory / "model.safetensors"), dict(tree_flatten(model.parameters()))
    )
    edit_config(directory, quantization={"group_size": group_size, "bits": bits})
    loaded = load_from(directory)
    assert {array.dtype for _, array in tree_flatten(loaded.model.parameters())} == {mx.float32}
    assert loaded.card.dtype == "float32"
    assert mx.allclose(logits(model), logits(loaded.model), rtol=1e-3, atol=1e-3)


def logits(model: nn.Module) -> mx.array:
    return model(mx.array([PROMPT]), cache=make_prompt_cache(model))


@on_cpu
def test_bfloat16_becomes_float32_and_integers_stay(llama: Path) -> None:
    model = build("llama")
    model.set_dtype(mx.bfloat16)
    mx.save_safetensors(str(llama / "model.safetensors"), dict(tree_flatten(model.parameters())))
    assert load_from(llama).card.dtype == "float32"


def test_elsewhere_the_checkpoints_precision_is_kept(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama")
    nn.quantize(model, group_size=32, bits=4)
    model.set_dtype(mx.bfloat16)
    mx.save_safetensors(str(llama / "model.safetensors"), dict(tree_flatten(model.parameters())))
    edit_config(llama, quantization={"group_size": 32, "bits": 4})
    monkeypatch.setattr(device, "is_cpu", lambda: False)
    loaded = load_from(llama)
    assert loaded.card.dtype == "bfloat16, quantized weights"
    assert isinstance(loaded.model.layers[0].self_attn.q_proj, nn.QuantizedLinear)


def test_a_sharded_checkpoint_and_one_that_lacks_a_shard(llama: Path) -> None:
    whole = tree_flatten(build("llama").parameters())
    shards = {
        "model-1-of-2.safetensors": dict(whole[:9]),
        "model-2-of-2.safetensors": dict(whole[9:]),
    }
    for file, part in shards.items():
        mx.save_safetensors(str(llama / file), part)
    (llama / "model.safetensors").unlink()
    index = {name: file for file, part in shards.items() for name in part}
    write_json(llama / "model.safetensors.index.json", {"weight_map": index})
    assert reference(load_from(llama).model, PROMPT, 4) == reference(build("llama"), PROMPT, 4)
    (llama / "model-2-of-2.safetensors").unlink()
    with pytest.raises(ModelUnusable, match=r"has no model-2-of-2\.safetensors"):
        load_from(llama)


def save_lora(model: nn.Module, directory: Path, rank: int = 4) -> Path:
    """A LoRA on the query projections of the last two layers, strong enough to be heard."""
    directory.mkdir()
    write_json(
        directory / "adapter_config.json",
        {
            "fine_tune_type": "lora",
            "num_layers": 2,
            "lora_parameters": {
                "rank": rank,
                "scale": 20.0,
                "dropout": 0.0,
                "keys": ["self_attn.q_proj"],
            },
        },
    )
    layers = range(len(model.layers) - 2, len(model.layers))
    hidden = FAMILIES["llama"]["hidden_size"]
    weights = {}
    for i in layers:
        path = f"model.layers.{i}.self_attn.q_proj"
        weights[f"{path}.lora_a"] = mx.random.normal((hidden, 4), key=mx.random.key(i))
        weights[f"{path}.lora_b"] = mx.random.normal((4, hidden), key=mx.random.key(i + 9))
    mx.save_safetensors(str(directory / "adapters.safetensors"), weights)
    return directory


def test_an_adapter_changes_the_answer(llama: Path, tmp_path: Path) -> None:
    plain = load_from(llama)
    adapter = save_lora(plain.model, tmp_path / "lora")
    adapted = load_from(llama, adapter_path=str(adapter))
    again = load_from(llama, adapter_path=str(adapter))
    assert reference(adapted.model, PROMPT, 8) != reference(plain.model, PROMPT, 8)
    assert reference(adapted.model, PROMPT, 8) == reference(again.model, PROMPT, 8)


def test_what_others_may_change_is_named(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, model := tmp_path / "model")
    for mode, names in ((0o755, False), (0o777, True)):
        model.chmod(mode)
        said = list[str]()
        load(Settings(model=str(model), self_check="off"), said.append)
        assert any(f"other users may change {model}" in line for line in said) == names


def test_an_adapter_that_does_not_fit(llama: Path, tmp_path: Path) -> None:
    adapter = save_lora(build("llama"), tmp_path / "lora", rank=8)
    assert "--adapter-path" in complaint(llama, adapter_path=str(adapter))


def test_an_adapter_is_looked_for_before_the_model(tmp_path: Path) -> None:
    """A model may take minutes, or a download."""
    nowhere = tmp_path / "no model"
    assert "nowhere: no such directory; give the" in complaint(
        nowhere, adapter_path=str(tmp_path / "nowhere")
    )
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), {"a": mx.zeros(1)})
    assert "is a file" in complaint(nowhere, adapter_path=str(tmp_path / "adapters.safetensors"))
    assert "has no adapter_config.json" in complaint(nowhere, adapter_path=str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "no model: no such directory" in complaint(nowhere, adapter_path=str(tmp_path))


def test_a_cache_that_cannot_be_written_names_its_variable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelUnusable, match="Not a directory; set XDG_CACHE_HOME") as unusable:
        bundled_model.directory(tmp_path / "file" / "cache")
    assert unusable.value.remedy.startswith("set XDG_CACHE_HOME")


def complaint(directory: Path | str, **settings: Any) -> str:
    with pytest.raises(ModelUnusable) as unusable:
        load(Settings(model=str(directory), **settings), lambda line: None)
    line = str(unusable.value)
    assert "\n" not in line
    return line


def cut(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def scribble(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not JSON at all!")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
"""What a clone without Git LFS has in the place of a large file."""
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), "has no config.json"),
    "config is not JSON": (
        lambda d: (d / "config.json").write_text("{"),
        "config.json cannot be read",
    ),
    "config is a list": (lambda d: (d / "config.json").write_text("[]"), "not a JSON object"),
    "no model_type": (lambda d: edit_config(d, model_type=None), "names no model_type"),
    "unsupported": (lambda d: edit_config(d, model_type="warp9"), "'warp9'"),
    "unsupported, odd": (lambda d: edit_config(d, model_type="../llama"), "'../llama'"),
    "config lacks a key": (
        lambda d: edit_config(d, num_attention_heads=None),
        "num_attention_heads",
    ),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "has no weights"),
    "truncated": (cut, "is truncated"),
    "a pointer": (
        lambda d: (d / "model.safetensors").write_text(POINTER),
        "pointer of Git LFS: get its content by",
    ),
    "tokenizer is one": (
        lambda d: (d / "tokenizer.json").write_text(POINTER),
        "tokenizer.json is a pointer of Git LFS",
    ),
    "empty": (lambda d: (d / "model.safetensors").write_bytes(b""), "is empty"),
    "not safetensors": (scribble, "not a safetensors file"),
    "other shapes": (lambda d: edit_config(d, intermediate_size=96), "do not make a model"),
    "fewer layers": (lambda d: edit_config(d, num_hidden_layers=3), "do not make a model"),
    "more layers": (lambda d: edit_config(d, num_hidden_layers=5), "do not make a model"),
    "no tokenizer": (
        lambda d: (d / "tokenizer.json").unlink(),
        "has no tokenizer.json: download it again",
    ),
    "model code": (lambda d: edit_config(d, model_file="evil.py"), "do not make a model"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_model_is_one_line(llama: Path, fault: str) -> None:
    break_it, said = BROKEN[fault]
    break_it(llama)
    line = complaint(llama)
    assert said in line
    assert str(llama) in line


@pytest.mark.parametrize("odd", [None, "text", []])
def test_odd_entries_that_nothing_needs_are_no_fault(llama: Path, odd: object) -> None:
    edit_config(llama, architectures=odd)
    write_json(llama / "model.safetensors.index.json", {"weight_map": odd})
    assert reference(load_from(llama).model, PROMPT, 4) == reference(build("llama"), PROMPT, 4)


@pytest.mark.parametrize("odd", [-1, True, [["LlamaForCausalLM"]]])
def test_odd_architectures_are_read_past(llama: Path, odd: object) -> None:
    edit_config(llama, architectures=odd)
    assert reference(load_from(llama).model, PROMPT, 4) == reference(build("llama"), PROMPT, 4)


def test_no_such_directory(tmp_path: Path) -> None:
    assert "no such directory" in complaint(tmp_path / "nowhere")
    (tmp_path / "model.gguf").touch()
    assert "is a file" in complaint(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("proxies", "remedy"),
    [({}, "set HTTPS_PROXY"), ({"https": "http://127.0.0.1:9"}, "look at the proxy that")],
)
def test_a_hub_id_without_a_hub(
    proxies: dict[str, str], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HF_HUB_OFFLINE is set for all tests."""
    monkeypatch.setattr(model_source, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(model_source, "getproxies", lambda: proxies)
    assert f"the model hub cannot be reached; {remedy}" in complaint("nobody/not-cached-anywhere")


def test_too_large_for_the_device(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "memory_limit_bytes", lambda sharers=1: 2**18)
    assert "GiB for its weights" in complaint(llama)


@on_cpu
def test_size_is_known_before_loading(tmp_path: Path) -> None:
    model = build("qwen3_moe")
    plain = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    directory = save("qwen3_moe", tmp_path)
    nn.quantize(model, group_size=32, bits=4)
    mx.save_safetensors(
        str(directory / "model.safetensors"), dict(tree_flatten(model.parameters()))
    )
    edit_config(directory, quantization={"group_size": 32, "bits": 4})
    assert checkpoint.inspect(directory).float32_bytes == plain


@on_cpu
@pytest.mark.parametrize("group_size", [32, 64])
def test_the_size_of_an_awq_checkpoint_is_known_before_loading(
    group_size: int, tmp_path: Path
) -> None:
    """Found by review: its group size is that of another part of the config, and 64 was taken."""
    plain = dict(tree_flatten(build("llama").parameters()))
    weights: dict[str, mx.array] = {}
    for name, array in plain.items():
        if array.ndim < 2 or "embed" in name or "lm_head" in name or array.shape[1] % group_size:
            weights[name] = array
            continue
        rows, columns = array.shape
        layer = name.removesuffix(".weight")
        weights[f"{layer}.qweight"] = mx.zeros((columns, rows // 8), mx.int32)
        weights[f"{layer}.qzeros"] = mx.zeros((columns // group_size, rows // 8), mx.int32)
        weights[f"{layer}.scales"] = mx.ones((columns // group_size, rows), mx.float16)
    assert any(name.endswith(".qweight") for name in weights)
    directory = save("llama", tmp_path)
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    edit_config(
        directory, quantization_config={"quant_method": "awq", "bits": 4, "group_size": group_size}
    )
    loaded = load_from(directory).model
    nbytes = sum(array.nbytes for _, array in tree_flatten(loaded.parameters()))
    assert checkpoint.inspect(directory).float32_bytes == nbytes


def test_the_devices_own_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """R14: what the device recommends, else what it has, else what the machine or container has."""
    info: dict[str, Any] = {
        "max_recommended_working_set_size": 7,
        "memory_size": 9,
        "device_name": "M9",
    }
    monkeypatch.setattr(mx, "device_info", lambda: info)
    assert (device.memory_limit_bytes(), device.name()) == (7, "M9")
    info.pop("max_recommended_working_set_size")
    assert device.memory_limit_bytes() == 9
    monkeypatch.setattr(mx, "get_active_memory", lambda: 2)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 1)
    info["free_memory"] = 4
    assert device.memory_limit_bytes() == 7, "another process uses 2"
    assert device.memory_limit_bytes(sharers=3) == 3, "its share"
    info["free_memory"] = 8
    assert device.memory_limit_bytes() == 9
    info.clear()
    monkeypatch.setattr(main_memory, "CGROUP_LIMITS", ())
    machine = device.memory_limit_bytes()
    assert machine > 2**28
    (tmp_path / "memory.max").write_text("12345678\n")
    (tmp_path / "none").write_text("max\n")
    monkeypatch.setattr(
        main_memory,
        "CGROUP_LIMITS",
        (tmp_path / "memory.max", tmp_path / "none", tmp_path / "missing"),
    )
    assert device.memory_limit_bytes() == 12345678


def test_context_lengths() -> None:
    assert context.context_length({"text_config": {"max_position_embeddings": 99}}) == 99
    assert context.context_length({"llm_config": {"max_position_embeddings": 98}}) == 98
    assert context.context_length({"n_positions": 7, "text_config": {}}) == 7
    assert (
        context.context_length(
            {"model_type": "openelm", "max_context_length": 8, "rope_max_length": 16}
        )
        == 8
    )
    assert context.context_length({"model_type": "lille-130m", "block_size": 9}) == 9
    assert context.context_length({"model_type": "mamba2"}) == context.UNBOUNDED_CONTEXT
    odd = {"model_type": "llama", "text_config": {"model_type": ["x"]}}
    assert context.context_length(odd) == context.UNBOUNDED_CONTEXT
    infinite = {"type": "yarn", "factor": float("inf"), "original_max_position_embeddings": 7}
    assert context.context_length({"n_positions": 9, "rope_scaling": infinite}) == 9


def test_every_quantizable_layer_has_its_plain_form() -> None:
    assert {kind.__name__ for kind in precision.PLAIN} >= {"QuantizedLinear", "QuantizedEmbedding"}
    for quantized, plain in precision.PLAIN.items():
        assert type(plain()).__name__ == quantized.__name__.removeprefix("Quantized")


@pytest.mark.parametrize("package", ["mlx_lm", "mlx_vlm"])
def test_packed_experts_of_either_package_become_float32(package: str) -> None:
    """mlx-vlm has copies of mlx-lm's classes."""
    layers = pytest.importorskip(f"{package}.models.switch_layers")
    model = layers.SwitchGLU(64, 128, 4)
    nn.quantize(model, 64, 4)
    x, indices = mx.random.normal((1, 9, 64), key=mx.random.key(1)), mx.array([[[1, 3]] * 9])
    model.eval()
    expected = model(x, indices)
    precision.to_float32(model)
    assert {array.dtype for _, array in tree_flatten(model.parameters())} == {mx.float32}
    assert mx.allclose(model(x, indices), expected, atol=1e-4)


def test_a_sliding_window_of_no_tokens_is_refused(tmp_path: Path) -> None:
    directory = save("gpt_oss", tmp_path / "model")
    edit_config(directory, sliding_window=0)
    with pytest.raises(ModelUnusable, match="a sliding window of 0 tokens"):
        load(Settings(model=str(directory), self_check="off", no_ssd=True), lambda _: None)
