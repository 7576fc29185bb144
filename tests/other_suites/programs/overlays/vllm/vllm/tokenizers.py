"""In the place of vLLM's: every model's tokenizer is that of the model that is served."""

import served
from transformers import AutoTokenizer


def get_tokenizer(*_, **__):
    return AutoTokenizer.from_pretrained(served.PLAN["model"])
