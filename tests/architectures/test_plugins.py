"""Architectures of installed packages: real entry points, of real metadata on the path."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from tests import families
from tests.families import END, prompts, reference, save_tokenizer, write_json
from tests.family_configs import BASE
from tests.real.serving import ask, running
from trouper import Generate, Settings, TokenPrompt
from trouper.cli import model_verdicts
from trouper.cli.model_verdicts import with_problems
from trouper.engine.architectures import architecture_lookup
from trouper.engine.architectures.architecture_lookup import find_architecture
from trouper.engine.loading import checkpoint, model_loading
from trouper.engine.loading.model_loading import EvaluatedModel, load
from trouper.engine.self_check import tiny
from trouper.protocol.installing import command_for
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.sampling import Sampling
from trouper.storage.model_files import read_model_files

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin_architecture"
CONFIG = {**BASE, "model_type": "parallel_llama"}
ALONE = """
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache
ModelArgs = llama.ModelArgs

class OwnCache(KVCache):
    pass

class Model(llama.Model):
    def make_cache(self):
        return [OwnCache() for _ in self.layers]
"""
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a package: what a wheel leaves behind is its modules and the metadata beside them."""

    def installed(
        package: str, model_type: str, source: str, group: str = "trouper.architectures"
    ) -> Path:
        site = tmp_path / f"site-{package}"
        metadata = site / f"{package}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
        (metadata / "entry_points.txt").write_text(f"[{group}]\n{model_type} = {package}_module\n")
        (site / f"{package}_module.py").write_text(source)
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, f"{package}_module", raising=False)
        return site / f"{package}_module.py"

    return installed


def save(directory: Path, model_type: str = "parallel_llama") -> Path:
    """A checkpoint of the example's architecture, whose norms have the names that its `sanitize`
    knows."""
    config = {**CONFIG, "model_type": model_type}
    directory.mkdir(parents=True, exist_ok=True)
    weights = {
        name.replace("input_layernorm", "norm"): weight
        for name, weight in tree_flatten(tiny.build(config, 3).parameters())
    }
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    write_json(directory / "config.json", {**config, "eos_token_id": END})
    save_tokenizer(directory)
    return directory


def llama_as(kind: str, directory: Path) -> Path:
    """A checkpoint of Llama that says another model_type."""
    families.save("llama", directory)
    write_json(directory / "config.json", {**CONFIG, "model_type": kind})
    return directory


def load_from(directory: Path) -> EvaluatedModel:
    return load(Settings(model=str(directory), no_ssd=True), lambda line: None)


async def test_the_example_is_served_in_a_batch(install: Install, tmp_path: Path) -> None:
    install("parallel", "parallel_llama", (EXAMPLE / "parallel_llama.py").read_text())
    directory, asked = save(tmp_path / "model"), prompts((5, 37, 60))
    requests = [
        Generate(
            request_id=str(index),
            prompt=TokenPrompt(tuple(prompt)),
            max_tokens=8,
            ignore_eos=True,
            sampling=Sampling(temperature=0),
        )
        for index, prompt in enumerate(asked)
    ]
    async with running(str(directory)) as runtime:
        assert runtime.model.architecture_source == "parallel_module of parallel 1.0"
        assert runtime.model.capabilities.off == {}, (
            "its caches are mlx-lm's, so its rows may do everything"
        )
        heard = await ask(runtime, *requests)
    model = load_from(directory).model
    assert type(model).__module__ == "parallel_module"
    assert [list(each.tokens) for each in heard] == [
        reference(model, prompt, 8) for prompt in asked
    ]


def test_caches_that_nobody_knows_run_row_by_row(install: Install, tmp_path: Path) -> None:
    install("alone", "parallel_llama", ALONE)
    found = load_from(llama_as("parallel_llama", tmp_path / "model")).card.capabilities
    assert found.off["batch"] == "cache OwnCache"


def test_a_plugin_that_raises_is_named_and_costs_no_other_model_anything(
    install: Install, tmp_path: Path
) -> None:
    install("works", "parallel_llama", (EXAMPLE / "parallel_llama.py").read_text())
    directory = save(tmp_path / "model")
    install("broken", "broken_type", "import a_package_that_is_not_here")
    install("leaves", "leaving_type", "raise SystemExit(3)")
    for kind, package, reason in (
        (
            "broken_type",
            "broken",
            "ModuleNotFoundError: No module named 'a_package_that_is_not_here'",
        ),
        ("leaving_type", "leaves", "it exits with 3"),
    ):
        other = llama_as(kind, tmp_path / kind)
        with pytest.raises(ModelUnusable) as caught:
            load_from(other)
        assert str(caught.value) == (
            f"{other}: the plugin {package}_module of {package} 1.0, which registers model_type "
            f"{kind!r}, cannot be "
            f"imported: {reason}; update or uninstall that package"
        )
    assert load_from(directory).card.architecture == "parallel_llama"
    assert load_from(
        families.save("llama", tmp_path / "llama")
    ).card.architecture_source.startswith("mlx-lm ")


def test_a_plugin_has_the_interface_of_mlx_lms_modules(install: Install, tmp_path: Path) -> None:
    install("half", "half_type", "class Model: pass")
    directory = llama_as("half_type", tmp_path / "model")
    with pytest.raises(
        ModelUnusable, match=r"half_module of half 1\.0, .* has no ModelArgs; a plugin has"
    ):
        load_from(directory)


def test_mlx_lms_own_is_replaced_only_where_a_plugin_says_so(
    install: Install, tmp_path: Path
) -> None:
    directory = families.save("llama", tmp_path / "llama")
    install("modest", "llama", ALONE)
    assert find_architecture({"model_type": "llama"}).native
    install("bold", "llama", ALONE, "trouper.architectures.overrides")
    loaded = load_from(directory)
    assert loaded.card.architecture_source == "bold_module of bold 1.0"
    assert type(loaded.model).__module__ == "bold_module"


def test_two_packages_of_one_name(install: Install, tmp_path: Path) -> None:
    install("first", "twice", ALONE)
    install("second", "twice", ALONE)
    with pytest.raises(
        ModelUnusable,
        match=r"is registered by second_module of second 1\.0 and by first_module of first 1",
    ):
        find_architecture({"model_type": "twice"})


def test_what_is_remembered_of_a_plugin_is_forgotten_with_its_code(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    module = install("forgetful", "parallel_llama", ALONE)
    directory = llama_as("parallel_llama", tmp_path / "model")
    assert not load_from(directory).card.self_check.remembered
    assert load_from(directory).card.self_check.remembered
    module.write_text(ALONE + "\n# changed\n")
    assert not load_from(directory).card.self_check.remembered


def test_a_verdict_is_forgotten_with_the_plugins_the_versions_and_the_files(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    opened: list[str] = []
    monkeypatch.setattr(model_loading, "check", lambda settings: opened.append(settings.model))
    directory = families.save("llama", tmp_path / "llama")

    def opens() -> bool:
        opened.clear()
        with_problems([read_model_files("llama", directory)])
        return bool(opened)

    assert opens() and not opens()
    install("other", "no_llama", ALONE)
    assert opens() and not opens()
    install("bold", "llama", ALONE, "trouper.architectures.overrides")
    assert opens() and opens(), "a plugin's code may change without its version"
    monkeypatch.setattr(architecture_lookup, "registered", frozenset)
    assert opens() and not opens()
    monkeypatch.setattr(model_verdicts, "installed_version", lambda _name, _absent: "9.9")
    assert opens() and not opens()
    monkeypatch.setattr(model_verdicts, "VERSION", "9.9")
    assert opens() and not opens()
    (directory / "tokenizer_config.json").rename(directory / "tokenizer_configs.json")
    assert opens() and not opens()
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text("{}")
    assert opens() and not opens()


@pytest.mark.parametrize(
    ("kind", "nearest"),
    [("qwen3_mo", "qwen3_moe"), ("aya_visions", "aya_vision"), ("cohere_v2", "cohere2")],
)
def test_the_error_of_an_unknown_type_says_what_to_install(
    kind: str, nearest: str, tmp_path: Path
) -> None:
    directory = llama_as(kind, tmp_path / "model")
    with pytest.raises(ModelUnusable) as caught:
        checkpoint.inspect(directory)
    said = str(caught.value)
    assert said.startswith(f"{directory}: no architecture for model_type {kind!r}: mlx-lm ")
    assert "a plugin may register it as an entry point of trouper.architectures" in said
    assert said.endswith(f"the nearest known model_type is {nearest!r}")


def test_without_mlx_vlm_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trouper.engine.architectures.vlm_models.find_spec", lambda name: None)
    with pytest.raises(ModelUnusable, match=f"mlx-vlm may: {re.escape(command_for('vlm'))}"):
        find_architecture({"model_type": "aya_vision"})


@pytest.mark.parametrize("kind", ["lfm2-vl", "nemotron-nas"])
def test_modules_of_mlx_lm_may_have_a_dash(kind: str) -> None:
    assert find_architecture({"model_type": kind}).native


@pytest.mark.parametrize("kind", ["../utils", "os.path", "", "base"])
def test_what_is_no_model(kind: str) -> None:
    with pytest.raises(ModelUnusable):
        find_architecture({"model_type": kind}).get_classes()
