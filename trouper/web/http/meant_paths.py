"""Corrects paths of a wrong base URL: `/v1` missing or twice, a slash too many, a whole endpoint as
the base URL."""

from __future__ import annotations

import re

from trouper.protocol.problems import shortened

ENDPOINTS = (
    r"chat/completions|completions|embeddings|rerank|score"
    r"|messages(?:/count_tokens)?|models(?:/.+)?"
    r"|files(?:/[^/]+(?:/content)?)?|batches(?:/[^/]+(?:/cancel)?)?"
    r"|responses(?:/[^/]+(?:/(?:cancel|input_items))?)?|requests/[^/]+/cancel"
)
BASES = r"(?:/(?:v1|openai|anthropic|api(?=/v1/)))*"

# Anthropic's own batches, below /messages, differ from OpenAI's.
BELOW_V1 = re.compile(
    rf"{BASES}(?:/(?:chat/completions|completions|embeddings|messages(?!/batches))(?:/v1)?)?"
    rf"/({ENDPOINTS})"
)
AT_ROOT = re.compile(
    r"(?:/v1)*"
    r"(/(?:tokenize|detokenize|infill|health|livez|readyz|metrics|server_info|openapi\.json|docs))"
)

# Probes of SGLang's routers and launchers, and the path where Cohere's newer clients rerank.
OTHERS = {
    "/health_generate": "/readyz",
    "/get_server_info": "/server_info",
    "/get_model_info": "/server_info",
    "/model_info": "/server_info",
    "/v2/rerank": "/v1/rerank",
}
SLASHES = re.compile("//+")
OLLAMA = re.compile(
    r"/api/(?:chat|generate|tags|show|ps|version|embed|embeddings"
    r"|pull|push|create|copy|delete|blobs/.*)"
)


def meant_path(path: str) -> str:
    squeezed = SLASHES.sub("/", path).rstrip("/")
    if squeezed in OTHERS:
        return OTHERS[squeezed]
    if match := AT_ROOT.fullmatch(squeezed):
        return match[1]
    if match := BELOW_V1.fullmatch(squeezed):
        return f"/v1/{match[1]}"
    return path


def is_ollama(path: str) -> bool:
    """Whether the path belongs to Ollama's API, whose clients read `error` as a text."""
    return OLLAMA.fullmatch(path.rstrip("/")) is not None


def not_found(path: str, host_url: str) -> str:
    base = host_url.rstrip("/")
    missing = f"there is nothing at {shortened(path)}"
    if is_ollama(path):
        return (
            f"{missing}: Ollama's own API is not served; take the client's OpenAI-compatible "
            f"provider with {base}/v1"
        )
    if path.startswith("/v1/"):
        return f"{missing}; {base}/docs lists the endpoints that this server has"
    return f"{missing}; OpenAI's clients take {base}/v1 as their base URL, Anthropic's {base}"
