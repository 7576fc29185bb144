"""Facts for agents from a model's files: context, chat template, tokenizer."""

from __future__ import annotations

import attrs

from trouper.engine.loading import checkpoint, tokenizer
from trouper.engine.loading.model_source import local
from trouper.engine.loading.template_probe import TOOL
from trouper.engine.loading.tokenizer import HubTokenizer
from trouper.protocol.problems import RequestFailed
from trouper.protocol.settings import Settings
from trouper.storage.context import context_length

QUESTION = {"role": "user", "content": "hello"}


@attrs.frozen(kw_only=True)
class AgentProbe:
    context_length: int
    tokenizer: HubTokenizer
    renders_tools: bool
    """Whether the chat template puts tools into the prompt."""


def probe_for_agents(settings: Settings) -> AgentProbe:
    """Raises `ModelUnusable`."""
    found = checkpoint.inspect(local(settings.model))
    loaded = tokenizer.load(
        found.directory,
        found.config,
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
    )
    length = settings.context_length or context_length(found.config)
    return AgentProbe(
        context_length=min(length, settings.max_kv_size or length),
        tokenizer=loaded,
        renders_tools=loaded.has_chat_template and _renders_tools(loaded),
    )


def _renders_tools(loaded: HubTokenizer) -> bool:
    try:
        return loaded.encode_chat([QUESTION], tools=[TOOL]) != loaded.encode_chat([QUESTION])
    except RequestFailed:
        return False
