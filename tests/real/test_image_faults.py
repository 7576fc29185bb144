"""What is made wrong on purpose is turned off by its name, and the rest answers rightly.

The fault stays: where a feature is off, nothing leads to it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

from tests.real.image_faults import FAULTS
from tests.real.test_images import BLUE, ONE, RED, SEVEN, TWO, answer_to, serving, user
from tests.vision_model.asking import CHAT, request
from tests.vision_model.questions import IMAGE, NO_IMAGE
from tests.web.serving import Served, exchange, get, post
from trouper.engine.self_check import starting

QUESTION = user("What color is the circle?")


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.long(
    but=(
        "delta ignored",
        "encoder sliced wrongly",
        "images swapped*",
        "restored rows*",
        "drafts at*",
    )
)
async def test_a_planted_fault_turns_off_its_feature(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plant, feature = FAULTS[name]
    monkeypatch.setattr(starting, "results_file", lambda: tmp_path / "self-checks.json")
    plant(monkeypatch)
    async with serving(speculation="auto") as served:
        _, _, data = await exchange(served, get("/health"))
        health = json.loads(data)
        assert list(health["self_check"]["off"]) == [feature], health["self_check"]
        assert (await answer_to(served, CHAT, [QUESTION])).text == NO_IMAGE
        if feature == "images":
            status, headers, _ = await exchange(served, post(CHAT, request(CHAT, ONE, [RED])))
            assert status == 200, "a placeholder stands for the image"
            assert "image" in headers["x-trouper-ignored"]
            assert health["images"]["reason"] == health["self_check"]["off"]["images"]
        else:
            assert health["images"]["reason"] == ""
            await answer_about_images(served)


async def answer_about_images(served: Served) -> None:
    """In company, again from the cache, and behind an answer."""
    cases = [
        (ONE, [RED], "It is red."),
        (TWO, [RED, BLUE], "It is blue."),
        (TWO, [BLUE, RED], "It is red."),
        ([user(IMAGE, "Which digit do you see?")], [SEVEN], "It is a 7."),
    ]
    for _ in range(2):
        answers: dict[int, str] = {}

        async def answer(index: int) -> None:
            messages, pictures, _ = cases[index]
            heard = await answer_to(served, CHAT, messages, *pictures)
            answers[index] = heard.text  # noqa: B023 - awaited within the turn

        async with trio.open_nursery() as nursery:
            for index in range(len(cases)):
                nursery.start_soon(answer, index)
        assert [answers[index] for index in range(len(cases))] == [right for *_, right in cases]
    later = [*TWO, {"role": "assistant", "content": "It is blue."}]
    later.append(user("What color is the circle in the first image?"))
    assert (await answer_to(served, CHAT, later, RED, BLUE)).text == "It is red."
