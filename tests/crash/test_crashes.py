"""A real model that crashes, behind the real command: who is hurt, how often, and what clients with
retries make of it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.crash.playing import (
    CLIENTS,
    STREAMS,
    ask_deadly,
    body,
    client_of,
    crashing,
    play,
    read_all,
    settled,
)
from tests.families import save
from tests.test_process import PATIENCE_S, Client, get


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save("llama", tmp_path_factory.mktemp("crash") / "llama"))


def test_one_prompt_that_crashes_the_model_hurts_nobody_else(model: Path) -> None:
    """Ten clients with retries, streaming or not, beside 16 streams; and the same prompt once more
    at the end."""
    met = play(model)
    assert met.texts == met.wanted, (
        "the streams end whole, with the tokens that they would have had"
    )
    assert len(met.texts) == STREAMS and all(met.texts)
    assert [code for _, code in met.errors] == ["request_crashes_engine"] * (CLIENTS + 1)
    assert {status for status, _ in met.errors} <= {422, None}, (
        "or an error event, where the response had begun"
    )
    assert met.errors[-1][0] == 422, "what is in the quarantine is refused before a response begins"
    assert met.same_process
    assert met.recovery["crashes"] == 2, (
        "once with the others, once alone; however many clients repeat it"
    )
    assert (met.recovery["convicted"], met.recovery["quarantined"], met.recovery["apart"]) == (
        1,
        1,
        False,
    )
    assert met.recovery["refused"] == CLIENTS + 1
    assert met.not_ready_s > 0, "else nothing was looked at"


@pytest.mark.long
def test_a_model_that_bears_no_two_rows_serves_them_one_after_another(model: Path) -> None:
    """Two clients and their retries ended a server of gpt_bigcode. Each of these has the answer
    that it has alone."""
    with (
        crashing(model, "two_rows") as (port, process),
        client_of(port) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        alone = [
            client.completions.create(model="default", **body(place)).choices[0].text
            for place in range(4)
        ]
        assert get(port, "/health")[1]["recovery"]["crashes"] == 0
        readers, futures = read_all(client, pool, 4)
        settled(futures)
        assert [reader.text for reader in readers] == alone
        recovery = get(port, "/health")[1]["recovery"]
        assert recovery["crashes"] >= 2, "the fault was met"
        assert recovery["convicted"] == 0, "alone each of them passes"
        assert process.poll() is None


def test_a_device_that_is_gone_ends_the_server_with_one_line(model: Path) -> None:
    """Nobody is blamed for it: the engine is tried first. What is left is told to the client, and
    to the supervisor."""
    with crashing(model, "gone") as (port, process):
        asked = Client(port, prompt="a b c d", max_tokens=4)
        assert process.wait(PATIENCE_S) == 70
        asked.join(PATIENCE_S)
        assert process.stderr is not None
        *logged, last = process.stderr.read().strip().splitlines()
        assert last == (
            "trouper: Scheduler+RankMirror+ModelStepper crashed 4 times within 60 s, at last with "
            "Fault: the device"
        )
        assert not any("EndOfChannel" in line or "ExceptionGroup" in line for line in logged)
        if asked.status:  # The connection may have ended with the process.
            assert json.loads(asked.text)["error"]["code"] == "engine_stopped"


@pytest.mark.long
def test_what_is_refused_says_so_to_clients_of_both_kinds(model: Path) -> None:
    with crashing(model, "a_prompt") as (port, process), client_of(port) as client:
        assert ask_deadly(client, stream=False) == (422, "request_crashes_engine")
        with pytest.raises(openai.UnprocessableEntityError, match="the same is refused for"):
            client.completions.create(
                model="default", prompt=[10, 333, 334, 335, 333, 20], max_tokens=20
            )
        assert (
            client.completions.create(model="default", prompt=[10, 20], max_tokens=2)
            .choices[0]
            .text
            is not None
        )
        assert process.poll() is None
