"""What a step of an encoder takes, by formula, covers what it is measured to take."""

from __future__ import annotations

import gc
from typing import Any

import attrs
import mlx.core as mx
import pytest

from tests.engine.vision.families import FAMILIES, GEMMA, TOKEN_IDS, picture
from tests.engine.vision_models import CONFIGS
from tests.engine.vision_models import TOKEN_IDS as FAMILY_TOKEN_IDS
from trouper.engine.platform import device
from trouper.engine.vision.encoder import Encoding
from trouper.engine.vision.layouts import Layout, layout_of
from trouper.engine.vision.qwen_tower import QwenTower
from trouper.engine.vision.step_memory import encoder_step_bytes
from trouper.engine.vision.tower import Heads, Rotation
from trouper.engine.vision.towers import make_tower
from trouper.protocol.media import ImageSize, Pixels

SIDE = 96
"""Pixels; 576 patches of 4 x 4."""
WIDE = {
    "qwen3_vl": {"hidden_size": 96, "intermediate_size": 360, "depth": 2},
    "mistral3": {
        "hidden_size": 96,
        "head_dim": 48,
        "intermediate_size": 360,
        "num_hidden_layers": 2,
    },
    "gemma3": {"hidden_size": 96, "intermediate_size": 360, "num_hidden_layers": 2},
    "gemma4_small": {
        "hidden_size": 96,
        "head_dim": 48,
        "intermediate_size": 360,
        "num_hidden_layers": 2,
    },
    "gemma4_unified": {"mm_embed_dim": 96},
    "qwen2_5_vl": {"hidden_size": 96, "intermediate_size": 360, "depth": 2},
    "kimi_k25": {"vt_hidden_size": 96, "vt_intermediate_size": 360, "vt_num_hidden_layers": 2},
    "smolvlm": {"hidden_size": 96, "intermediate_size": 360, "num_hidden_layers": 2},
    "llama4": {"hidden_size": 96, "intermediate_size": 384, "num_hidden_layers": 2},
    "internvl": {"hidden_size": 96, "intermediate_size": 360, "num_hidden_layers": 2},
}
TILE = 48
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"max_pixels": SIDE**2},
    "kimi_k25": {"in_patch_limit": 576},
    "smolvlm": {"size": {"longest_edge": SIDE}},
    "llama4": {"max_patches": 4},
    "internvl": {"max_patches": 4},
}
"""Of families whose configs are those of `vision_models`."""


def encoder(name: str) -> tuple[Any, Layout, dict[str, Any]]:
    """A tower, its layout and its config."""
    if name in PROCESSORS:
        vision = CONFIGS[name]["vision_config"] | WIDE[name] | {"image_size": TILE}
        config = CONFIGS[name] | {"vision_config": vision}
        layout = layout_of(config, PROCESSORS[name], FAMILY_TOKEN_IDS[name])
        return make_tower(config, layout)[0], layout, vision
    of_family = (FAMILIES | GEMMA)[name]
    vision = of_family["vision_config"] | WIDE[name] | {"image_size": SIDE}
    config = of_family | {"vision_config": vision, "mm_tokens_per_image": (SIDE // 8) ** 2}
    size = {"shortest_edge": 64, "longest_edge": SIDE**2 if name == "qwen3_vl" else SIDE}
    layout = layout_of(config, {"size": size, "max_soft_tokens": 140}, TOKEN_IDS)
    return make_tower(config, layout)[0], layout, vision


@pytest.mark.skipif(
    not device.is_cpu(),
    reason="in float32 a GPU holds two more arrays of scores, up to 64 MB; in 16 bits none",
)
@pytest.mark.parametrize("pieces", [1, 999])
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("piece_patches", [0, 64])
def test_the_formula_covers_the_peak(
    name: str, pieces: int, piece_patches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trouper.engine.vision.step_memory.MAX_SCORE_BYTES", 576**2 * 2 * 4)
    tower, layout, vision = encoder(name)
    mx.eval(tower.parameters())
    gc.collect()  # What other tests left would be freed meanwhile.
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    shape = layout.shape(ImageSize(SIDE, SIDE, "png"), "high", 4096)
    pixels = Pixels.of(shape, (bytes(range(256)) * 256)[: shape.num_bytes])
    # How much is held at once depends on the threads, too: once 188 of usually 957 kB.
    for _ in range(3):
        encoding = Encoding(tower, pixels, piece_patches)
        while encoding.advance(pieces) is None:
            pass
    peak = mx.get_peak_memory() - before
    layout = attrs.evolve(layout, piece_patches=piece_patches)
    formula = encoder_step_bytes(vision, layout, 4096, 4)
    assert formula / 4 < peak < formula


def test_a_layer_is_computed_before_the_next_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU would hold the arrays of all layers: 7 GB for 16,384 patches."""
    tower, _, vision = encoder("qwen3_vl")
    mx.eval(tower.parameters())
    held: list[int] = []
    project_heads = QwenTower.project_heads

    def noting(tower: QwenTower, index: int, hidden: mx.array, rotation: Rotation) -> Heads:
        held.append(mx.get_active_memory())
        return project_heads(tower, index, hidden, rotation)

    monkeypatch.setattr(QwenTower, "project_heads", noting)
    before = mx.get_active_memory()
    assert Encoding(tower, picture(SIDE, SIDE, 1)).advance(999) is not None
    assert min(held) - before >= 4 * 576 * vision["hidden_size"]
