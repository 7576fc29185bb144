"""In the place of vLLM's: every model's tokenizer is that of the model that is served."""

from unittest.mock import MagicMock

import served
from transformers import AutoTokenizer


def get_tokenizer(*_, **__):
    return AutoTokenizer.from_pretrained(served.PLAN["model"])


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)
