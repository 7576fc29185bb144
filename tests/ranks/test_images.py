"""Images on several ranks: rank 0 encodes, and all ranks answer what one process answers."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.engine.vision.families import VisionModel, checkpoint, load
from tests.engine.vision.test_image_rows import no_image, one_image, prompt_of, two_images
from tests.family_configs import LONG
from tests.image_session import Server
from tests.pictures import one, screenshot
from tests.ranks.image_playing import BLIND
from tests.ranks.launching import run_ranks
from tests.ranks.losses import alive, launched, ranks_of, ready
from tests.test_process import PATIENCE_S, Client, until
from tests.vision_model.asking import CHAT, request
from tests.vision_model.files import DIRECTORY
from tests.vision_model.questions import IMAGE, Message, text_of
from trouper.engine.platform import device
from trouper.engine.vision.encoder import NOT_NUMBERS
from trouper.protocol.media import Pixels
from trouper.system.ports import free_ports

FAMILIES = ("qwen3_vl", "mistral3", *(("qwen3_5",) if LONG else ()))
"""With vectors of inner layers and positions on three axes, and without."""
pytestmark = pytest.mark.skipif(
    not device.is_cpu(), reason="float32 is the reference, and that is for CPUs"
)


def test_two_ranks_answer_what_mlx_vlm_answers(tmp_path: Path) -> None:
    spec, expected = {}, {}
    for name in FAMILIES:
        model = load(name, tmp_path / "whole" / name)
        drawn = [certain(model, make) for make in (two_images, one_image)]
        directory = checkpoint(name, tmp_path / name)
        spec[name] = {"directory": str(directory), "seeds": [seed for seed, _ in drawn]}
        expected[name] = [prompt_of(model, no_image(0)).answer, *(answer for _, answer in drawn)]
    ranks = run_ranks(2, "tests.ranks.image_playing", json.dumps(spec))
    for name in FAMILIES:
        first, second = (rank[name] for rank in ranks)
        assert first["tokens"] == expected[name], name
        assert second["tokens"] == expected[name], name
        assert first["vector_bytes"] == second["vector_bytes"] > 0, name
        assert first["members"] == second["members"] == [0, 1, 2, BLIND]
        assert first["weights"] > second["weights"] == 0, "only rank 0 has an encoder"
        assert second["unencoded"] == [[BLIND, NOT_NUMBERS]]
        assert [item for item, _ in first["unencoded"]] == [BLIND]


def certain(
    model: VisionModel, make: Callable[[int], Sequence[Sequence[int] | Pixels]]
) -> tuple[int, list[int]]:
    """The first seed whose answer no rounding decides, and the answer."""
    for seed in range(20):
        try:
            return seed, prompt_of(model, make(seed)).answer
        except AssertionError:
            continue
    raise AssertionError("no prompt has a certain answer")


@pytest.fixture(scope="module")
def group() -> Iterator[tuple[psutil.Process, Server]]:
    """Two ranks of the model that sees, started by the launcher."""
    [port] = free_ports(1)
    flags = ("--model", str(DIRECTORY), "--no-ssd", "--no-batches", "--decode-stall-ms", "1")
    with launched(port, *flags) as launcher:
        yield launcher, Server(f"http://127.0.0.1:{port}")


def test_answers_are_about_the_images_and_each_is_encoded_once(
    group: tuple[psutil.Process, Server],
) -> None:
    _, server = group
    red, blue = one("circle", "red"), one("circle", "blue")
    assert server.ask(ask("What color is the circle?"), [red]).text == "It is red."
    second = ask("What color is the circle in the second image?", images=2)
    assert server.ask(second, [red, blue]).text == "It is blue."
    again = server.ask(second, [red, blue])
    assert again.text == "It is blue."
    assert again.cached_tokens > again.prompt_tokens / 2
    assert server.ask(second, [blue, red]).text == "It is red."
    assert server.counts() == (2, 2), "each image was decoded and encoded once"


@pytest.mark.parametrize("rank", [1, 0])
@pytest.mark.long
def test_a_rank_killed_while_an_image_is_encoded(
    group: tuple[psutil.Process, Server], rank: int
) -> None:
    launcher, server = group
    decoded, encoded = server.counts()
    before = ranks_of(launcher)
    body = request(CHAT, ask("What is this?"), [screenshot(rank, 3000, 2000)])
    client = Client(int(server.url.rsplit(":", 1)[1]), CHAT, **body)
    until(lambda: server.counts()[0] > decoded)
    assert server.counts()[1] == encoded, "the image is being encoded"
    before[rank].send_signal(signal.SIGKILL)
    client.join(PATIENCE_S)
    if rank:
        assert (client.status, "rank 1" in client.text) == (503, True), client.text
    else:
        assert client.status == 0
    until(lambda: not any(map(alive, before.values())))
    until(lambda: ready(int(server.url.rsplit(":", 1)[1])))
    answer = server.ask(ask("What color is the circle?"), [one("circle", "red")])
    assert answer.text == "It is red.", "the group is back"


def ask(question: str, images: int = 1) -> list[Message]:
    return [{"role": "user", "content": [*[IMAGE] * images, text_of(question)]}]
