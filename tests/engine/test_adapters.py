"""Rows of several LoRA adapters in one batch say what each adapter says alone, fused into the model
by mlx-lm itself."""

from __future__ import annotations

import json
import math
import random
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, cast

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.lora import LoRALinear

from tests.adapters import Form, flags, fused, layers_of, save_adapter
from tests.arithmetic import cpu_only
from tests.engine.driver import Driver, Request
from tests.engine.test_drafts import foretelling
from tests.families import build, prompts, reference, save
from tests.family_configs import VOCABULARY
from trouper.engine.adaptations.adaptation_registry import adapted
from trouper.engine.adapters_at_run_time import adding
from trouper.engine.kv.model_caches import guess_batching
from trouper.engine.loading.adapter_files import find_adapter, read_adapter
from trouper.engine.loading.adapter_loading import load_adapters, require_applied
from trouper.engine.loading.model_loading import EvaluatedModel, load, measured
from trouper.engine.lora.lora_layers import (
    LoraLinear,
    LowRank,
    adapted_layers,
    install,
    layers_not_reached,
    stacked_bytes,
)
from trouper.engine.lora.row_adapters import CurrentAdapters, RowAdapters
from trouper.engine.platform import device
from trouper.engine.step import StepEngine
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.settings import Settings
from trouper.workarounds.mlx_single_groups import WRONG_ON

FAMILIES = ["llama", "qwen3", "gemma3_text", "qwen3_5"]
NAMES = ("one", "two", "three")
TOKENS = 12
PROMPTS = prompts((3, 17, 40, 70))


@attrs.frozen
class Made:
    base: Path
    adapters: tuple[Path, ...]
    loaded: EvaluatedModel


@cache
def made(family: str) -> Made:
    """A model with three adapters of different ranks, whose files PEFT wrote for one of them."""
    directory = Path(mkdtemp())
    base, model = save(family, directory / "base"), build(family)
    for number, name in enumerate(NAMES):
        save_adapter(model, directory / name, number, rank=number + 2)
    peft = save_adapter(model, directory / "peft" / "two", 1, form="peft", rank=3)
    given = (directory / "one", peft, directory / "three")
    settings = Settings(model=str(base), adapter=flags(given), no_ssd=True, self_check="off")
    return Made(base, tuple(directory / name for name in NAMES), load(settings, lambda _: None))


@cache
def said_alone(family: str, adapter: int | None) -> list[list[int]]:
    """What each prompt is answered by the fused model."""
    setup = made(family)
    model = fused(setup.base, None if adapter is None else setup.adapters[adapter])
    return [reference(model, prompt, TOKENS) for prompt in PROMPTS]


def engine_of(family: str, **more: Any) -> StepEngine:
    loaded = made(family).loaded
    return StepEngine(
        loaded.model, VOCABULARY, capabilities=loaded.card.capabilities, adapters=NAMES, **more
    )


def mixed() -> list[Request]:
    """Each prompt, with each adapter and without."""
    names = ("", *NAMES)
    return [
        Request(prompt, TOKENS, adapter=names[(index + index // 4) % 4])
        for index, prompt in enumerate([*PROMPTS, *PROMPTS, *PROMPTS])
    ]


def expected(family: str, requests: list[Request]) -> list[list[int]]:
    return [
        said_alone(family, NAMES.index(request.adapter) if request.adapter else None)[
            index % len(PROMPTS)
        ]
        for index, request in enumerate(requests)
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.long(but=("llama", "qwen3_5"))
def test_mixed_rows_say_what_each_adapter_says_alone(family: str) -> None:
    requests = [attrs.evolve(request, join=index % 5) for index, request in enumerate(mixed())]
    rows = Driver(engine_of(family), 16).play(requests)
    wanted = expected(family, requests)
    assert [row.tokens for row in rows] == wanted
    assert len({tuple(answer) for answer in wanted}) > len(wanted) // 2, (
        "adapters change what is said"
    )


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_drafts_change_nothing(family: str) -> None:
    """Also where a state takes back what wrong drafts have added: the repeated layers have their
    rows' adapters, too. Drafts of a prompt are what its last row says, so those of rows with other
    adapters are wrong."""
    requests = [attrs.evolve(request, drafts=True) for request in mixed()]
    wanted = expected(family, requests)
    drafting = foretelling([*zip(requests, wanted, strict=True)], random.Random(1), 3)
    driver = Driver(engine_of(family, drafting=drafting), 16, allow=lambda _: 3)
    rows = driver.play(requests)
    assert (
        0
        < sum(right for _, _, right in driver.drafted)
        < sum(tokens for _, tokens, _ in driver.drafted)
    )
    assert [row.tokens[:TOKENS] for row in rows] == wanted


PACKED = {"affine": (32, 8), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}


def quantized(mode: str) -> nn.Module:
    model = build("llama")
    nn.quantize(model, *PACKED[mode], mode=mode)
    return model


@pytest.mark.parametrize("mode", PACKED)
@pytest.mark.long(but=("affine", "mxfp4"))
def test_quantized_layers(mode: str) -> None:
    """Their adapters are not quantized: compared with mlx-lm's own LoRA layers, since fusing would
    quantize the sum again. Scales of 8 bits once made matrices of 8-bit integers, which are
    zeros."""
    dice, model, other = np.random.RandomState(5), quantized(mode), quantized(mode)
    parts = {
        path: LowRank(
            *(
                mx.array(part).astype(mx.bfloat16)
                for part in (dice.randn(inputs, 4) / inputs**0.5, dice.randn(4, outputs) * 0.2)
            )
        )
        for path, (inputs, outputs) in layers_of(model).items()
    }
    install(model, [parts])
    modules = dict(other.named_modules())
    layers = []
    for path, part in parts.items():
        layer = LoRALinear.from_base(modules[path], r=4, scale=1.0)
        layer.lora_a, layer.lora_b = part.a.astype(mx.float32), part.b.astype(mx.float32)
        layers.append((path, layer))
    plain = [reference(quantized(mode), prompt, TOKENS) for prompt in PROMPTS]
    other.update_modules(tree_unflatten(layers))
    other.eval()
    adapted = [reference(other, prompt, TOKENS) for prompt in PROMPTS]
    engine = StepEngine(model, VOCABULARY, adapters=["one"])
    requests = [Request(prompt, TOKENS, adapter=name) for prompt in PROMPTS for name in ("one", "")]
    answers = [row.tokens for row in Driver(engine, 16).play(requests)]
    assert answers[::2] == adapted
    assert answers[1::2] == plain
    assert plain != adapted


def test_a_layer_that_is_unpacked_keeps_its_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Hopper, where MLX multiplies by packed layers of one group wrongly."""
    monkeypatch.setattr(device, "architecture", lambda: WRONG_ON)
    model = nn.Sequential(nn.Linear(64, 32).to_quantized(64, 4))
    install(model, [{"layers.0": LowRank(mx.ones((64, 2)), mx.ones((2, 32)))}])
    layer = model.layers[0]
    adapted(model)
    assert type(model.layers[0]) is LoraLinear
    assert model.layers[0].adapters is layer.adapters


def test_a_traced_pass_gets_indices_as_input() -> None:
    current, rows = CurrentAdapters(), np.array([1, 1], np.int32)
    assert RowAdapters(current, rows).single == 1
    gathered = RowAdapters(current, rows, gathered=True)
    assert gathered.single is None
    x, a, b = mx.ones((2, 1, 4)), mx.arange(24).reshape(3, 4, 2) * 0.1, mx.ones((3, 2, 5))
    traced = mx.compile(lambda indices: gathered.traced(indices).product(x, a, b))
    for indices in ([1, 2], [2, 0]):
        wanted = mx.stack([x[row] @ a[index] @ b[index] for row, index in enumerate(indices)])
        assert mx.allclose(traced(mx.array(indices, mx.uint32)), wanted)


@pytest.mark.parametrize(("rows", "width"), [((2, 1), 70), ((1, 1), 1), ((2, 2), 3), ((0, 1), 1)])
def test_matrices_are_copied_where_gathered_products_fail(
    rows: tuple[int, int], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA."""
    monkeypatch.setattr(device, "runs_cuda_kernels", lambda: True)
    monkeypatch.setattr(mx, "gather_mm", None)
    x, a, b = (
        mx.random.normal((2, width, 4)),
        mx.random.normal((3, 4, 8)),
        mx.random.normal((3, 8, 5)),
    )
    product = RowAdapters(CurrentAdapters(), np.array(rows, np.int32)).product(x, a, b)
    wanted = mx.stack([part @ a[row] @ b[row] for part, row in zip(x, rows, strict=True)])
    assert mx.allclose(product, wanted, atol=1e-5)


def test_ranks_are_padded_to_what_gathered_products_read_at_a_time() -> None:
    layer = nn.Sequential(nn.Linear(64, 32))
    install(
        layer, [{"layers.0": LowRank(mx.ones((64, rank)), mx.ones((rank, 32)))} for rank in (5, 2)]
    )
    [adapted] = adapted_layers(layer).values()
    assert (adapted.adapters.a.shape, adapted.adapters.b.shape, adapted.adapters.ranks) == (
        (3, 64, 8),
        (3, 8, 32),
        (5, 2),
    )
    assert stacked_bytes(adapted, 2, 5) == adapted.adapters.nbytes


def test_memory_of_adapters_counts() -> None:
    model = build("llama")
    setup = made("llama")
    assert setup.loaded.card.weights_bytes > sum(
        array.nbytes for _, array in tree_flatten(model.parameters())
    )
    assert [card.rank for card in setup.loaded.card.adapters] == [2, 3, 4]
    assert len({card.fingerprint for card in setup.loaded.card.adapters}) == 3


@cpu_only  # Elsewhere the estimate takes the weights for numbers of 16 bits, as nearly all are.
def test_adapters_that_do_not_fit_beside_the_weights_are_refused_before_these_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = made("llama")
    card, settings = (
        setup.loaded.card,
        Settings(
            model=str(setup.base), adapter=flags(setup.adapters), no_ssd=True, self_check="off"
        ),
    )
    assert (
        measured(settings).weights_bytes
        - measured(attrs.evolve(settings, adapter=())).weights_bytes
        == card.adapter_bytes
        > 0
    )
    monkeypatch.setattr(device, "memory_limit_bytes", lambda _: card.weights_bytes)
    assert load(settings, lambda _: None).card.weights_bytes == card.weights_bytes
    monkeypatch.setattr(device, "memory_limit_bytes", lambda _: card.weights_bytes - 1)
    monkeypatch.setattr("trouper.engine.loading.model_loading.evaluate", None)
    with pytest.raises(ModelUnusable, match="for its weights and adapters, and"):
        load(settings, lambda _: None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "bias all"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save replaces lm_head"),
        ({"modules_to_save": True}, "modules_to_save replaces True"),
        ({"peft_type": "IA3"}, "IA3 is no LoRA"),
        (
            {"init_lora_weights": "pissa_niter_16"},
            "init_lora_weights pissa_niter_16 changes the model's own weights",
        ),
        ({"init_lora_weights": "olora"}, "init_lora_weights olora"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights loftq"),
        ({"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        (
            {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
            r"target_parameters \(mlp.experts.gate_up_proj, mlp.experts.down_proj\).*; merge it",
        ),
        ({"trainable_token_indices": {"embed_tokens": [3]}}, "trainable_token_indices"),
    ],
)
def test_what_is_no_plain_lora_is_refused_by_name(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    directory = save_adapter(build("llama"), tmp_path / "it", 1, form="peft")
    config = directory / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(ModelUnusable, match=message):
        find_adapter("it", str(directory))


def test_an_adapter_of_experts_is_refused_as_such(tmp_path: Path) -> None:
    """PEFT adapts each expert where transformers has them as layers; mlx-lm joins them."""
    model = build("qwen3_moe")
    directory = save_adapter(model, tmp_path / "it", 1, form="peft")
    path = directory / "adapter_model.safetensors"
    name = "base_model.model.model.layers.0.mlp.experts.1.gate_proj.lora_{}.weight"
    mx.save_safetensors(str(path), {name.format(side): mx.ones((4, 4)) for side in "AB"})
    with pytest.raises(ModelUnusable, match=r"experts.1.gate_proj is of experts.*; merge it"):
        read_adapter(find_adapter("it", str(directory)), model)


@pytest.mark.parametrize("kind", [True, "gaussian", "eva", None])
def test_how_a_plain_lora_began_is_no_matter(kind: object, tmp_path: Path) -> None:
    directory = save_adapter(build("llama"), tmp_path / "it", 1, form="peft")
    config = directory / "adapter_config.json"
    unset = {"alora_invocation_tokens": None, "layer_replication": None}  # As PEFT writes them.
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"init_lora_weights": kind} | unset)
    )
    assert find_adapter("it", str(directory)).is_peft


@pytest.mark.parametrize(
    "change",
    [
        {"alpha_pattern": ["x"]},
        {"alpha_pattern": {"*": 1}},
        {"lora_alpha": "x"},
        {"lora_alpha": 10**400},
        {"lora_alpha": None},
        {"lora_alpha": {}},
    ],
    ids=["list", "pattern", "text", "huge", "null", "object"],
)
def test_what_gives_no_scale_is_that_adapters_fault(change: dict[str, Any], tmp_path: Path) -> None:
    """Found by review: anything but `ModelUnusable` ended the other models, too."""
    model = build("llama")
    directory = save_adapter(model, tmp_path / "it", 1, form="peft")
    config = directory / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(ModelUnusable, match=r"--adapter it=.*gives no scale"):
        read_adapter(find_adapter("it", str(directory)), model)


def test_adapters_without_memory_are_unusable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("[metal::malloc] Unable to allocate")

    model = build("llama")
    found = find_adapter("it", str(save_adapter(model, tmp_path / "it", 1)))
    monkeypatch.setattr("trouper.engine.loading.adapter_loading.install", full)
    with pytest.raises(ModelUnusable, match=r"given its adapters: .*Unable to allocate"):
        load_adapters([found], [read_adapter(found, model)], model, lambda _: None)


@pytest.mark.parametrize("form", ["peft", "mlx"])
def test_what_adds_nothing_may_be_of_layers_that_are_not_called_or_not_there(
    form: Form, tmp_path: Path
) -> None:
    """Families that share keys and values have projections in their checkpoints that no pass runs,
    and PEFT adapts them, too."""
    model = build("gemma3n")
    found = find_adapter("it", str(save_adapter(model, tmp_path / "it", 1, form=form)))
    parts = read_adapter(found, model)
    install(model, [parts])
    idle, capabilities = layers_not_reached(model, 2), guess_batching(model)
    assert idle and all("k_proj" in path or "v_proj" in path for path in idle)
    with pytest.raises(ModelUnusable, match="does not call its layer"):
        require_applied(model, capabilities, None)
    weights = dict(cast(dict[str, mx.array], mx.load(str(found.weights))))
    of_idle = [name for name in weights if any(f"{path}.lora_" in name for path in idle)]
    weights |= {name: mx.zeros_like(weights[name]) for name in of_idle if "lora_b" in name.lower()}
    gone = {name.replace(".layers.", ".layers.9"): weights[name] for name in of_idle}
    mx.save_safetensors(str(found.weights), weights | gone)
    model = build("gemma3n")
    load_adapters([found], [read_adapter(found, model)], model, lambda _: None)
    require_applied(model, capabilities, None)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_adapter_whose_training_diverged_is_refused(value: float, tmp_path: Path) -> None:
    """Rows that share a bank with one of its rows, or had its slot afterwards, said something
    else."""
    model = build("llama")
    directory = save_adapter(model, tmp_path / "it", 1)
    weights = dict(cast(dict[str, mx.array], mx.load(str(directory / "adapters.safetensors"))))
    name = next(name for name in weights if name.endswith("lora_b"))
    weights[name][0, 0] = value
    mx.save_safetensors(str(directory / "adapters.safetensors"), weights)
    found = find_adapter("it", str(directory))
    with pytest.raises(ModelUnusable, match=r"--adapter it=.*has values that are not finite"):
        load_adapters([found], [read_adapter(found, model)], model, lambda _: None)
    with pytest.raises(ModelUnusable, match="not finite"):
        list(adding(model, [], found, lambda: None))
    assert not adapted_layers(model)


def test_a_truncated_adapter_is_refused_by_name(tmp_path: Path) -> None:
    model = build("llama")
    directory = save_adapter(model, tmp_path / "it", 1)
    weights = directory / "adapters.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelUnusable, match=r"--adapter it=.*is truncated"):
        find_adapter("it", str(directory))


def test_another_models_adapter_is_refused(tmp_path: Path) -> None:
    found = find_adapter("it", str(save_adapter(build("llama"), tmp_path / "it", 1)))
    with pytest.raises(ModelUnusable, match=r"has no layer|outputs of"):
        read_adapter(found, build("qwen3_moe"))
    with pytest.raises(ModelUnusable, match="has no adapter; give the directory"):
        find_adapter("it", str(tmp_path))


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    model = build("qwen3_moe")
    path = next(
        path for path, layer in model.named_modules() if type(layer).__name__ == "SwitchLinear"
    )
    directory = save_adapter(model, tmp_path / "it", 1)
    weights = {f"{path}.lora_a": mx.zeros((2, 4, 8)), f"{path}.lora_b": mx.zeros((2, 8, 4))}
    mx.save_safetensors(str(directory / "adapters.safetensors"), weights)
    with pytest.raises(ModelUnusable, match="is a SwitchLinear, and only linear layers"):
        read_adapter(find_adapter("it", str(directory)), model)
