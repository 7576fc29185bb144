"""POST /v1/embeddings: request and answer."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, Literal

import attrs
import msgspec
import numpy as np

from trouper.protocol.model import EmbeddingLayout, ModelCard
from trouper.protocol.problems import bad_request
from trouper.protocol.requests import Generate, Prompt, TextPrompt
from trouper.protocol.sampling import Sampling
from trouper.web.http.body_faults import ordered
from trouper.web.http.body_parsing import between
from trouper.web.http.field_types import Dimensions, Model, Priority, Text
from trouper.web.http.request_body import Body
from trouper.web.http.request_schema import (
    COUNT,
    HARMLESS,
    NUMBER,
    TEXT,
    Json,
    Unsupported,
    array,
    either,
    full,
    titled,
)
from trouper.web.openai.completions import Prompts, prompts_meta, prompts_of

MAX_INPUTS = 2048
"""OpenAI's maximum."""
AT_A_TIME = 16
"""Inputs of one request that are queued together."""
LONG_VECTORS = 2**17
"""Beyond so many bytes a thread encodes: 32 inputs of 1,024 numbers take 4 ms."""
NUMBER_BYTES = 48
"""Bytes for a number: itself, and twice as JSON."""
Encoding = Literal["float", "base64"]


class EmbeddingRequest(Body, kw_only=True, frozen=True):
    unsupported: ClassVar[Unsupported] = {
        "truncate_prompt_tokens": (),
        "add_special_tokens": (True,),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "use_activation": (True,),
        "normalize": (True,),
    }
    essential: ClassVar[frozenset[str]] = frozenset(unsupported) | {
        "messages",
        "instruction",
        "prompt",
    }
    model: Model | None = None
    input: Annotated[Prompts, prompts_meta(MAX_INPUTS)]
    encoding_format: Annotated[Encoding, ordered(Encoding)] = "float"
    dimensions: Dimensions | None = None
    prompt_name: Text | None = None
    user: Annotated[str, HARMLESS] | None = None
    priority: Priority | None = None


def embedding_to_generate(
    request: EmbeddingRequest, request_id: str, card: ModelCard
) -> tuple[Generate, ...]:
    """Raises `RequestFailed` (400)."""
    if card.embedding is None:
        why = f": {card.no_embedding}" if card.no_embedding else ""
        raise bad_request(
            f"{card.id} gives no embeddings{why}", "model", "embeddings_not_supported"
        )
    if request.dimensions is not None:
        between("dimensions", request.dimensions, 1, card.embedding.dimensions)
    beginning = beginning_of(request.prompt_name, card.embedding)
    prompts = prompts_of(request.input, "input", MAX_INPUTS)
    return requests_to_embed(
        [begun(prompt, beginning, request.prompt_name) for prompt in prompts], request_id
    )


def requests_to_embed(prompts: Iterable[Prompt], request_id: str) -> tuple[Generate, ...]:
    return tuple(
        Generate(
            request_id=f"{request_id}-{index}" if index else request_id,
            prompt=prompt,
            sampling=Sampling(temperature=0),
            max_tokens=1,
            embed=True,
        )
        for index, prompt in enumerate(prompts)
    )


def beginning_of(name: str | None, layout: EmbeddingLayout) -> str:
    """The text of a prompt of sentence-transformers. Raises `RequestFailed` (400)."""
    prompts, chosen = dict(layout.prompts), layout.default_prompt if name is None else name
    if chosen is None:
        return ""
    if chosen not in prompts:
        known = ", ".join(map(repr, prompts)) or "none"
        message = f"prompt_name {chosen!r} is none of this model's prompts: {known}"
        raise bad_request(message, "prompt_name", "invalid_value")
    return prompts[chosen]


def begun(prompt: Prompt, beginning: str, name: str | None) -> Prompt:
    """Raises `RequestFailed` (400) for tokens with a prompt that the request names."""
    if isinstance(prompt, TextPrompt):
        return attrs.evolve(prompt, text=beginning + prompt.text) if beginning else prompt
    if name is not None:
        message = "prompt_name precedes texts: send no token ids, or leave it out"
        raise bad_request(message, "prompt_name", "invalid_value")
    return prompt


def embeddings_body(
    request: EmbeddingRequest, model: str, vectors: Sequence[bytes], prompt_tokens: int
) -> Json:
    """`vectors`: little-endian float32, of length one."""
    data = [
        {"object": "embedding", "index": index, "embedding": _shown(request, vector)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def _shown(request: EmbeddingRequest, vector: bytes) -> str | msgspec.Raw:
    """Fewer dimensions are rescaled to length one (Matryoshka)."""
    numbers = np.frombuffer(vector, "<f4")
    if request.dimensions is not None and request.dimensions < len(numbers):
        numbers = numbers[: request.dimensions]
        numbers = numbers / max(float(np.linalg.norm(numbers)), 1e-12)
    if request.encoding_format == "base64":
        return b64encode(numbers.astype("<f4").tobytes()).decode()
    return msgspec.Raw(msgspec.json.encode(numbers.astype("<f8").tolist()))


EMBEDDING = titled(
    "Embedding",
    full(
        {
            "object": {"const": "embedding"},
            "index": COUNT,
            "embedding": either(array(NUMBER), TEXT),
        }
    ),
)
EMBEDDINGS = full(
    {
        "object": {"const": "list"},
        "data": array(EMBEDDING),
        "model": TEXT,
        "usage": full({"prompt_tokens": COUNT, "total_tokens": COUNT}),
    }
)
