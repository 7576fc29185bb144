"""The comparison of servers: models whose answers do not end, rounds that do not count, peers whose
environment nobody named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import peers, throughput


def test_an_endless_copy_ends_at_the_rarest_token_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "eos_token_id": [0, 2]})
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    )
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {"<s>": 0, "rare": 3, "</s>": 2, "a": 1}}})
    )
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with peers.endless_copy(tmp_path) as copy:
        assert json.loads((copy / "config.json").read_text()) == {
            "model_type": "llama",
            "eos_token_id": 3,
        }
        assert json.loads((copy / "tokenizer_config.json").read_text()) == {
            "bos_token": "<s>",
            "eos_token": "rare",
        }
        assert not (copy / "generation_config.json").exists(), "it would name the model's own ends"
        assert (copy / "model.safetensors").resolve() == tmp_path / "model.safetensors"
    assert not copy.exists()
    assert (tmp_path / "model.safetensors").read_bytes() == b"weights"


def test_a_round_counts_if_no_answer_ended_early() -> None:
    assert throughput.rate({"decode_tokens_per_s": 30.0, "fewest_tokens": 100}, 100) == 30.0
    early = throughput.rate({"decode_tokens_per_s": 30.0, "fewest_tokens": 6}, 100)
    assert early == "an answer ended after 6 of 100 tokens"
    rounds: list[throughput.Row] = [
        {"http": 30.0, "vllm_mlx": early},
        {"http": 20.0, "vllm_mlx": 10.0},
    ]
    assert throughput.summary(rounds) == {"http": 25.0, "vllm_mlx": 10.0, "http / vllm_mlx": 2.5}
    assert throughput.summary(rounds[:1])["vllm_mlx"] == early


def test_others_may_have_fewer_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["throughput", "--streams", "1", "8", "128", "--others-at", "8"]
    )
    chosen = throughput.arguments()
    assert (
        throughput.streams_of("http", chosen)
        == throughput.streams_of("bare", chosen)
        == [1, 8, 128]
    )
    assert throughput.streams_of("mlx_lm", chosen) == [8]
    monkeypatch.setattr(sys, "argv", ["throughput", "--streams", "1", "8"])
    assert throughput.streams_of("mlx_lm", throughput.arguments()) == [1, 8]


@pytest.mark.parametrize(
    ("subject", "flag"), [("vllm_mlx_installed", "--vllm-mlx"), ("rapid_mlx", "--rapid-mlx")]
)
def test_a_peer_needs_an_interpreter(
    subject: str, flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["throughput", "--subjects", "http", subject])
    with pytest.raises(SystemExit):
        throughput.arguments()
    assert f"{subject} needs {flag} PYTHON" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["throughput", "--subjects", "http", subject, flag, "python"])
    assert throughput.arguments().subjects == ["http", subject]
