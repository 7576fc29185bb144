"""Rows of models whose weights stay quantized: alone, together, joined and restored they are
mlx-lm's own.

The engine makes float32 of weights on a CPU; here they stay packed, and `quantized_matmul`
computes. The bound is that of float32: whatever the kernel, a product of a packed weight is the
same number, and kernels for one row and for several may differ in the order of their sums only.
Those are of some hundred terms here, each right to 2**-24: through four layers that came to at most
2.4e-5 in a log-probability. MLX's kernel for CPUs takes row by row, so that 120 of 150 plays
differed by nothing at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest

from tests.arithmetic import cpu_only, full_float32, skip_if_routed
from tests.family_configs import EVERY
from tests.zoo.building import build
from tests.zoo.catalogue import CONFIGS
from tests.zoo.mixes import BOUND, alone_mix, restored_mix, short_mix, together_mix
from tests.zoo.playing import Play, alone, distance, log_probabilities
from tests.zoo.quantizing import FORMATS, any_unpacked, packed, quantized

NAMES = (
    "deepseek_v3",
    "gemma2",
    "gemma3_text",
    "glm_moe_dsa",
    "gpt_bigcode",
    "gpt_oss",
    "lfm2",
    "llama with dynamic rope",
    "llama with tied embeddings",
    "mamba2",
    "mixtral",
    "phi3",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
)


def some_pairs(names: Sequence[str], kinds: Sequence[str], each: int) -> list[tuple[str, str]]:
    """Each name with so many of the kinds, in turns; with all of them in the long version."""
    most = len(kinds) if EVERY else each
    return [
        (name, kinds[(place + more) % len(kinds)])
        for place, name in enumerate(names)
        for more in range(most)
    ]


@pytest.mark.parametrize(("name", "kind"), some_pairs(NAMES, tuple(FORMATS), 2))
@pytest.mark.long(but=("gpt_oss-*", "deepseek_v3-*", "lfm2-*", "gemma3_text-mxfp4"))
def test_alone_together_joined_and_restored(name: str, kind: str) -> None:
    skip_if_routed(CONFIGS[name])
    model = quantized(name, kind)
    for mix in (alone_mix, short_mix):
        play = Play(model)
        try:
            mix(play)
            error = play.error()
        except RuntimeError as failed:
            if "No implementation for problem shape" in str(failed):
                pytest.skip("MLX has no kernel for so narrow a product on this device")
            raise
        assert error <= BOUND
    assert packed(model) >= (1 if any_unpacked(model) else 5), "the weights stay packed"


@cpu_only
@pytest.mark.parametrize(
    ("name", "kind"),
    some_pairs(
        ("gemma3_text", "gpt_oss", "llama", "mamba2", "qwen3_moe", "qwen3_next"),
        ("4 bits in groups of 32", "mxfp4", "nvfp4"),
        1,
    ),
)
@pytest.mark.long(but=("llama-*", "qwen3_moe-*"))
def test_in_bfloat16_rows_are_rounded_alike(name: str, kind: str) -> None:
    """As checkpoints come. A CPU's kernels take row by row, so that company changes no rounding;
    drafts may, since a row that runs several tokens is computed by other kernels, and some models
    have another formula for it."""
    model = quantized(name, kind, mx.bfloat16)
    for mix in (together_mix, restored_mix):
        play = Play(model)
        mix(play)
        assert play.error() <= BOUND


@full_float32
def test_the_comparison_can_fail() -> None:
    """The formats differ from each other, and from plain weights, by far more than the bound."""
    tokens = list(range(1, 40))
    models = [build("llama"), *(quantized("llama", kind) for kind in FORMATS)]
    answers = [log_probabilities(alone(model, tokens, [39])) for model in models]
    for place, one in enumerate(answers):
        assert all(distance(one, other) > 5 * BOUND for other in answers[:place])
