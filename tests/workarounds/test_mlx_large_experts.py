"""Expert layers that are larger than MLX's kernel for sorted experts reaches."""

from __future__ import annotations

import subprocess
import sys

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.switch_layers import SwitchLinear

from tests.families import build
from trouper.engine.adaptations.adaptation_registry import adapted, original_paths
from trouper.engine.platform import device
from trouper.engine.self_check.tiny import signatures
from trouper.workarounds import mlx_large_experts
from trouper.workarounds.mlx_large_experts import LargeSwitchLinear, has_large_experts

ROWS, EXPERTS, INPUTS, OUTPUTS = 126, 8, 32, 64
TOLERANCE = 2e-2 if device.rounds_factors() else 1e-5
EXPERT_BYTES = 4 * INPUTS * OUTPUTS
MODULES = [
    "mlx_lm.models.switch_layers",
    pytest.param(
        "mlx_vlm.models.switch_layers",
        marks=pytest.mark.skipif(device.runs_cuda_kernels(), reason="the same layer"),
    ),
]


def layer(module: str, *, bias: bool) -> nn.Module:
    mx.random.seed(1)
    kind = pytest.importorskip(module).SwitchLinear
    made: nn.Module = kind(INPUTS, OUTPUTS, EXPERTS, bias=bias)
    if bias:
        made.bias = mx.random.normal(made.bias.shape)
    return made


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("in_range", [1, 3, 4, 7])
@pytest.mark.parametrize("module", MODULES)
def test_each_row_is_multiplied_by_its_expert(
    module: str, in_range: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`in_range`: experts below the limit."""
    monkeypatch.setattr(mlx_large_experts, "LIMIT", in_range * EXPERT_BYTES + 5)
    experts = layer(module, bias=bias)
    assert has_large_experts(experts) == (in_range < EXPERTS - 1)
    # Row-major, as models' rows are: others meet the fault of `mlx_sorted_experts`.
    x = mx.random.normal((ROWS, 1, INPUTS))
    indices = mx.sort(mx.random.randint(0, EXPERTS, (ROWS,)).astype(mx.uint32))
    expected = experts(x, indices)
    for is_sorted in (False, True):
        got = LargeSwitchLinear(experts)(x, indices, sorted_indices=is_sorted)
        assert mx.allclose(got, expected, atol=TOLERANCE)


def test_step_3_7_is_affected_and_smaller_experts_are_not() -> None:
    """Sizes alone: the weights are not made."""
    experts = SwitchLinear(1, 1, 1, bias=False)
    for count, outputs, inputs, affected in (
        (288, 1280, 4096, True),
        (128, 768, 2048, False),
        (2, 2**15, 2**15, True),
    ):
        experts.weight = mx.zeros((count, outputs, inputs), mx.bfloat16)
        assert has_large_experts(experts) is affected


def test_models_with_large_experts_are_changed_on_cuda_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("qwen3_moe", "gpt_oss"):
        model = build(name)
        paths = {path for path, _ in model.named_modules()}
        kinds, expected = signatures(build(name)), model(mx.arange(40)[None])
        monkeypatch.setattr(mlx_large_experts, "LIMIT", 1024)
        monkeypatch.setattr(device, "runs_cuda_kernels", lambda: True)
        for _ in range(2):
            adapted(model)
            assert count(model) == 3 * len(model.layers)
        assert original_paths(model).keys() == paths
        assert signatures(model) == kinds, "a tiny model without such experts has its kinds"
        assert mx.allclose(model(mx.arange(40)[None]), expected, atol=1e-4)
        monkeypatch.undo()
    monkeypatch.setattr(mlx_large_experts, "LIMIT", 1024)
    monkeypatch.setattr(device, "runs_cuda_kernels", lambda: False)
    other = build("qwen3_moe")
    adapted(other)
    assert not count(other)


PROGRAM = """
import mlx.core as mx
zeros, ones = mx.zeros((2, 2**14, 2**15), mx.bfloat16), mx.ones((1, 2**14, 2**15), mx.bfloat16)
experts = mx.concatenate([zeros, ones])
x = mx.ones((126, 1, 2**15), mx.bfloat16)
indices = mx.full((126,), 2, mx.uint32)
product = mx.gather_mm(x, experts.swapaxes(-1, -2), rhs_indices=indices, sorted_indices=True)
print(bool(mx.all(product == 2**15)))
"""


@pytest.mark.skipif(not device.runs_cuda_kernels(), reason="the kernel is CUDA's")
def test_it_is_still_needed() -> None:
    """In a process of its own: after an illegal memory access none can use the device."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=False, capture_output=True, text=True
    )
    assert ended.returncode or ended.stdout.strip() == "False", ended.stderr


def count(model: nn.Module) -> int:
    return sum(isinstance(module, LargeSwitchLinear) for _, module in model.named_modules())
