"""`trouper doctor --for agents`: what an agent needs of a model, each with a remedy, and models
that would do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.cli.test_doctor import device, in_an_empty_folder
from tests.families import save, write_json
from tests.scripted.families import FAMILIES
from trouper import cli
from trouper.cli.agent_checks import CHECKS_FOR_AGENTS
from trouper.engine import probe
from trouper.protocol.suggested_models import SUGGESTED, that_fit

__all__ = ["in_an_empty_folder"]  # A fixture for every test here.
GB = 10**9


def examined(*flags: str) -> dict[str, list[tuple[str, str, str]]]:
    """Level, message and remedy of each subject's findings."""
    outcome = CliRunner().invoke(cli.main, ["doctor", "--for", "agents", "--json", *flags])
    assert outcome.exit_code == 0, outcome.output
    found: dict[str, list[tuple[str, str, str]]] = {}
    for line in json.loads(outcome.stdout):
        found.setdefault(line["subject"], []).append((line["level"], line["said"], line["remedy"]))
    assert list(found) == list(CHECKS_FOR_AGENTS)
    return found


def given_memory(monkeypatch: pytest.MonkeyPatch, memory: int, *, cpu: bool) -> None:
    monkeypatch.setattr(probe, "device_stats", lambda: device(memory_bytes=memory, is_cpu=cpu))


def test_a_model_that_will_not_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given_memory(monkeypatch, 32 * GB, cpu=False)
    found = examined("--model", str(save("llama", tmp_path / "tiny")))
    [(level, message, remedy)] = found["context"]
    assert level == "warn" and "tokens of context" in message and "40,960" in remedy
    remedies = {
        remedy for level, _, remedy in found["template"] + found["parsers"] if level == "warn"
    }
    [largest, *_] = that_fit(0.9 * 32 * GB, float32=False)
    assert largest.weights_bytes > 20 * GB
    assert remedies == {f"trouper serve --model {largest.name}"}, "the largest that fits 29 GB"
    assert [level for level, *_ in found["40k tokens"]] == ["ok"]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
@pytest.mark.long(but=("qwen3_5",))
def test_a_model_that_will_do(family: str, tmp_path: Path) -> None:
    directory = save("llama", tmp_path / "tiny")
    FAMILIES[family].tokenizer(directory)
    config = json.loads((directory / "config.json").read_text("utf-8"))
    write_json(directory / "config.json", config | {"max_position_embeddings": 131_072})
    found = examined("--model", str(directory))
    assert [level for level, *_ in found["context"]] == ["ok"]
    assert ("ok", f"{directory}: the chat template takes tools", "") in found["template"]
    messages = [message for level, message, _ in found["parsers"] if level == "ok"]
    parsers = {"qwen3": "hermes", "qwen3_5": "qwen3_coder"}
    assert any(f"parsed as {parsers[family]} " in message for message in messages)
    assert any("reasoning: parsed as think " in message for message in messages)
    adapted = " ".join(message for _, message, _ in found["template"])
    assert ("later_system" in adapted) == (family == "qwen3_5")
    assert "131,072" in found["context"][0][1]
    if family != "qwen3":
        return  # The context is examined in the same way.
    found = examined("--model", str(directory), "--max-kv-size", "4096")
    assert "4,096" in found["context"][0][1] and found["context"][0][0] == "warn"


@pytest.mark.parametrize("cpu", [True, False])
def test_what_is_suggested_fits(cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = str(save("llama", tmp_path / "tiny"))
    for memory in (1, 17, 30, 1000):
        given_memory(monkeypatch, memory * GB, cpu=cpu)
        found = examined("--model", tiny)["suggested"]
        fits = [message.split(":")[0] for _, message, _ in found if message.endswith(": fits")]
        room = 0.9 * memory * GB
        assert fits == [
            one.name for one in reversed(SUGGESTED) if one.needed_bytes(float32=cpu) <= room
        ]
        others = " ".join(message for _, message, _ in found if message.startswith("too large"))
        assert all((one.name in others) != (one.name in fits) for one in SUGGESTED)


def test_without_room_for_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given_memory(monkeypatch, GB, cpu=True)
    monkeypatch.setattr(
        probe,
        "fit",
        lambda _: probe.Fit(
            architecture="x",
            weights_bytes=GB // 2,
            token_bytes=10**5,
            kind="generator",
            encodes=False,
        ),
    )
    found = examined("--model", str(save("llama", tmp_path / "tiny")))
    [(level, message, remedy)] = found["40k tokens"]
    assert level == "warn" and message.endswith("900.0 MB may be used") and "--kv-bits 8" in remedy
    assert "more memory" in remedy


def test_a_model_without_a_template_fails(tmp_path: Path) -> None:
    directory = save("llama", tmp_path / "tiny")
    config = json.loads((directory / "tokenizer_config.json").read_text("utf-8"))
    write_json(
        directory / "tokenizer_config.json",
        {k: v for k, v in config.items() if k != "chat_template"},
    )
    outcome = CliRunner().invoke(
        cli.main, ["doctor", "--for", "agents", "--json", "--model", str(directory)]
    )
    assert outcome.exit_code == 1
    assert "no chat template" in outcome.stdout


def test_a_template_that_is_broken_fails(tmp_path: Path) -> None:
    directory = save("llama", tmp_path / "tiny")
    config = json.loads((directory / "tokenizer_config.json").read_text("utf-8"))
    write_json(
        directory / "tokenizer_config.json",
        {**config, "chat_template": "{% for m in messages %}{{ m }"},
    )
    outcome = CliRunner().invoke(
        cli.main, ["doctor", "--for", "agents", "--json", "--model", str(directory)]
    )
    assert outcome.exit_code == 1
    assert "the chat template does not render a question (unexpected '}')" in outcome.stdout


def test_a_model_that_is_not_here_is_named_and_others_are_suggested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "is_here", lambda _: False)
    outcome = CliRunner().invoke(
        cli.main, ["doctor", "--for", "agents", "--json", "--model", "some/model"]
    )
    found = json.loads(outcome.stdout)
    assert outcome.exit_code == 0
    assert "some/model is not here yet" in {line["said"] for line in found}
    assert {line["subject"] for line in found} == {"memory", "model", "suggested"}
