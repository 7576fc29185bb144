"""States and drafts of tiny drafters by the code that was published with them.

`PYTHONPATH=EAGLE:dflash:DeepSpec python3 tests/engine/tapped_references.py OUTDIR [KIND ...]` needs
numpy, torch, transformers, and checkouts of https://github.com/SafeAILab/EAGLE,
https://github.com/z-lab/dflash and https://github.com/deepseek-ai/DeepSpec; it writes
OUTDIR/tapped_references.json, whose home is beside this file. With KINDs the others stay as they
are there. Weights are drawn by NumPy from a seed, under published names.
"""

# ruff: noqa: T201
from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Config = dict[str, Any]
Arrays = dict[str, NDArray[Any]]
FILE = "tapped_references.json"
VOCABULARY, DRAFTS = 512, 5
PROMPTS = [
    [3, 17, 99, 4, 250, 8, 61, 30],
    [(37 * at + 11) % 500 + 1 for at in range(40)],
]
TARGET: Config = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
SHAPE: Config = {
    **{key: value for key, value in TARGET.items() if key not in ("architectures", "model_type")},
    "head_dim": 16,
    "hidden_act": "silu",
    "pad_token_id": 0,
}
EAGLE3: Config = SHAPE | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "draft_vocab_size": 200,
    "rope_scaling": None,
    "bias": False,
}
DFLASH: Config = SHAPE | {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 3,
    "num_target_layers": 6,
    "rope_theta": 1000000.0,
    "attention_bias": False,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 500, "target_layer_ids": [1, 2, 4]},
}

DSPARK: Config = {key: value for key, value in DFLASH.items() if key != "dflash_config"} | {
    "architectures": ["Qwen3DSparkModel"],
    "tie_word_embeddings": False,
    "layer_types": ["full_attention"] * 3,
    "mask_token_id": 500,
    "target_layer_ids": [1, 2, 4],
    "num_anchors": 512,
    "markov_rank": 24,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def weights_of(kind: str, config: Config, seed: int = 3) -> Arrays:
    """Random weights of a drafter. `kind`: eagle3, dflash or dspark."""
    random = np.random.RandomState(seed)
    size, inner, head = (config[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    eagle = kind == "eagle3"
    taps = 3 if eagle else len({**config, **config.get("dflash_config", {})}["target_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, taps * int(config.get("target_hidden_size") or size)),
        "norm.weight": (size,),
    }
    if eagle:
        shapes |= {"embed_tokens.weight": (VOCABULARY, size)}
        shapes |= {"lm_head.weight": (config["draft_vocab_size"], size)}
    else:
        shapes |= {"hidden_norm.weight": (size,)}
    for layer in range(config["num_hidden_layers"]):
        prefix = "midlayer." if eagle else f"layers.{layer}."
        inputs = 2 * size if eagle else size
        own = {
            "input_layernorm.weight": (size,),
            "post_attention_layernorm.weight": (size,),
            "self_attn.q_proj.weight": (queries, inputs),
            "self_attn.k_proj.weight": (keys, inputs),
            "self_attn.v_proj.weight": (keys, inputs),
            "self_attn.o_proj.weight": (size, queries),
            "mlp.gate_proj.weight": (inner, size),
            "mlp.up_proj.weight": (inner, size),
            "mlp.down_proj.weight": (size, inner),
        }
        more = ["hidden_norm"] if eagle else []
        heads = [] if eagle else ["self_attn.q_norm", "self_attn.k_norm"]
        own |= {f"{norm}.weight": (size,) for norm in more}
        own |= {f"{norm}.weight": (head,) for norm in heads}
        shapes |= {prefix + path: shape for path, shape in own.items()}
    if kind == "dspark":
        rank, vocabulary = config["markov_rank"], config["vocab_size"]
        shapes |= {
            "embed_tokens.weight": (vocabulary, size),
            "lm_head.weight": (vocabulary, size),
            "markov_head.markov_w1.weight": (vocabulary, rank),
            "markov_head.markov_w2.weight": (vocabulary, rank),
            "confidence_head.proj.weight": (1, size + rank),
            "confidence_head.proj.bias": (1,),
        }
    weights: Arrays = {path: _drawn(shape, random) for path, shape in shapes.items()}
    if eagle:
        tokens = np.sort(random.permutation(VOCABULARY)[: config["draft_vocab_size"]])
        weights["d2t"] = tokens - np.arange(len(tokens))
        weights["t2d"] = np.isin(np.arange(VOCABULARY), tokens)
    return weights


def _drawn(shape: tuple[int, ...], random: np.random.RandomState) -> NDArray[np.float32]:
    if len(shape) == 1:
        return (1 + 0.2 * random.randn(*shape)).astype(np.float32)
    return (random.randn(*shape) * 1.5 / np.sqrt(shape[1])).astype(np.float32)


def target_weights(seed: int = 5) -> Arrays:
    random, size, inner = np.random.RandomState(seed), TARGET["hidden_size"], 96
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, size),
        "model.norm.weight": (size,),
        "lm_head.weight": (VOCABULARY, size),
    }
    for layer in range(TARGET["num_hidden_layers"]):
        own: dict[str, tuple[int, ...]] = {
            "input_layernorm": (size,),
            "post_attention_layernorm": (size,),
            "self_attn.q_proj": (size, size),
            "self_attn.k_proj": (size // 2, size),
            "self_attn.v_proj": (size // 2, size),
            "self_attn.o_proj": (size, size),
            "mlp.gate_proj": (inner, size),
            "mlp.up_proj": (inner, size),
            "mlp.down_proj": (size, inner),
        }
        shapes |= {f"model.layers.{layer}.{path}.weight": shape for path, shape in own.items()}
    return {path: _drawn(shape, random) for path, shape in shapes.items()}


def _loaded(module: Any, weights: Arrays) -> Any:
    import torch  # type: ignore[import-not-found]

    state = {name: torch.from_numpy(np.ascontiguousarray(each)) for name, each in weights.items()}
    missing, unexpected = module.load_state_dict(state, strict=False)
    assert not unexpected and all("rotary" in name for name in missing), (missing, unexpected)
    return module.eval().float()


def by_eagle(target: Any, prompt: list[int]) -> tuple[Any, list[int]]:
    """States of all pairs of the prompt's tokens, and a greedy draft."""
    import torch
    from eagle.model.cnets import Model  # type: ignore[import-not-found]

    drafter = _loaded(
        Model(SimpleNamespace(**EAGLE3, pretraining_tp=1)), weights_of("eagle3", EAGLE3)
    )
    tokens, layers = torch.tensor([prompt]), TARGET["num_hidden_layers"]
    hidden = target(tokens, output_hidden_states=True).hidden_states
    taps = torch.cat([hidden[index] for index in (2, layers // 2, layers - 3)], dim=-1)
    states, past = drafter(taps[:, :-1], tokens[:, 1:], use_cache=True)
    last, draft = states[:, -1:], list[int]()
    for _ in range(DRAFTS):
        own = drafter.lm_head(drafter.norm(last)).argmax(-1)
        draft.append(int(own + drafter.d2t[own]))
        last, past = drafter(last, torch.tensor([draft[-1:]]), past_key_values=past, use_cache=True)
    return states[0], draft


def by_dflash(target: Any, prompt: list[int]) -> tuple[Any, list[int]]:
    """Normed states of a block behind the prompt, and its draft."""
    import torch
    from dflash.model import (  # type: ignore[import-not-found]
        DFlashDraftModel,
        extract_context_feature,
    )
    from transformers import Qwen3Config

    config = Qwen3Config(**DFLASH)
    config._attn_implementation = "sdpa"
    drafter = _loaded(DFlashDraftModel(config), weights_of("dflash", DFLASH))
    hidden = target(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    context = extract_context_feature(hidden, drafter.target_layer_ids)[:, :-1]
    block = torch.tensor([[prompt[-1], *[drafter.mask_token_id] * (drafter.block_size - 1)]])
    states = drafter(
        target_hidden=context,
        noise_embedding=target.model.embed_tokens(block),
        position_ids=torch.arange(len(prompt) - 1 + drafter.block_size)[None],
        is_causal=False,
    )
    return states[0], target.lm_head(states[0, 1 : 1 + DRAFTS]).argmax(-1).tolist()


def by_dspark(target: Any, prompt: list[int]) -> tuple[Any, list[int]]:
    """The same of DSpark."""
    import torch
    from deepspec.modeling.dspark import (  # type: ignore[import-not-found]
        Qwen3DSparkModel,
        extract_context_feature,
    )
    from transformers import Qwen3Config

    config = Qwen3Config(**DSPARK)
    config._attn_implementation = "sdpa"
    drafter = _loaded(Qwen3DSparkModel(config), weights_of("dspark", DSPARK))
    hidden = target(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    block = torch.tensor([[prompt[-1], *[drafter.mask_token_id] * (drafter.block_size - 1)]])
    states = drafter._forward_backbone(
        target_hidden_states=extract_context_feature(hidden, drafter.target_layer_ids)[:, :-1],
        noise_embedding=drafter.embed_tokens(block),
        position_ids=torch.arange(len(prompt) - 1 + drafter.block_size)[None],
        is_causal=False,
    )
    draft, _ = drafter.sample_draft_tokens(
        drafter.compute_logits(states), first_prev_token_ids=block[:, 0], hidden_states=states
    )
    return states[0], draft[0, :DRAFTS].tolist()


def main(directory: Path, kinds: list[str]) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    target = _loaded(LlamaForCausalLM(LlamaConfig(**TARGET)), target_weights())
    written: dict[str, Any] = {}
    if kinds:
        written = json.loads((Path(__file__).parent / FILE).read_text(encoding="utf-8"))
    with torch.inference_mode():
        for kind, by in (("eagle3", by_eagle), ("dflash", by_dflash), ("dspark", by_dspark)):
            if kinds and kind not in kinds:
                continue
            answers = [by(target, prompt) for prompt in PROMPTS]
            written[kind] = [
                {"states": np.round(states[-3:].numpy(), 6).tolist(), "draft": draft}
                for states, draft in answers
            ]
    (directory / FILE).write_text(json.dumps(written), encoding="utf-8")
    print({kind: [each["draft"] for each in made] for kind, made in written.items()})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
