"""Layouts of images against transformers' and mlx-vlm's own functions, and their bounds."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.vision_models import CONFIGS, PREPROCESSORS
from tests.engine.vision_models import TOKEN_IDS as FAMILY_TOKEN_IDS
from tests.long_tests import PLAYED
from trouper.engine.loading.image_loading import mrope_sections
from trouper.engine.vision.gemma_layouts import SOFT_TOKENS
from trouper.engine.vision.layouts import (
    FAMILIES,
    Layout,
    PixtralLayout,
    QwenLayout,
    layout_of,
    read_preprocessor,
)
from trouper.engine.vision.patch_rules import CLIP_MEAN, CLIP_STD, PatchRules
from trouper.protocol.media import (
    BILINEAR,
    Detail,
    ImageLayout,
    ImageShape,
    ImageSize,
    count_positions,
    digest_image,
)
from trouper.storage.model_files import IMAGE_FAMILIES, takes_images

ALL_TOKENS = 10**9
SIZES = 10_000 if PLAYED else 300
TOKEN_IDS = {"<|image_pad|>": 151655, "[IMG]": 10, "[IMG_BREAK]": 12, "[IMG_END]": 13}
QWEN = {
    "model_type": "qwen3_vl",
    "image_token_id": 151655,
    "vision_config": {"depth": 27, "patch_size": 16, "spatial_merge_size": 2},
}
QWEN_PROCESSOR = {
    "size": {"longest_edge": 16_777_216, "shortest_edge": 65_536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
MISTRAL: dict[str, Any] = {
    "model_type": "mistral3",
    "image_token_index": 10,
    "spatial_merge_size": 2,
    "vision_config": {
        "model_type": "pixtral",
        "patch_size": 14,
        "image_size": 1540,
        "num_hidden_layers": 24,
    },
}
MISTRAL_PROCESSOR = {"size": {"longest_edge": 1540}, "patch_size": {"height": 14, "width": 14}}
PIXTRAL = {
    "model_type": "pixtral",
    "vision_config": {"model_type": "pixtral", "patch_size": 16, "image_size": 1024},
}


def qwen(**processor: Any) -> QwenLayout:
    layout = layout_of(QWEN, QWEN_PROCESSOR | processor, TOKEN_IDS)
    assert isinstance(layout, QwenLayout)
    return layout


def mistral() -> PixtralLayout:
    layout = layout_of(MISTRAL, MISTRAL_PROCESSOR, TOKEN_IDS)
    assert isinstance(layout, PixtralLayout)
    return layout


LAYOUTS: dict[str, ImageLayout] = {
    "qwen": qwen(),
    "qwen_small": qwen(min_pixels=1, max_pixels=2**18),
    "mistral": mistral(),
    "pixtral": layout_of(PIXTRAL, {}, TOKEN_IDS),
}


def sizes(count: int, seed: int = 0) -> Iterator[tuple[int, int]]:
    """Heights and widths: all kinds of small ones, screens, photos and stripes."""
    random = Random(seed)
    for _ in range(count):
        longest = int(2 ** random.uniform(0, 14))
        ratio = random.choice((1.0, 4 / 3, 16 / 9, random.uniform(1, 200)))
        shorter = max(1, round(longest / ratio))
        if longest > 200 * shorter:
            continue
        yield random.choice(((longest, shorter), (shorter, longest)))


def shape_of(
    layout: ImageLayout, height: int, width: int, max_tokens: int = ALL_TOKENS
) -> ImageShape:
    return layout.shape(ImageSize(width, height, "png"), "auto", max_tokens)


# -- sizes as others compute them ----------------------------------------------------------------


def transformers(module: str) -> Any:
    return importlib.import_module(f"transformers.models.{module}")


@pytest.mark.parametrize(
    ("processor", "bounds"),
    [
        ({}, (65_536, 16_777_216)),
        ({"min_pixels": 3136, "max_pixels": 1_003_520}, (3136, 1_003_520)),
    ],
    ids=["published", "small"],
)
def test_qwens_sizes_are_those_of_transformers(
    processor: dict[str, int], bounds: tuple[int, int]
) -> None:
    layout = qwen(**processor)
    resize = transformers("qwen2_vl.image_processing_pil_qwen2_vl").smart_resize
    for height, width in sizes(SIZES):
        resized = resize(height, width, 32, *bounds)
        shape = shape_of(layout, height, width)
        assert shape.resized == resized, (height, width)
        assert shape.grid == (1, resized[0] // 32, resized[1] // 32)


def test_qwens_number_of_tokens_is_that_of_transformers_processor() -> None:
    module = transformers("qwen2_vl.image_processing_pil_qwen2_vl")
    processor = module.Qwen2VLImageProcessorPil(**QWEN_PROCESSOR)
    for height, width in sizes(SIZES):
        patches = processor.get_number_of_image_patches(height, width)
        assert qwen().num_tokens(shape_of(qwen(), height, width)) == patches // 4


@pytest.mark.parametrize(("name", "edge", "side"), [("mistral", 1540, 28), ("pixtral", 1024, 16)])
def test_pixtrals_sizes_are_those_of_transformers(name: str, edge: int, side: int) -> None:
    module = transformers("pixtral.image_processing_pil_pixtral")
    for height, width in sizes(SIZES):
        image = np.broadcast_to(np.uint8(0), (3, height, width))
        resized = module.get_resize_output_image_size(image, (edge, edge), (side, side))
        if min(resized) < side:  # transformers makes an image without pixels.
            continue
        shape = shape_of(LAYOUTS[name], height, width)
        assert shape.resized == resized, (height, width)
        assert shape.grid == (1, resized[0] // side, resized[1] // side)


@pytest.mark.long
def test_sizes_are_those_of_mlx_vlm() -> None:
    qwens = importlib.import_module("mlx_vlm.models.qwen3_vl.processing_qwen3_vl")
    processor = qwens.Qwen3VLImageProcessor(min_pixels=65_536, max_pixels=16_777_216)
    pixtrals = importlib.import_module("mlx_vlm.models.pixtral.image_processing_pixtral")
    for height, width in sizes(SIZES, seed=1):
        shape = shape_of(qwen(), height, width)
        assert qwen().num_tokens(shape) == processor.num_image_tokens(height, width)
        resized = pixtrals.get_resize_output_image_size((height, width), 1540, 28)
        assert shape_of(mistral(), height, width).resized == resized or min(resized) < 28


GEMMA3: dict[str, Any] = {
    "model_type": "gemma3",
    "vision_config": {"image_size": 896, "patch_size": 14, "num_hidden_layers": 27},
    "boi_token_index": 255_999,
    "eoi_token_index": 256_000,
    "image_token_index": 262_144,
    "mm_tokens_per_image": 256,
}
GEMMA4: dict[str, Any] = {
    "model_type": "gemma4",
    "vision_config": {"patch_size": 16, "pooling_kernel_size": 3, "num_hidden_layers": 27},
    "text_config": {"use_bidirectional_attention": "vision"},
    "boi_token_id": 255_999,
    "eoi_token_id": 258_882,
    "image_token_id": 258_880,
}


@pytest.mark.parametrize("soft_tokens", SOFT_TOKENS)
def test_gemma_4s_sizes_are_those_of_transformers(soft_tokens: int) -> None:
    layout = layout_of(GEMMA4, {"max_soft_tokens": soft_tokens}, {})
    resize = transformers("gemma4.image_processing_pil_gemma4").get_aspect_ratio_preserving_size
    for height, width in sizes(SIZES):
        resized = resize(height, width, 16, soft_tokens * 9, 3)
        shape = shape_of(layout, height, width)
        assert shape.resized == resized, (height, width)
        assert shape.grid == (1, resized[0] // 48, resized[1] // 48)


def test_a_limit_lets_gemma_4_take_the_next_lower_of_its_bounds() -> None:
    layout = layout_of(GEMMA4, {"max_soft_tokens": 1120}, {})
    size = ImageSize(1000, 800, "png")
    counts = {
        limit: layout.num_tokens(layout.shape(size, "auto", limit)) - 2
        for limit in (4096, 1119, 280, 100)
    }
    assert counts == {4096: 1073, 1119: 546, 280: 252, 100: 63}
    assert layout.shape(size, "low", 4096) == layout.shape(size, "auto", 140)
    with pytest.raises(ValueError, match="no room for an image"):
        layout.shape(size, "auto", 69)


@pytest.mark.parametrize("kind", IMAGE_FAMILIES)
def test_lists_of_models_have_families_that_have_a_layout(kind: str) -> None:
    name = kind.replace("-", "_")
    config, processor, token_ids = {**GEMMA3, **GEMMA4, "vision_config": {}}, {}, TOKEN_IDS
    if name in CONFIGS:
        config, processor, token_ids = CONFIGS[name], PREPROCESSORS[name], FAMILY_TOKEN_IDS[name]
    config = config | {"model_type": kind}
    assert takes_images(config)
    layout = layout_of(config, processor, token_ids)
    assert layout.num_pieces(ImageShape((896, 896), (1, 16, 16))) > 0
    assert not takes_images(config | {"model_type": "gemma3n"})


def test_lists_of_models_have_all_families() -> None:
    assert {*IMAGE_FAMILIES, "qwen3_5"} == {*FAMILIES}


def test_an_image_by_another_filter_is_another_image() -> None:
    bicubic, bilinear = (ImageShape((896, 896), (1, 16, 16), resample=number) for number in (3, 2))
    assert digest_image("gemma3", bicubic, b"file") != digest_image("gemma3", bilinear, b"file")


def test_gemma_3_has_one_size() -> None:
    layout = layout_of(GEMMA3, {"size": {"height": 896, "width": 896}}, {})
    for height, width in sizes(100):
        shape = shape_of(layout, height, width)
        assert shape == ImageShape((896, 896), (1, 16, 16), resample=BILINEAR)
    assert layout.num_tokens(shape) == 258
    span = layout.span(7, shape, b"d")
    assert span.tokens == (255_999, *(262_144,) * 256, 256_000)
    assert (span.embedded, span.atomic) == (((1, 256),), True)
    with pytest.raises(ValueError, match="no room for an image"):
        shape_of(layout, 10, 10, 255)


@pytest.mark.parametrize(
    ("kind", "attention", "atomic"),
    [("gemma4", None, False), ("gemma4", "vision", True), ("gemma4_unified", "vision", True)],
)
def test_the_smallest_gemma_4_reads_images_in_order(
    kind: str, attention: str | None, atomic: bool
) -> None:
    text = {"text_config": {"use_bidirectional_attention": attention}}
    layout = layout_of(GEMMA4 | text | {"model_type": kind}, {}, {})
    assert layout.span(0, shape_of(layout, 100, 100), b"d").atomic == atomic
    assert layout.num_pieces(shape_of(layout, 100, 100)) == (28 if kind == "gemma4" else 1)


def test_a_unified_model_whose_config_is_silent_has_atomic_images() -> None:
    layout = layout_of(GEMMA4 | {"model_type": "gemma4_unified", "text_config": {}}, {}, {})
    assert layout.span(0, shape_of(layout, 100, 100), b"d").atomic


@pytest.mark.parametrize(
    ("config", "processor", "reason"),
    [
        (GEMMA3, {"do_pan_and_scan": True}, "cuts long images in parts"),
        (GEMMA3, {"resample": 6}, "a filter that Pillow does not know"),
        (GEMMA3, {"size": {"height": 224}}, "make no grid"),
        (GEMMA3 | {"mm_tokens_per_image": 100}, {}, "make no grid"),
        (GEMMA4 | {"text_config": {"use_bidirectional_attention": "all"}}, {}, "'all' is not"),
    ],
    ids=str,
)
def test_a_gemma_without_a_layout_says_why(
    config: dict[str, Any], processor: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        layout_of(config, processor, {})


def test_known_sizes() -> None:
    assert shape_of(qwen(), 800, 1280) == ImageShape((800, 1280), (1, 25, 40))
    assert shape_of(mistral(), 800, 1280) == ImageShape((812, 1288), (1, 29, 46))
    assert shape_of(mistral(), 3000, 4000) == ImageShape((1176, 1540), (1, 42, 55))


# -- bounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
@given(
    height=st.integers(1, 16_384),
    width=st.integers(1, 16_384),
    detail=st.sampled_from(("auto", "low", "high")),
    max_tokens=st.integers(2, 20_000),
)
def test_an_image_has_tokens_within_the_limit_and_fills_its_grid(
    name: str, height: int, width: int, detail: Detail, max_tokens: int
) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    layout: Any = LAYOUTS[name]
    shape = layout.shape(ImageSize(width, height, "png"), detail, max_tokens)
    frames, rows, columns = shape.grid
    side = layout.patches.token_size
    assert frames == 1
    assert shape.resized == (rows * side, columns * side)
    assert (
        1 <= layout.num_tokens(shape) <= (min(256, max_tokens) if detail == "low" else max_tokens)
    )
    span = layout.span(5, shape, b"d")
    assert len(span.tokens) == layout.num_tokens(shape)
    assert span.num_embedded == rows * columns


@pytest.mark.parametrize("name", ["qwen", "mistral", "pixtral"])
def test_a_limit_keeps_the_ratio_and_wastes_little(name: str) -> None:
    for height, width in ((2160, 3840), (3840, 2160), (4000, 4000), (1000, 8000)):
        shape = shape_of(LAYOUTS[name], height, width, max_tokens=400)
        _, rows, columns = shape.grid
        assert LAYOUTS[name].num_tokens(shape) > 300
        assert 0.75 < (rows / columns) / (height / width) < 1.35


def test_low_detail_is_256_tokens_and_high_is_auto() -> None:
    for layout in LAYOUTS.values():
        size = ImageSize(3000, 2000, "jpeg")
        assert layout.num_tokens(layout.shape(size, "low", 4096)) <= 256
        assert layout.shape(size, "high", 4096) == layout.shape(size, "auto", 4096)


def test_an_image_without_room_is_refused() -> None:
    size = ImageSize(10, 10, "png")
    for layout in LAYOUTS.values():
        with pytest.raises(ValueError, match="no room"):
            layout.shape(size, "auto", 0)
    with pytest.raises(ValueError, match="200 times"):
        qwen().shape(ImageSize(201, 1, "png"), "auto", 100)


def test_a_long_image_never_loses_a_side() -> None:
    shape = shape_of(mistral(), 1, 16_384)
    assert shape == ImageShape((28, 1540), (1, 1, 55))


# -- spans ---------------------------------------------------------------------------------------


def test_the_span_of_qwen_is_a_grid_of_one_token() -> None:
    layout = qwen()
    shape = shape_of(layout, 800, 1280)
    span = layout.span(7, shape, b"digest")
    assert span.tokens == (151655,) * 1000
    assert span.embedded == ((0, 1000),)
    assert (span.start, span.end, span.extent) == (7, 1007, 40)
    assert (span.digest, span.shape) == (b"digest", shape)
    assert count_positions((span,), 1010) == 1010 - 1000 + 40


def test_the_span_of_mistral_has_breaks_and_an_end() -> None:
    layout = mistral()
    span = layout.span(0, ImageShape((56, 84), (1, 2, 3)), b"digest")
    assert span.tokens == (10, 10, 10, 12, 10, 10, 10, 13)
    assert span.embedded == ((0, 3), (4, 3))
    assert span.extent == 8


# -- digests -------------------------------------------------------------------------------------


def test_a_digest_tells_layouts_shapes_and_files_apart() -> None:
    one, other = ImageShape((56, 84), (1, 2, 3)), ImageShape((84, 56), (1, 3, 2))
    digests = [
        digest_image(layout.name, shape, data)
        for layout in LAYOUTS.values()
        if layout.name != LAYOUTS["qwen_small"].name
        for shape in (one, other)
        for data in (b"a", b"b", b"")
    ]
    assert len({*digests}) == len(digests) == 12
    assert {len(digest) for digest in digests} == {32}


def test_the_name_says_how_pixels_become_patches_but_not_the_limits() -> None:
    assert qwen().name == qwen(max_pixels=10**6).name
    assert qwen().name != qwen(image_mean=[0.4, 0.5, 0.5]).name


# -- checkpoints ---------------------------------------------------------------------------------


def test_qwens_parameters_are_read() -> None:
    layout = qwen(image_mean=[0.1, 0.2, 0.3], rescale_factor=0.25)
    rules = PatchRules((0.1, 0.2, 0.3), (0.5, 0.5, 0.5), 0.25, 16, 2, temporal_patch_size=2)
    assert layout.patches == rules
    assert (layout.encoder_layers, layout.marker) == (27, "<|image_pad|>")
    shape = ImageShape((512, 1024), (1, 16, 32))
    assert layout.num_pieces(shape) == 1 + 27
    assert attrs.evolve(layout, piece_patches=1000).num_pieces(shape) == 1 + 3 * 27
    assert (layout.min_pixels, layout.max_pixels) == (65_536, 16_777_216)


def test_mistrals_parameters_are_read() -> None:
    layout = mistral()
    assert layout.patches == PatchRules(CLIP_MEAN, CLIP_STD, 1 / 255, 14, 2)
    assert (layout.encoder_layers, layout.marker, layout.longest_edge) == (24, "[IMG]", 1540)


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_what_the_files_lack_is_as_published(kind: str) -> None:
    config: dict[str, Any] = {"model_type": kind, "vision_config": {}, "image_token_id": 5}
    assert layout_of(config, {}, {}) == attrs.evolve(qwen(), image_token=5)
    bare = {"model_type": "mistral3", "vision_config": {"model_type": "pixtral"}}
    assert layout_of(bare, {}, TOKEN_IDS) == mistral()


def test_switches_of_the_processor_are_followed() -> None:
    rules = qwen(do_rescale=False, do_normalize=False).patches
    assert (rules.rescale, rules.mean, rules.std) == (1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("config", "processor", "reason"),
    [
        ({"model_type": "qwen3_5"}, {}, "config.json has no vision_config"),
        ({"model_type": "aya_vision", "vision_config": {}}, {}, "'aya_vision' are not known yet"),
        ({"model_type": "gemma3n", "vision_config": {}}, {}, "MobileNet-V5, is not known here"),
        ({"model_type": "minicpmv4_6", "vision_config": {}}, {}, "joins patches between two"),
        ({"model_type": "minicpmv", "vision_config": {}}, {}, "transformers has no code of it"),
        (MISTRAL | {"vision_config": {"model_type": "clip"}}, {}, "'mistral3' are not known"),
        (QWEN, {"resample": 2}, "a filter other than bicubic"),
        (QWEN, {"min_pixels": -1}, "min_pixels of the image encoder or processor is no positive"),
        (QWEN, {"image_mean": [0.5]}, "image_mean of the image processor is not made of 3"),
        (QWEN, {"image_std": [0.5, 0.0, 1]}, "image_std of the image processor has a zero"),
        (QWEN | {"vision_config": {"depth": "27"}}, {}, "depth of the image encoder"),
    ],
    ids=str,
)
def test_a_checkpoint_without_a_layout_says_why(
    config: dict[str, Any], processor: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        layout_of(config, processor, TOKEN_IDS)


@pytest.mark.parametrize("missing", ["[IMG_BREAK]", "[IMG_END]"])
def test_a_tokenizer_without_the_tokens_says_which(missing: str) -> None:
    ids = {text: token for text, token in TOKEN_IDS.items() if text != missing}
    with pytest.raises(ValueError, match="the tokenizer has no token"):
        layout_of(MISTRAL, {}, ids)


@pytest.mark.parametrize(
    ("files", "mean"),
    [
        ({}, None),
        ({"preprocessor_config.json": {"image_mean": 1}}, 1),
        ({"processor_config.json": {"image_processor": {"image_mean": 2}}}, 2),
        (
            {
                "preprocessor_config.json": {"image_mean": 1},
                "processor_config.json": {"image_processor": {"image_mean": 2}},
            },
            2,
        ),
        (
            {
                "preprocessor_config.json": {"image_mean": 1},
                "processor_config.json": {"patch_size": 14},
            },
            1,
        ),
    ],
    ids=str,
)
def test_the_newer_file_of_the_processor_rules(
    tmp_path: Path, files: dict[str, Any], mean: int | None
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert read_preprocessor(tmp_path).get("image_mean") == mean


def test_every_layout_is_one_of_the_protocol() -> None:
    layouts: Sequence[Layout] = (qwen(), mistral())
    for layout in layouts:
        as_protocol: ImageLayout = layout
        assert as_protocol.marker


@pytest.mark.parametrize(
    ("family", "vision", "processor"),
    [
        ("llama4", {"pixel_shuffle_ratio": 0}, {}),
        ("llama4", {"pixel_shuffle_ratio": None}, {}),
        ("kimi_vl", {"merge_kernel_size": [[2], [2]]}, {}),
        ("lfm2_vl", {}, {"max_pixels_tolerance": []}),
    ],
)
def test_a_malformed_config_is_a_reason_and_no_crash(
    family: str, vision: dict[str, Any], processor: dict[str, Any]
) -> None:
    """The model then serves text."""
    config = CONFIGS[family] | {"vision_config": CONFIGS[family]["vision_config"] | vision}
    with pytest.raises(ValueError, match=r"malformed"):
        layout_of(config, PREPROCESSORS[family] | processor, FAMILY_TOKEN_IDS[family])


@pytest.mark.parametrize("sections", [5, "4, 2, 2", [4, None, 2]])
def test_malformed_sections_of_mrope_are_a_reason(sections: object) -> None:
    with pytest.raises(ValueError, match=r"mrope_section"):
        mrope_sections({"rope_scaling": {"mrope_section": sections}})
