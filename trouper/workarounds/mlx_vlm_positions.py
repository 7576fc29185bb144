"""mlx-vlm's language models keep the positions of the prompt before.

Fault: with M-RoPE `_position_ids` and `_rope_deltas` of a call stay on the language model
(mlx_vlm/models/glm_ocr/language.py and others), and a later call of other rows is given them.
Seen: mlx-vlm 0.7.10.
Upstream: no report was found in November 2026; mlx-vlm's own generator sets them for each prompt.
Without: GLM-4.xV, Qwen3-Omni, PaddleOCR-VL and others are refused, or run one by one.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from trouper import workarounds


def forget_positions(language_model: Any, rows: int) -> None:
    """Before a pass of `rows` rows without images."""
    if not workarounds.is_active(__name__):
        return
    none = mx.zeros((rows, 1), mx.int32)
    for name, value in (("_position_ids", None), ("_rope_deltas", none)):
        if hasattr(language_model, name):
            setattr(language_model, name, value)
