"""Sizes of resized images by transformers' own functions, for families whose functions need torch.

`python3 tests/engine/layout_references.py OUTDIR` needs numpy, torch and transformers, and writes
OUTDIR/layout_references.json, whose home is beside this file: the first rows of 10,000 sizes of
each family, and the SHA-256 of all. `test_tile_layouts.py` computes the same rows by Trouper's
layouts.
"""

# ruff: noqa: T201
from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import MagicMock

FILE = "layout_references.json"
SIZES = 10_000
KEPT = 300
Row = Sequence[int]


def sizes() -> Iterator[tuple[int, int]]:
    """Heights and widths: all kinds of small ones, screens, photos and stripes."""
    random = Random(57)
    for _ in range(SIZES):
        longest = int(2 ** random.uniform(0, 14))
        ratio = random.choice((1.0, 4 / 3, 16 / 9, 2.0, random.uniform(1, 200)))
        shorter = max(1, round(longest / ratio))
        yield random.choice(((longest, shorter), (shorter, longest)))


def digest_of(rows: Sequence[Row]) -> str:
    return hashlib.sha256(json.dumps([list(row) for row in rows]).encode()).hexdigest()


def read_references() -> dict[str, Any]:
    path = Path(__file__).with_name(FILE)
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _module(name: str) -> Any:
    return importlib.import_module(f"transformers.models.{name}.image_processing_{name}")


def _kimi(patches: int, side: int) -> Callable[[int, int], Row]:
    """Height and width of the image, then with its black edges."""
    module = _module("kimi_k25")

    def row(height: int, width: int) -> Row:
        scaled, resized = module.navit_resize(height, width, 14, 2, patches, side)
        return (*scaled, *resized)

    return row


def _lfm() -> Callable[[int, int], Row]:
    """Columns and rows of tiles (0: one view alone), height and width of the view."""
    module = _module("lfm2_vl")
    processor = object.__new__(module.Lfm2VlImageProcessor)
    bounds = {"encoder_patch_size": 16, "downsample_factor": 2, "max_image_tokens": 256}

    def row(height: int, width: int) -> Row:
        new_width, new_height = processor.smart_resize(height, width, min_image_tokens=64, **bounds)
        if not processor._is_image_too_large(height, width, max_pixels_tolerance=2.0, **bounds):
            return 0, 0, new_height, new_width
        columns, rows, *_ = processor._get_grid_layout(height, width, 2, 10, 512)
        return columns, rows, new_height, new_width

    return row


def _llama() -> Callable[[int, int], Row]:
    """Height and width of the canvas, and of the image in it."""
    import torch  # type: ignore[import-not-found]
    from transformers.image_utils import SizeDict

    module = _module("llama4")
    canvases = torch.tensor(module.find_supported_resolutions(16, SizeDict(height=336, width=336)))

    def row(height: int, width: int) -> Row:
        canvas = module.get_best_fit((height, width), canvases).tolist()
        bounds = [
            min(max(each, 336), limit) for each, limit in zip((height, width), canvas, strict=True)
        ]
        scaled = module.get_max_res_without_distortion((height, width), bounds)
        return (*canvas, *(max(int(each), 1) for each in scaled))

    return row


def _stand_in_for_torchvision() -> None:
    """transformers' modules import it for pixels, of which there are none here."""
    inner = ("transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional")
    for name in ("torchvision", *(f"torchvision.{name}" for name in (*inner, "io"))):
        stand_in = MagicMock()
        stand_in.__path__ = []
        stand_in.__spec__ = ModuleSpec(name, None)
        stand_in.__version__ = "0.30"
        sys.modules[name] = stand_in


def main(out: Path) -> None:
    _stand_in_for_torchvision()
    families = {
        "kimi_k25": _kimi(16_384, 512),
        "kimi_vl": _kimi(4096, 510),
        "lfm2_vl": _lfm(),
        "llama4": _llama(),
    }
    content = {}
    for name, row in families.items():
        rows = [list(row(*size)) for size in sizes()]
        content[name] = {"digest": digest_of(rows), "rows": rows[:KEPT]}
        print(f"{name}: {len(rows)} sizes")
    out.mkdir(parents=True, exist_ok=True)
    (out / FILE).write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python3 tests/engine/layout_references.py OUTDIR")
    main(Path(sys.argv[1]))
