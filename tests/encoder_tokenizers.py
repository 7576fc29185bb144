"""Tokenizers of encoders, in the files that their makers publish: BERT's WordPiece and
XLM-RoBERTa's Unigram."""

from __future__ import annotations

from pathlib import Path

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import BertTokenizerFast, PreTrainedTokenizerFast

WORDS = [
    "a",
    "dog",
    "barks",
    "what",
    "?",
    "!",
    ".",
    ",",
    "the",
    "cat",
    "is",
    "of",
    "capital",
    "paris",
    "france",
    "rome",
    "spoon",
    "in",
    "on",
    "seine",
    "river",
    "it",
    "search_query",
    ":",
    "search_document",
    "query",
    "document",
    "title",
    "none",
    "text",
]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789_"
BERT_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def save_wordpiece(directory: Path, size: int) -> Path:
    """With `size` tokens, in lower case."""
    pieces = dict.fromkeys(
        [*BERT_SPECIALS, *WORDS, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    )
    tokens = [*pieces, *(f"[unused{index}]" for index in range(size - len(pieces)))]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    BertTokenizerFast(tokenizer_object=made, model_max_length=512).save_pretrained(directory)
    return directory


def save_unigram(directory: Path, size: int) -> Path:
    """With `size` tokens."""
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    words = [(f"▁{word}", -1.0 - index / 100) for index, word in enumerate(WORDS)]
    letters = [(letter, -9.0) for letter in dict.fromkeys(LETTERS + "?!.,:▁")]
    pieces = [*((special, 0.0) for special in specials), *words, *letters]
    pieces += [(f"<unused{index}>", -20.0) for index in range(size - len(pieces) - 1)]
    pieces.append(("<mask>", 0.0))
    made = Tokenizer(models.Unigram(pieces, unk_id=3))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=512,
    ).save_pretrained(directory)
    return directory
