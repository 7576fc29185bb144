"""Models on a device whose kernel of attention reads whole buffers, which are no arrays: those that
compute with keys get arrays, and keep all else. Seen on an H100: gemma2, and all models with latent
attention, ran row by row."""

from __future__ import annotations

import attrs
import pytest

from tests.zoo.building import build
from tests.zoo.catalogue import CONFIGS
from trouper.engine.kv.quantized_kv import PLAIN, KvFormat
from trouper.engine.passes.pass_shapes import ROUNDED
from trouper.engine.self_check.checking import Check
from trouper.protocol.capabilities import SelfCheckMode

SHAPES = attrs.evolve(ROUNDED, length_kernel=True)


@pytest.mark.parametrize("mode", ["fast", "off"])
@pytest.mark.parametrize(
    ("name", "computes"), [("gemma2", True), ("deepseek_v3", True), ("qwen3", False)]
)
def test_models_that_compute_with_keys_lose_banks_alone(
    name: str, computes: bool, mode: SelfCheckMode
) -> None:
    left = Check(build(name), CONFIGS[name], 512, PLAIN, mode, shapes=SHAPES).run().capabilities
    assert bool(left.banks) is computes
    assert (left.batch, left.drafts, left.restore, left.prefill_together) == ("", "", "", "")


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3"])
def test_models_that_compute_with_keys_run_with_quantized_kv(name: str) -> None:
    """They did not start: the check's own row of quantized KV got whole buffers."""
    kv = KvFormat(8, 32)
    left = Check(build(name), CONFIGS[name], 512, kv, "fast", shapes=SHAPES).run().capabilities
    assert left.banks and not left.batch
