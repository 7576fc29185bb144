"""What can be split over ranks, and one line for what cannot. (What ranks then answer:
tests/ranks.)"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from tests.arithmetic import TF32
from tests.engine.test_loading import edit_config
from tests.families import FAMILIES, build, save
from tests.family_configs import BASE
from tests.ranks.models import CONFIGS
from tests.ranks.models import save as save_dividing
from trouper.engine.distributed.rank_group import ALONE, RankGroup
from trouper.engine.distributed.sharding import HypotheticalGroup, fault, fuse_adapters
from trouper.engine.loading import checkpoint
from trouper.engine.loading.model_loading import load
from trouper.engine.platform import device
from trouper.process import backend_of
from trouper.protocol.problems import ModelUnusable, SettingsInvalid
from trouper.protocol.settings import Settings


class Pretended(RankGroup):
    """One of several ranks, without the others: as far as refusals go."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.sharers = size, size

    @property
    def mlx(self) -> mx.distributed.Group:
        return HypotheticalGroup(self.size)  # type: ignore[return-value]


def refused(directory: Path, size: int) -> str:
    with pytest.raises(ModelUnusable) as caught:
        load(Settings(model=str(directory), no_ssd=True), lambda _: None, group=Pretended(size))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_heads_that_do_not_divide(tmp_path: Path) -> None:
    said = refused(save_dividing("llama", tmp_path / "llama"), 4)
    assert said.endswith(
        "cannot be split over 4 ranks: its 6 KV heads do not divide by 4; it runs at 1, 2, 3, 6"
    )


def test_heads_of_which_nothing_divides(tmp_path: Path) -> None:
    config = {**BASE, "model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 1}
    directory = save("llama", tmp_path / "llama")
    weights = dict(tree_flatten(build("llama", 0, config).parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    edit_config(directory, **config)
    assert refused(directory, 2).endswith("its 1 KV heads do not divide by 2; it runs only at 1")


def test_compressed_kv_is_everybodys() -> None:
    """MLA keeps one latent for all heads: the number of KV heads in its config divides nothing."""
    config = {**CONFIGS["deepseek_v3"], "num_key_value_heads": 1}
    assert (
        fault(build("deepseek_v3", 0, CONFIGS["deepseek_v3"]), config, HypotheticalGroup(3)) is None
    )


def test_a_model_that_mlx_lm_cannot_split(tmp_path: Path) -> None:
    said = refused(save("gemma3_text", tmp_path / "gemma"), 2)
    assert "cannot split gemma3_text over ranks; run it in one process" in said


def test_groups_of_quantized_weights_that_do_not_divide() -> None:
    model = build("llama")
    nn.quantize(model, 64, 4)
    said = fault(model, FAMILIES["llama"], HypotheticalGroup(2))
    assert said is not None
    assert "quantization group size 64" in said


def test_a_part_too_large_for_its_share_of_the_memory() -> None:
    needed = device.memory_limit_bytes() * 2
    with pytest.raises(ModelUnusable, match="GiB for one of 4 parts of its weights"):
        checkpoint.require_memory(needed, Path("large"), Pretended(4))


def test_r10_adapters_become_a_part_of_what_they_adapt() -> None:
    """Quantized or not, as mlx-lm's own layers compute them."""
    from mlx_lm.tuner.utils import linear_to_lora_layers

    for quantized in (False, True):
        model = build("llama")
        if quantized:
            nn.quantize(model, 32, 8)
        linear_to_lora_layers(
            model, 4, {"rank": 4, "scale": 5.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
        )
        adapted = [
            (name, array)
            for name, array in tree_flatten(model.parameters())
            if name.endswith("lora_b")
        ]
        assert len(adapted) == 4
        model.load_weights(
            [(name, mx.ones_like(array) * 0.02) for name, array in adapted], strict=False
        )
        model.eval()
        tokens = mx.array([[1, 2, 3]])
        wanted = model(tokens)
        fuse_adapters(model)
        assert type(model.layers[0].self_attn.q_proj) is nn.Linear
        close = 0.05 if TF32 else 2e-3
        assert mx.allclose(model(tokens), wanted, atol=close)
        assert not mx.allclose(wanted, build("llama")(tokens), atol=close)


def test_digests_tell_models_apart(tmp_path: Path) -> None:
    """Two ranks with different weights of one shape would answer nonsense together."""
    first = checkpoint.inspect(save("llama", tmp_path / "first"))
    assert checkpoint.inspect(save("llama", tmp_path / "same")).digest == first.digest
    other = tmp_path / "other"
    save("llama", other)
    weights = dict(tree_flatten(build("llama", seed=5).parameters()))
    mx.save_safetensors(str(other / "model.safetensors"), weights, {"format": "mlx"})
    assert checkpoint.inspect(other).digest != first.digest
    edit_config(tmp_path / "same", rope_theta=5.0)
    assert checkpoint.inspect(tmp_path / "same").digest != first.digest


def test_alone_nothing_is_computed() -> None:
    tokens = mx.array([1, 2], mx.uint32)
    assert ALONE.agree(tokens) is tokens
    assert (ALONE.share(b"x"), ALONE.gather(7), ALONE.leads, ALONE.sharers) == (b"x", [7], True, 1)


def test_a_launcher_names_its_backend() -> None:
    assert backend_of({}) is None
    assert backend_of({"MLX_RANK": "0", "MLX_HOSTFILE": ""}) is None, "mlx.launch with one process"
    assert backend_of({"MLX_HOSTFILE": "hosts.json"}) == "ring"
    assert (
        backend_of({"MLX_IBV_DEVICES": "devices.json", "MLX_JACCL_COORDINATOR": "10.0.0.1:32323"})
        == "jaccl"
    )
    assert (
        backend_of({"NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": "12345", "MLX_WORLD_SIZE": "2"})
        == "nccl"
    )


def test_f26_the_type_of_sums_is_one_of_two() -> None:
    with pytest.raises(
        SettingsInvalid, match="--tp-reduce-dtype must be native or float32, not bfloat16"
    ):
        Settings(tp_reduce_dtype="bfloat16")
