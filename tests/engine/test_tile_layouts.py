"""Layouts with tiles, and those that fill images up, against transformers' own functions
(`layout_references.py`); and their bounds."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.layout_references import KEPT, digest_of, read_references, sizes
from tests.long_tests import PLAYED
from trouper.engine.vision.layouts import Layout, QwenLayout, layout_of
from trouper.engine.vision.tile_layouts import IdeficsLayout
from trouper.protocol.media import Detail, ImageShape, ImageSize, digest_image

ALL_TOKENS = 10**9
NAMES = range(1, 11)
MARKS = (
    "<|image_pad|>",
    "<|media_pad|>",
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "Ċ",
    "ĊĊ",
    *(f"<row_{row}_col_{column}>" for row in NAMES for column in NAMES),
    "<|image_start|>",
    "<|image_end|>",
    "<|img_thumbnail|>",
    *(f"<|img_row_{row}_col_{column}|>" for row in NAMES for column in NAMES),
    "<|image|>",
    "<|patch|>",
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
)
TOKEN_IDS = {mark: 1000 + index for index, mark in enumerate(MARKS)}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"vision_config": {"depth": 32, "patch_size": 14}},
    "qwen2_5_vl": {"vision_config": {"depth": 32, "patch_size": 14}},
    "glm4v": {"vision_config": {"depth": 24, "patch_size": 14}},
    "kimi_vl": {"vision_config": {"model_type": "moonvit", "patch_size": 14}},
    "kimi_k25": {"vision_config": {"patch_size": 14}},
    "idefics3": {"vision_config": {"image_size": 364, "patch_size": 14}, "scale_factor": 2},
    "smolvlm": {"vision_config": {"image_size": 512, "patch_size": 16}, "scale_factor": 4},
    "smolvlm2": {"vision_config": {"image_size": 384, "patch_size": 14}, "scale_factor": 3},
    "lfm2_vl": {"vision_config": {"patch_size": 16}},
    "llama4": {"vision_config": {"image_size": 336, "patch_size": 14}},
}


def layout(name: str, processor: dict[str, Any] | None = None) -> Layout:
    config = {"model_type": name.removesuffix("2") if "smol" in name else name, **CONFIGS[name]}
    return layout_of(config, processor or {}, TOKEN_IDS)


LAYOUTS = {name: layout(name) for name in CONFIGS}
every_family = pytest.mark.parametrize("name", CONFIGS)


def shape_of(name: str, height: int, width: int, max_tokens: int = ALL_TOKENS) -> ImageShape:
    return LAYOUTS[name].shape(ImageSize(width, height, "png"), "auto", max_tokens)


# -- sizes as transformers computes them ---------------------------------------------------------


def rows_of(name: str, chosen: Iterable[tuple[int, int]]) -> list[list[int]]:
    rows = []
    for height, width in chosen:
        shape = shape_of(name, height, width)
        if name == "lfm2_vl":
            tiles = (0, 0) if shape.overview is None else shape.tiles[::-1]
            rows.append([*tiles, *(shape.overview or shape.resized)])
        elif name == "llama4":
            rows.append([*shape.resized, *(shape.scaled or shape.resized)])
        else:
            rows.append([*(shape.scaled or shape.resized), *shape.resized])
    return rows


@pytest.mark.parametrize("name", ["kimi_vl", "kimi_k25", "lfm2_vl", "llama4"])
def test_sizes_are_those_of_transformers(name: str) -> None:
    reference, all_sizes = read_references()[name], list(sizes())
    assert rows_of(name, all_sizes[:KEPT]) == reference["rows"]
    if PLAYED:
        assert digest_of(rows_of(name, all_sizes)) == reference["digest"]


def test_older_qwens_sizes_are_those_of_transformers() -> None:
    module = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    for height, width in list(sizes())[: None if PLAYED else KEPT]:
        if max(height, width) > 200 * min(height, width):
            continue
        resized = module.smart_resize(height, width, 28, 3136, 12_845_056)
        assert shape_of("qwen2_vl", height, width).resized == resized
        assert shape_of("qwen2_5_vl", height, width).resized == resized


def test_glms_sizes_and_tokens_are_those_of_transformers() -> None:
    module = importlib.import_module("transformers.models.glm4v.image_processing_pil_glm4v")
    processor = module.Glm4vImageProcessorPil()
    for height, width in list(sizes())[: None if PLAYED else KEPT]:
        if max(height, width) > 200 * min(height, width):
            continue
        resized = module.smart_resize(2, height, width, 2, 28, 12_544, 28**2 * 15_000)
        shape = shape_of("glm4v", height, width)
        assert shape.resized == resized, (height, width)
        patches = processor.get_number_of_image_patches(height, width)
        assert LAYOUTS["glm4v"].num_tokens(shape) == patches // 4


@pytest.mark.parametrize(
    ("name", "tile", "edge"), [("idefics3", 364, 1456), ("smolvlm", 512, 2048)]
)
def test_tiles_of_idefics_are_those_of_transformers(name: str, tile: int, edge: int) -> None:
    family, kind = ("idefics3", "Idefics3") if name == "idefics3" else ("smolvlm", "SmolVLM")
    module = importlib.import_module(f"transformers.models.{family}.image_processing_pil_{family}")
    resize = module.get_resize_output_image_size

    class Sizes(getattr(module, f"{kind}ImageProcessorPil")):  # type: ignore[misc]
        """Images without pixels."""

        def resize(self, image: Any, size: Any, **_: Any) -> Any:
            return np.broadcast_to(np.uint8(0), (3, size.height, size.width))

    processor = Sizes()
    for height, width in list(sizes())[: None if PLAYED else KEPT]:
        image = np.broadcast_to(np.uint8(0), (3, height, width))
        image = np.broadcast_to(np.uint8(0), (3, *resize(image, edge)))
        image = processor.resize_for_vision_encoder(image, tile)
        frames, rows, columns = processor.split_images(image, {"longest_edge": tile})
        shape = shape_of(name, height, width)
        assert shape.tiles == (rows, columns), (height, width)
        assert shape.resized == image.shape[1:]
        assert len(frames) == rows * columns + 1


def test_spans_of_smolvlm_are_those_of_its_processor() -> None:
    processing = importlib.import_module("transformers.models.smolvlm.processing_smolvlm")
    for height, width in ((100, 100), (1000, 3000), (3000, 400)):
        shape = shape_of("smolvlm", height, width)
        text = processing.get_image_prompt_string(
            *shape.tiles, 64, "<fake_token_around_image>", "<image>", "<global-img>"
        )
        text = text.replace("\n\n", "ĊĊ").replace("\n", "Ċ")
        tokens = []
        while text:
            # The longest mark first: two newlines are one token.
            mark = max(filter(text.startswith, MARKS), key=len)
            tokens.append(TOKEN_IDS[mark])
            text = text.removeprefix(mark)
        assert list(LAYOUTS["smolvlm"].span(0, shape, b"").tokens) == tokens


def names_of(name: str, shape: ImageShape) -> list[str]:
    """The span's tokens, runs of embedded ones by their number."""
    span = LAYOUTS[name].span(3, shape, b"")
    marks = {index: mark for mark, index in TOKEN_IDS.items()}
    runs = dict(span.embedded)
    named, at = list[str](), 0
    while at < len(span.tokens):
        named.append(str(runs[at]) if at in runs else marks[span.tokens[at]])
        at += runs.get(at, 1)
    return named


def test_the_span_of_lfm_names_its_tiles() -> None:
    assert names_of("lfm2_vl", shape_of("lfm2_vl", 300, 400)) == [
        "<|image_start|>",
        "108",
        "<|image_end|>",
    ]
    assert names_of("lfm2_vl", shape_of("lfm2_vl", 530, 1060)) == [
        "<|image_start|>",
        "<|img_row_1_col_1|>",
        "256",
        "<|img_row_1_col_2|>",
        "256",
        "<|img_thumbnail|>",
        "242",
        "<|image_end|>",
    ]


def test_the_span_of_llama_separates_its_tiles() -> None:
    assert names_of("llama4", shape_of("llama4", 300, 336)) == [
        "<|image_start|>",
        "<|image|>",
        "144",
        "<|image_end|>",
    ]
    assert names_of("llama4", shape_of("llama4", 600, 672)) == [
        "<|image_start|>",
        *("144", "<|tile_x_separator|>", "144", "<|tile_y_separator|>") * 2,
        "<|image|>",
        "144",
        "<|image_end|>",
    ]


# -- bounds --------------------------------------------------------------------------------------


@every_family
@given(
    height=st.integers(1, 16_384),
    width=st.integers(1, 16_384),
    detail=st.sampled_from(("auto", "low", "high")),
    max_tokens=st.integers(300, 20_000),
)
def test_an_image_has_tokens_within_the_limit(
    name: str, height: int, width: int, detail: Detail, max_tokens: int
) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    family: Any = LAYOUTS[name]
    shape = family.shape(ImageSize(width, height, "png"), detail, max_tokens)
    limit = min(256, max_tokens) if detail == "low" else max_tokens
    assert 1 <= family.num_tokens(shape) <= limit
    span = family.span(5, shape, b"d")
    assert len(span.tokens) == family.num_tokens(shape)
    patches = family.patches.count_patches(shape)
    assert span.num_embedded == patches // family.patches.merge_size**2
    if shape.scaled is not None:
        assert all(0 < part <= all_ for part, all_ in zip(shape.scaled, shape.resized, strict=True))
    if not isinstance(family, QwenLayout):
        assert span.extent == len(span.tokens)


@every_family
def test_an_image_without_room_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no room"):
        LAYOUTS[name].shape(ImageSize(10, 10, "png"), "auto", 0)


@every_family
def test_a_lower_limit_makes_fewer_tiles_or_pixels(name: str) -> None:
    counts = [
        LAYOUTS[name].num_tokens(shape_of(name, 2000, 3000, limit)) for limit in (256, 700, 4096)
    ]
    assert 0 < counts[0] <= 256
    assert counts[0] <= counts[1] <= 700 < counts[2]


def test_digests_tell_tiles_apart() -> None:
    one = ImageShape((28, 28), (1, 1, 1), scaled=(20, 28))
    shapes = (ImageShape((28, 28), (1, 1, 1)), one, ImageShape((28, 28), (1, 1, 1), scaled=(28, 9)))
    assert len({digest_image("navit", shape, b"data") for shape in shapes}) == 3


# -- checkpoints ---------------------------------------------------------------------------------


def test_parameters_of_a_checkpoint_rule() -> None:
    uncut = layout("smolvlm", {"do_image_splitting": False})
    assert isinstance(uncut, IdeficsLayout)
    shape = uncut.shape(ImageSize(3000, 2000, "png"), "auto", 4096)
    assert (shape.resized, shape.tiles, shape.overview) == ((512, 512), (1, 1), None)
    smaller = layout("smolvlm", {"size": {"longest_edge": 1024}, "resample": 3})
    shape = smaller.shape(ImageSize(3000, 2000, "png"), "auto", 4096)
    assert (shape.tiles, shape.resample) == ((2, 2), 3)
    few = layout("lfm2_vl", {"max_tiles": 3})
    assert few.shape(ImageSize(4000, 1000, "png"), "auto", 4096).tiles == (1, 3)
    for name, number in (("kimi_k25", 2), ("kimi_vl", 3)):
        shape = layout(name, {"resample": 2}).shape(ImageSize(100, 100, "png"), "auto", 4096)
        assert shape.resample == number, "Kimi-VL's own processor has no choice"
    newer = layout("kimi_k25", {"media_proc_cfg": {"in_patch_limit": 400}})
    assert newer.num_tokens(newer.shape(ImageSize(4000, 4000, "png"), "auto", 4096)) <= 121


@pytest.mark.parametrize(
    ("name", "processor", "reason"),
    [
        ("kimi_vl", {"pad_input": False}, "cuts the edges"),
        ("smolvlm", {"max_image_size": {"longest_edge": 384}}, "is not that of the encoder"),
        ("lfm2_vl", {"use_thumbnail": False}, "no overview"),
        ("lfm2_vl", {"tile_size": 100}, "not made of whole tokens"),
        ("llama4", {"resize_to_max_canvas": True}, "enlarges images"),
        ("llama4", {"resample": 9}, "filter that Pillow does not know"),
        ("kimi_k25", {"resample": 9}, "filter that Pillow does not know"),
    ],
)
def test_a_checkpoint_that_differs_says_why(
    name: str, processor: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        layout(name, processor)
