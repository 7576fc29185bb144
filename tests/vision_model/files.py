"""The files of examples/shapes beside its weights and its chat template.

`python -m tests.vision_model.files` writes them anew, but for the tokenizer: it was learnt from the
questions of its time, and another one needs other weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import jinja2
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.vision_model.questions import Message, conversation

DIRECTORY = Path(__file__).parents[2] / "examples" / "shapes"
TEMPLATE = "chat_template.jinja"
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VOCABULARY = 640
END_OF_TEXT, START_OF_MESSAGE, END_OF_MESSAGE, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = (
    range(len(SPECIALS))
)
TEXT: dict[str, Any] = {
    "model_type": "qwen3_vl_text",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "attention_bias": False,
    "rope_theta": 100000.0,
    "rope_scaling": {
        "rope_type": "default",
        "mrope_interleaved": True,
        "mrope_section": [6, 5, 5],
    },
    "tie_word_embeddings": True,
}
VISION: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "depth": 4,
    "hidden_size": 96,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 192,
    "num_heads": 3,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 128,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 2],
}
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "dtype": "float16",
    "image_token_id": IMAGE_PAD,
    "video_token_id": VIDEO_PAD,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "eos_token_id": END_OF_MESSAGE,
    "tie_word_embeddings": True,
    "text_config": TEXT,
    "vision_config": VISION,
}
PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": 128 * 128, "longest_edge": 16777216},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
GENERATION: dict[str, Any] = {"do_sample": False, "eos_token_id": END_OF_MESSAGE}
TOKENIZER: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": SPECIALS[END_OF_MESSAGE],
    "pad_token": SPECIALS[END_OF_TEXT],
    "model_max_length": TEXT["max_position_embeddings"],
    "clean_up_tokenization_spaces": False,
}


class Renderer:
    """The chat template as in transformers, without it: for the workers of the training."""

    def __init__(self) -> None:
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        source = (DIRECTORY / TEMPLATE).read_text(encoding="utf-8")
        self._template = environment.from_string(source)

    def render(self, messages: Sequence[Message], *, ask: bool = False) -> str:
        return str(self._template.render(messages=messages, add_generation_prompt=ask))


def make_tokenizer() -> Tokenizer:
    """Bytes, and merges learnt from conversations: any text has tokens."""
    drawn, renderer = Random(1), Renderer()
    texts = [renderer.render(conversation(drawn, [(128, 128)] * 2)[0]) for _ in range(2000)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(text, special=True) for text in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


CONTENTS = {
    "config.json": CONFIG,
    "preprocessor_config.json": PREPROCESSOR,
    "generation_config.json": GENERATION,
    "tokenizer_config.json": TOKENIZER,
}


def main() -> None:
    for name, content in CONTENTS.items():
        _write(DIRECTORY / name, content)
    if not (DIRECTORY / "tokenizer.json").exists():
        make_tokenizer().save(str(DIRECTORY / "tokenizer.json"))


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
