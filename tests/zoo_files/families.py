"""Families by what their makers publish: architecture, turns, calls, thinking and context. Numbers
and names are facts of their repositories; sizes and weights are tiny and random."""

from __future__ import annotations

from typing import Any

import attrs

Config = dict[str, Any]
K = 1024


@attrs.frozen
class Family:
    """`config`: name in tests/zoo. `calls`, `thinking`: names in templates.py; "" for none."""

    name: str
    config: str
    turns: str
    calls: str = ""
    thinking: str = ""
    context: int = 0
    """0: the architecture has no limit, or the zoo's config has its own."""
    changes: Config = attrs.field(factory=dict)
    """Of the text part of the config."""
    kind: str = ""
    """The makers' model_type, where mlx-lm maps it to another module."""
    transformers: int = 4
    """Major version that saved the config: 5 has rope in `rope_parameters`."""
    template_in: str = "jinja"
    """`jinja`: a file of its own; `config`: tokenizer_config.json; `named`: a list there;
    `processor`: chat_template.json."""


def yarn(factor: float, original: int) -> Config:
    return {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    }


LLAMA3 = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
F = Family
FAMILIES = {
    family.name: family
    for family in (
        # -- Llama and what is built like it
        F("Llama 2", "llama", "chatml, no tools", context=4 * K, template_in="config"),
        F("Llama 3.1, 3.2, 3.3", "llama", "llama3", "llama3_json", "", 128 * K, LLAMA3),
        F("Llama 4", "llama4", "llama3", "pythonic", "", 10240 * K, template_in="processor"),
        F("Hermes 3", "llama", "chatml", "hermes", "", 128 * K, LLAMA3, template_in="named"),
        F("Hermes 4", "llama", "chatml", "hermes", "thinking", 128 * K, LLAMA3),
        F(
            "DeepSeek R1 Distill Llama",
            "llama",
            "deepseek",
            "deepseek_v3",
            "always",
            128 * K,
            LLAMA3,
        ),
        F("Yi 1.5", "llama", "chatml, no tools", "", "", 32 * K, {"rope_theta": 5e6}),
        F("SmolLM2", "llama", "chatml, no tools", "", "", 8 * K, {"rope_theta": 130000.0}),
        F(
            "SmolLM2 of transformers 5",
            "llama",
            "chatml, no tools",
            context=8 * K,
            changes={"rope_theta": 130000.0},
            transformers=5,
        ),
        F("SmolLM3", "smollm3", "chatml", "hermes", "opened", 64 * K, {"rope_theta": 5e6}),
        F("Nanbeige 4", "nanbeige", "chatml", "hermes", "on", 256 * K),
        F("MiniCPM 4", "minicpm", "chatml, no tools", "", "", 32 * K),
        F("InternLM 2.5", "internlm2", "chatml", "internlm", "", 32 * K),
        F("InternLM 3", "internlm3", "chatml", "internlm", "", 32 * K),
        F("Apriel 1.6", "llama", "phi with tools", "jamba", "apriel", 256 * K),
        F("IQuest Coder", "llama", "chatml", "hermes", "", 128 * K, kind="iquestcoder"),
        # -- Mistral
        F("Mistral 7B", "llama", "mistral", "mistral", "", 32 * K, {"rope_theta": 1e6}, "mistral"),
        F(
            "Mistral Nemo",
            "llama",
            "mistral",
            "mistral",
            "",
            128 * K,
            {"rope_theta": 1e6},
            "mistral",
        ),
        F("Mixtral", "mixtral", "mistral, no tools", "", "", 32 * K, {"rope_theta": 1e6}),
        F("Mistral Small 3.2", "mistral3", "mistral", "mistral", "", 128 * K),
        F(
            "Ministral 3, Devstral 2",
            "mistral3 of ministral3",
            "mistral",
            "mistral",
            context=256 * K,
            transformers=5,
        ),
        # -- Qwen
        F(
            "Qwen 2.5",
            "qwen2",
            "chatml",
            "hermes",
            "",
            32 * K,
            {"rope_theta": 1e6},
            template_in="config",
        ),
        F("Qwen 2.5 with YaRN", "qwen2", "chatml", "hermes", "", 32 * K, yarn(4.0, 32 * K)),
        F("QwQ", "qwen2", "chatml", "hermes", "always", 40 * K, {"rope_theta": 1e6}),
        F("DeepSeek R1 Distill Qwen", "qwen2", "deepseek", "deepseek_v3", "always", 128 * K),
        F("Qwen 2.5 VL", "qwen2_vl", "chatml, no tools", "", "", 128 * K, {}, "qwen2_5_vl"),
        F("Qwen 3", "qwen3", "chatml", "hermes", "on", 40 * K, {"rope_theta": 1e6}),
        F("Qwen 3 A3B", "qwen3_moe", "chatml", "hermes", "on", 40 * K, {"rope_theta": 1e6}),
        F(
            "Qwen 3 Instruct 2507",
            "qwen3_moe",
            "chatml",
            "hermes",
            "",
            256 * K,
            {"rope_theta": 1e7},
        ),
        F("Qwen 3 Thinking 2507", "qwen3_moe", "chatml", "hermes", "always", 256 * K),
        F("Qwen 3 Coder", "qwen3_moe", "chatml", "qwen3_coder", "", 256 * K, {"rope_theta": 1e7}),
        F("Qwen 3 VL", "qwen3_vl", "chatml", "hermes", "", 256 * K),
        F("Qwen 3 Next", "qwen3_next", "chatml", "hermes", "", 256 * K),
        F("Qwen 3.5, small", "qwen3_5", "chatml", "qwen3_coder", "off", 256 * K, transformers=5),
        F("Qwen 3.5", "qwen3_5_moe", "chatml", "qwen3_coder", "opened", 256 * K, transformers=5),
        # -- Gemma
        F("Gemma 2", "gemma2", "gemma", "", "", 8 * K),
        F("Gemma 3", "gemma3", "gemma", "", "", 128 * K),
        F("Gemma 3n", "gemma3n", "gemma", "", "", 32 * K),
        F("FunctionGemma", "gemma3_text", "gemma4", "function_gemma", "", 32 * K),
        F("Gemma 4", "gemma4", "gemma4", "gemma4", "gemma4", 128 * K),
        # -- DeepSeek and Kimi
        F("DeepSeek V3", "deepseek_v3", "deepseek", "deepseek_v3", "", 160 * K),
        F("DeepSeek R1", "deepseek_v3", "deepseek", "deepseek_v3", "always", 160 * K),
        F("DeepSeek V3.1", "deepseek_v3", "deepseek", "deepseek_v3", "thinking", 160 * K),
        F("DeepSeek V3.2", "deepseek_v32", "deepseek", "deepseek_v32", "thinking", 160 * K),
        F("DeepSeek V4", "deepseek_v41", "deepseek", "deepseek_v4", "thinking", 1024 * K),
        F("GigaChat 3", "deepseek_v3", "chatml", "gigachat3", "", 128 * K),
        F("Kimi K2", "deepseek_v3", "kimi", "kimi_k2", "", 128 * K, {}, "kimi_k2"),
        F("Kimi K2 Thinking", "deepseek_v3", "kimi", "kimi_k2", "always", 256 * K, {}, "kimi_k2"),
        F("Kimi Linear", "kimi_linear", "kimi", "kimi_k2", "", 1024 * K),
        F("Kimi K2.5", "kimi_k25", "kimi", "kimi_k2", "thinking on", 256 * K),
        # -- GLM, MiniMax, Step, LongCat
        F("GLM 4", "glm4", "glm", "", "", 32 * K),
        F("GLM 4.5, 4.6, 4.7", "glm4_moe", "glm", "glm", "closed", 128 * K),
        F("GLM 4.7 Flash", "glm4_moe_lite", "glm", "glm", "closed", 198 * K, transformers=5),
        F("GLM 5", "glm_moe_dsa", "glm", "glm", "closed", 198 * K),
        F("MiniMax M2", "minimax", "minimax", "minimax_m2", "always", 192 * K, {}, "minimax_m2"),
        F("Step 3.5 Flash", "step3p5", "chatml", "qwen3_coder", "always", 256 * K),
        F("LongCat Flash", "longcat_flash", "chatml", "longcat", "", 128 * K),
        # -- OpenAI, Microsoft, IBM, Nvidia, Cohere
        F(
            "gpt-oss",
            "gpt_oss",
            "harmony",
            "harmony",
            "effort",
            128 * K,
            yarn(32.0, 4 * K),
        ),
        F("Phi 3.5", "phi3", "phi", "", "", 128 * K),
        F("Phi 4", "phi3", "chatml, no tools", "", "", 16 * K),
        F("Phi 4 mini", "phi3", "phi with tools", "phi4_mini_json", "", 128 * K),
        F("Phi 3.5 MoE", "phimoe", "phi", "", "", 128 * K),
        F("Granite 3.3", "granite", "granite", "granite", "granite", 128 * K),
        F("Granite 4", "granitemoehybrid", "granite", "hermes", "", 128 * K),
        F("Nemotron Nano 2", "nemotron_h", "nemotron", "nemotron_v2", "always", 128 * K),
        F("Nemotron 3 Nano", "nemotron_h with experts", "chatml", "qwen3_coder", "opened", 256 * K),
        F("Command R", "cohere", "cohere", "", "", 128 * K),
        F("Command R7B", "cohere2", "cohere", "cohere", "cohere", 128 * K),
        # -- others
        F("OLMo 2", "olmo2", "tulu", "", "", 4 * K),
        F("Olmo 3", "olmo3", "chatml", "olmo3", "always", 64 * K),
        F("OLMoE", "olmoe", "tulu", "", "", 4 * K),
        F("Apertus", "apertus", "apertus", "apertus", "", 64 * K),
        F("Seed-OSS", "seed_oss", "seed", "seed_oss", "budget", 512 * K),
        F("ERNIE 4.5", "ernie4_5", "chatml, no tools", "", "", 128 * K),
        F("ERNIE 4.5 A3B", "ernie4_5_moe", "chatml, no tools", "", "", 128 * K),
        F("Hunyuan A13B", "hunyuan", "hunyuan", "jamba", "on", 32 * K),
        F("Hunyuan dense", "hunyuan_v1_dense", "hunyuan", "jamba", "on", 256 * K),
        F("EXAONE 3.5", "exaone", "exaone, no tools", "", "", 32 * K),
        F("EXAONE 4", "exaone4", "exaone", "hermes", "off", 128 * K),
        F("MiMo", "mimo", "chatml", "hermes", "on", 32 * K),
        F("Ling, Ring", "bailing_moe", "chatml", "hermes", "", 32 * K),
        F("dots.llm1", "dots1", "tulu", "", "", 32 * K),
        F("Solar Open", "solar_open", "chatml", "hermes", "on", 128 * K),
        F("StableLM 2", "stablelm", "chatml, no tools", "", "", 4 * K),
        F("Helium", "helium", "chatml, no tools", "", "", 4 * K),
        # -- recurrent and hybrid
        F("Jamba", "jamba", "chatml", "jamba", "", 256 * K),
        F("Falcon H1", "falcon_h1", "chatml", "hermes", "", 128 * K),
        F("LFM2", "lfm2", "chatml", "pythonic", "", 125 * K),
        F("LFM2 8B A1B", "lfm2_moe", "chatml", "pythonic", "", 125 * K),
        F("Olmo Hybrid", "olmo_hybrid", "chatml", "", "", 64 * K),
        F("PLaMo 2", "plamo2", "chatml, no tools", "", "", 10240 * K),
    )
}
SHORT = (
    "SmolLM2 of transformers 5",
    "Llama 3.1, 3.2, 3.3",
    "Gemma 2",
    "Qwen 3.5, small",
    "DeepSeek V3.1",
    "Seed-OSS",
)
"""Those of the tests."""
