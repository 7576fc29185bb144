"""PNG files of drawn pictures are what Pillow reads."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from tests.pictures import DIGITS, SHAPES, Picture, one, png, screenshot


@pytest.mark.parametrize("picture", [one("7", "red", 50, 31), screenshot(3, 128, 80)])
def test_a_png_has_the_pictures_pixels(picture: Picture) -> None:
    assert np.array_equal(np.array(Image.open(BytesIO(png(picture)))), picture)


def test_each_thing_looks_different() -> None:
    files = {png(one(what, "blue")) for what in SHAPES + DIGITS}
    assert len(files) == len(SHAPES + DIGITS)
