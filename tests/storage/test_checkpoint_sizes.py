"""The size of a checkpoint's weights in float32, by its headers alone: that of every form of packed
weights is that of the plain ones."""

from __future__ import annotations

from typing import Any

import pytest

from trouper.storage.checkpoint_files import float32_bytes

ROWS, COLUMNS = 64, 256
PLAIN = 4 * ROWS * COLUMNS
BYTES = {"I32": 4, "U32": 4, "BF16": 2, "F16": 2, "U8": 1, "I64": 8, "F8_E4M3": 1, "F32": 4}
Json = dict[str, Any]


def tensors(**shapes: tuple[str, tuple[int, ...]]) -> Json:
    """Headers of these tensors, by the ends of their names."""
    found: Json = {}
    at = 0
    for name, (dtype, shape) in shapes.items():
        end = at + BYTES[dtype]
        for size in shape:
            end = at + (end - at) * size
        found[f"model.layers.0.{name.replace('__', '.')}"] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [at, end],
        }
        at = end
    return found


COMPRESSED: Json = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def compressed(bits: int) -> Json:
    return {
        "quantization_config": COMPRESSED
        | {"config_groups": {"group_0": {"weights": {"num_bits": bits}}}}
    }


CASES: dict[str, tuple[Json, Json]] = {
    "plain": ({}, tensors(q__weight=("BF16", (ROWS, COLUMNS)))),
    "mlx": (
        {"quantization": {"group_size": 32, "bits": 4}},
        tensors(
            q__weight=("U32", (ROWS, COLUMNS // 8)),
            q__scales=("BF16", (ROWS, 8)),
            q__biases=("BF16", (ROWS, 8)),
        ),
    ),
    "mlx, a layer of its own": (
        {
            "quantization": {
                "group_size": 32,
                "bits": 4,
                "model.layers.0.q": {"group_size": 128, "bits": 8},
            }
        },
        tensors(
            q__weight=("U32", (ROWS, COLUMNS // 4)),
            q__scales=("BF16", (ROWS, 2)),
            q__biases=("BF16", (ROWS, 2)),
        ),
    ),
    "awq": (
        {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}},
        tensors(
            q__qweight=("I32", (COLUMNS, ROWS // 8)),
            q__qzeros=("I32", (2, ROWS // 8)),
            q__scales=("F16", (2, ROWS)),
        ),
    ),
    "gptq by channels, of a model that sees": (
        {
            "text_config": {
                "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": -1}
            }
        },
        tensors(q__qweight=("I32", (COLUMNS // 8, ROWS)), q__scales=("F16", (1, ROWS))),
    ),
    "compressed-tensors": (
        compressed(4),
        tensors(
            q__weight_packed=("I32", (ROWS, COLUMNS // 8)), q__weight_scale=("BF16", (ROWS, 8))
        ),
    ),
    "compressed-tensors of 8 bits": (
        compressed(8),
        tensors(
            q__weight_packed=("I32", (ROWS, COLUMNS // 4)), q__weight_scale=("BF16", (ROWS, 1))
        ),
    ),
    "nvfp4": (
        compressed(4),
        tensors(
            q__weight_packed=("U8", (ROWS, COLUMNS // 2)), q__weight_scale=("F8_E4M3", (ROWS, 16))
        ),
    ),
    "mxfp4 of gpt-oss": (
        {"quantization_config": {"quant_method": "mxfp4"}},
        tensors(mlp__up_proj_blocks=("U8", (ROWS, 8, 16)), mlp__up_proj_scales=("U8", (ROWS, 8))),
    ),
}


@pytest.mark.parametrize("form", CASES)
def test_packed_weights_are_as_large_as_plain_ones(form: str) -> None:
    config, headers = CASES[form]
    assert float32_bytes(headers, config) == PLAIN


@pytest.mark.parametrize(
    "odd", [None, [], {"bits": None}, {"config_groups": {"a": 1}}, {"config_groups": {"a": {}}}]
)
def test_odd_configs_are_no_fault(odd: object) -> None:
    headers = tensors(q__qweight=("I32", (COLUMNS, ROWS // 8)), q__scales=("F16", (2, ROWS)))
    assert float32_bytes(headers, {"quantization_config": odd}) == PLAIN
