"""One server with a model that sees and one that does not: requests and batches with images."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.families import save
from tests.pictures import Picture, one, png
from tests.test_process import PATIENCE_S
from tests.vision_model.asking import CHAT, RESPONSES, request
from tests.vision_model.files import DIRECTORY
from tests.vision_model.questions import IMAGE, Message, text_of
from tests.web.batching import ended, output, started, strict
from tests.web.batching import request as line_of

COLORS = ("red", "blue", "green", "yellow")


@contextmanager
def running(directory: Path) -> Iterator[str]:
    """Base URL of a server with the models `sees` and `reads`."""
    text = save("llama", directory / "llama")
    command = [sys.executable, "-m", "trouper", "serve", "--port", "0", "--no-ssd"]
    command += ["--model", str(DIRECTORY), "--model", str(text)]
    command += ["--served-model-name", f"sees={DIRECTORY}", "--served-model-name", f"reads={text}"]
    command += ["--batch-dir", str(directory / "batches")]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "is ready at" in line, (directory / "log").read_text()[-3000:]
        yield "http://127.0.0.1:" + line.rsplit(":", 1)[1].split("/")[0] + "/v1"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with running(tmp_path_factory.mktemp("two models")) as url, strict(url) as client:
        yield client


def body(model: str, path: str, picture: Picture) -> dict[str, Any]:
    return {"model": model, **request(path, question(), [picture])}


def question() -> list[Message]:
    return [{"role": "user", "content": [IMAGE, text_of("What color is the circle?")]}]


def test_requests_of_both_models_at_a_time(client: openai.OpenAI) -> None:
    def ask(model: str, color: str) -> tuple[str, str | None]:
        raw = client.chat.completions.with_raw_response.create(
            **body(model, CHAT, one("circle", color))
        )
        return str(raw.parse().choices[0].message.content), raw.headers.get("x-trouper-ignored")

    pairs = [(model, color) for color in COLORS for model in ("sees", "reads")]
    with ThreadPoolExecutor(len(pairs)) as threads:
        answers = dict(zip(pairs, threads.map(ask, *zip(*pairs, strict=True)), strict=True))
    for color in COLORS:
        assert answers["sees", color] == (f"It is {color}.", None)
        text, ignored = answers["reads", color]
        assert text
        assert ignored is not None
        assert "image" in ignored
    # Known of a model that was loaded.
    models = {model.id: model.model_extra or {} for model in client.models.list()}
    assert models["sees"]["input_modalities"] == ["text", "image"]
    assert models["reads"]["input_modalities"] == ["text"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_batch_of_both_models(client: openai.OpenAI, path: str) -> None:
    lines = [
        line_of(f"{model} {color}", body(model, path, one("circle", color)), path)
        for color in COLORS
        for model in ("sees", "reads")
    ]
    done = ended(client, started(client, lines, path))
    assert (done.status, done.error_file_id) == ("completed", None)
    answers = output(client, done.output_file_id)
    assert len(answers) == len(lines)
    for color in COLORS:
        assert text_in(answers[f"sees {color}"]) == f"It is {color}."
        assert answers[f"reads {color}"]["response"]["status_code"] == 200


def text_in(line: dict[str, Any]) -> str:
    answer = line["response"]["body"]
    if "choices" in answer:
        return str(answer["choices"][0]["message"]["content"])
    [message] = [item for item in answer["output"] if item["type"] == "message"]
    return str(message["content"][0]["text"])


def test_a_batch_with_uploaded_images_and_a_damaged_one(client: openai.OpenAI) -> None:
    file = ("a.png", png(one("circle", "red")))
    good = client.files.create(file=file, purpose="vision").id
    lines = [line_of(name, shown(name, good), RESPONSES) for name in ("first", "second")]
    lines.append(line_of("gone", shown("gone", "file-0123456789"), RESPONSES))
    broken = body("sees", CHAT, one("circle", "red"))
    done = ended(client, started(client, lines, RESPONSES))
    answers = output(client, done.output_file_id)
    errors = output(client, done.error_file_id)
    assert {name: text_in(line) for name, line in answers.items()} == {
        "first": "It is red.",
        "second": "It is red.",
    }
    assert list(errors) == ["gone"]
    assert errors["gone"]["response"]["body"]["error"]["code"] == "file_not_found"
    part = broken["messages"][0]["content"][0]["image_url"]
    part["url"] = part["url"][:-200] + "A" * 200
    damaged = ended(client, started(client, [line_of("damaged", broken)]))
    [line] = output(client, damaged.error_file_id).values()
    assert line["response"]["body"]["error"]["code"] == "image_damaged"


def shown(name: str, file_id: str) -> dict[str, Any]:
    content = [
        {"type": "input_image", "file_id": file_id},
        {"type": "input_text", "text": "What color is the circle?"},
    ]
    item = {"role": "user", "content": content}
    return {"model": "sees", "input": [item], "max_output_tokens": 16, "temperature": 0}
