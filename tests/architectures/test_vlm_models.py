"""Text parts of mlx-vlm's models answer as mlx-vlm's own language model does, side by side in one
batch."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from tests.architectures.vlm_configs import CONFIGS, REFUSED, SERVED, own_loop, save, whole
from tests.families import prompts
from tests.real.serving import ask, running
from tests.zoo.vlm_catalogue import config_of
from tests.zoo.vlm_playing import build
from trouper import Generate, Settings, TokenPrompt
from trouper.engine.architectures.vlm_models import text_classes
from trouper.engine.loading.config_translation import translate
from trouper.engine.loading.model_loading import load
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.sampling import Sampling

PROMPTS = prompts((5, 37, 60))
TOKENS = 12


def wish(number: int) -> Generate:
    return Generate(
        request_id=str(number),
        prompt=TokenPrompt(tuple(PROMPTS[number])),
        max_tokens=TOKENS,
        ignore_eos=True,
        sampling=Sampling(temperature=0),
    )


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.long(but=("internvl_chat", "molmo"))
async def test_rows_of_a_batch_say_what_mlx_vlm_says(name: str, tmp_path: Path) -> None:
    model = whole(name)
    async with running(str(save(model, name, tmp_path))) as runtime:
        assert runtime.model.architecture == CONFIGS[name]["model_type"]
        # InternVL's text is one of mlx-lm's models.
        package = "mlx-lm" if name == "internvl_chat" else "mlx-vlm"
        assert runtime.model.architecture_source == f"{package} {version(package)}"
        assert runtime.model.capabilities.off == {}, (
            "rows share passes, prefixes and banks, and draft"
        )
        heard = await ask(runtime, *map(wish, range(len(PROMPTS))))
    assert [list(each.tokens) for each in heard] == [
        own_loop(model, prompt, TOKENS) for prompt in PROMPTS
    ]


def test_an_image_token_in_a_text_is_a_token() -> None:
    """MiniCPM-V 4.7's own code raises, as it would for an image without a grid."""
    tokens = mx.array([[5, 500, 501, 9]])
    models = (
        build("minicpmv4_7", image_token_id=image, video_token_id=501)[0] for image in (500, 40)
    )
    one, other = (model(tokens, cache=model.make_cache()) for model in models)
    assert mx.array_equal(one, other)


@pytest.mark.parametrize("name", ["glm_ocr", "phi4_siglip"])
def test_a_module_may_take_no_keys_but_its_own(name: str) -> None:
    config = config_of(name)
    model_class, args_class = text_classes(config)
    assert model_class(args_class.from_dict(config | translate(config, args_class)))


@pytest.mark.parametrize("step_size", [16, 2048])
async def test_long_rope_has_its_long_factors_at_each_length(
    step_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However prompts are cut into passes, whoever is beside them, and after a hit."""
    long = [3.0 + index for index in range(8)]
    usual = CONFIGS["k2_horizon"]

    models = []
    for short in (long, [1.0] * 8):
        scaling = {
            "type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": 40,
        }
        monkeypatch.setitem(CONFIGS, "k2_horizon", {**usual, "rope_scaling": scaling})
        models.append(whole("k2_horizon", 1))
    only_long, model = models
    saved = save(model, "k2_horizon", tmp_path)
    async with running(str(saved), prefill_step_size=step_size) as runtime:
        for _ in range(2):
            heard = await ask(runtime, *map(wish, range(len(PROMPTS))))
            assert [list(each.tokens) for each in heard] == [
                own_loop(only_long, prompt, TOKENS) for prompt in PROMPTS
            ]


def test_weights_may_have_the_names_of_the_hub_and_those_of_the_encoder_are_not_kept(
    tmp_path: Path,
) -> None:
    """Idefics3's checkpoints name its parts otherwise than mlx-vlm: its own `sanitize` says how."""
    model = whole("idefics3")
    directory = save(model, "idefics3", tmp_path)
    names = {
        name: "lm_head.weight"
        if name == "language_model.lm_head.weight"
        else f"model.{name.replace('language_model', 'text_model')}"
        for name, _ in tree_flatten(model.parameters())
    }
    hub = {names[name]: array for name, array in tree_flatten(model.parameters())}
    mx.save_safetensors(str(directory / "model.safetensors"), hub, {"format": "pt"})
    loaded = load(Settings(model=str(directory), no_ssd=True), lambda line: None)
    kept = dict(tree_flatten(loaded.model.parameters()))
    expected = dict(tree_flatten(model.language_model.parameters()))
    assert kept.keys() == {f"language_model.{name}" for name in expected}
    assert all(
        bool(mx.array_equal(kept[f"language_model.{name}"], array))
        for name, array in expected.items()
    )


def test_a_quantized_checkpoint(tmp_path: Path) -> None:
    """Weights are packed under the paths that mlx-vlm's converter writes."""
    from mlx import nn

    model = whole("k2_horizon")
    nn.quantize(model.language_model, group_size=32, bits=8)
    directory = save(model, "k2_horizon", tmp_path)
    config = directory / "config.json"
    config.write_text(
        config.read_text().replace("{", '{"quantization": {"group_size": 32, "bits": 8}, ', 1)
    )
    loaded = load(Settings(model=str(directory), no_ssd=True), lambda line: None)
    prompt = PROMPTS[0]
    ours, theirs = loaded.model(mx.array([prompt])), model.language_model(mx.array([prompt])).logits
    assert float(mx.max(mx.abs(ours - theirs)).item()) < 1e-3  # type: ignore[arg-type]


def test_a_model_whose_prompts_see_their_end_is_refused(tmp_path: Path) -> None:
    directory = save(whole(REFUSED), REFUSED, tmp_path)
    with pytest.raises(ModelUnusable, match="gives other logits for a prompt in chunks"):
        load(Settings(model=str(directory), no_ssd=True), lambda line: None)


def test_a_module_without_text_is_named(tmp_path: Path) -> None:
    directory = save(whole("k2_horizon"), "k2_horizon", tmp_path)
    config = directory / "config.json"
    config.write_text(config.read_text().replace("k2_horizon", "dinov2"))
    with pytest.raises(ModelUnusable, match="mlx-vlm's module for model_type 'dinov2' "):
        load(Settings(model=str(directory), no_ssd=True), lambda line: None)
