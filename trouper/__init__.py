"""Trouper: an LLM server on MLX and Trio, and the runtime to embed.

async with trio.open_nursery() as nursery:
    runtime = await nursery.start(run_runtime, Settings())
    with await runtime.submit(Generate(request_id="1", prompt=TextPrompt("Once"))) as answer:
        async for delta in answer:
            print(delta.text, end="")
    await runtime.drain(10)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trouper.protocol.version import VERSION

if TYPE_CHECKING:
    from trouper.actors.runtime.answer import Answer
    from trouper.actors.runtime.model_manager import ModelManager
    from trouper.actors.runtime.runtime import Runtime
    from trouper.actors.runtime.served_models import Lease, ModelEntry
    from trouper.actors.runtime.watches import Health
    from trouper.protocol.batch import BatchStats
    from trouper.protocol.capabilities import Capabilities, SelfCheck
    from trouper.protocol.grammar import Grammar
    from trouper.protocol.health import ChannelStats
    from trouper.protocol.loading import Loading, LoadWatch
    from trouper.protocol.logits_processor import LogitsProcessor
    from trouper.protocol.model import AdapterCard, AdapterPlan, Engine, MemoryStats, ModelCard, Tokenizer
    from trouper.protocol.model_options import ModelOptions
    from trouper.protocol.problems import ModelUnusable, Problem, RequestFailed, SettingsInvalid
    from trouper.protocol.replies import Accepted, Delta, Embedded, Failed, Finished, Scored, Started, TokenLogprobs
    from trouper.protocol.requests import (
        CacheScope,
        ChatPrompt,
        Generate,
        InfillPrompt,
        TextPrompt,
        Timeouts,
        TokenPrompt,
    )
    from trouper.protocol.sampling import Sampling
    from trouper.protocol.setting_fields import ByteSize
    from trouper.protocol.settings import ServerSettings, Settings
    from trouper.run import run_models, run_runtime
    from trouper.storage.model_files import ModelFiles

__version__ = VERSION
__all__ = [
    "Accepted",
    "AdapterCard",
    "AdapterPlan",
    "Answer",
    "BatchStats",
    "ByteSize",
    "CacheScope",
    "Capabilities",
    "ChannelStats",
    "ChatPrompt",
    "Delta",
    "Embedded",
    "Engine",
    "Failed",
    "Finished",
    "Generate",
    "Grammar",
    "Health",
    "InfillPrompt",
    "Lease",
    "LoadWatch",
    "Loading",
    "LogitsProcessor",
    "MemoryStats",
    "ModelCard",
    "ModelEntry", "ModelFiles", "ModelManager", "ModelOptions",
    "ModelUnusable",
    "Problem",
    "RequestFailed",
    "Runtime",
    "Sampling",
    "Scored",
    "SelfCheck",
    "ServerSettings",
    "Settings",
    "SettingsInvalid",
    "Started",
    "TextPrompt",
    "Timeouts",
    "TokenLogprobs",
    "TokenPrompt",
    "Tokenizer",
    "run_models",
    "run_runtime",
]  # fmt: skip
_HOMES = {
    "trouper.actors.runtime.answer": ("Answer",),
    "trouper.actors.runtime.model_manager": ("ModelManager",),
    "trouper.actors.runtime.runtime": ("Runtime",),
    "trouper.actors.runtime.served_models": ("Lease", "ModelEntry"),
    "trouper.actors.runtime.watches": ("Health",),
    "trouper.protocol.logits_processor": ("LogitsProcessor",),
    "trouper.protocol.batch": ("BatchStats",),
    "trouper.protocol.capabilities": ("Capabilities", "SelfCheck"),
    "trouper.protocol.problems": ("ModelUnusable", "Problem", "RequestFailed", "SettingsInvalid"),
    "trouper.protocol.grammar": ("Grammar",),
    "trouper.protocol.health": ("ChannelStats",),
    "trouper.protocol.loading": ("Loading", "LoadWatch"),
    "trouper.protocol.model": ("AdapterCard", "AdapterPlan", "Engine", "MemoryStats", "ModelCard", "Tokenizer"),
    "trouper.protocol.model_options": ("ModelOptions",),
    "trouper.protocol.replies": (
        "Accepted",
        "Delta",
        "Embedded",
        "Failed",
        "Finished",
        "Scored",
        "Started",
        "TokenLogprobs",
    ),
    "trouper.protocol.requests": (
        "CacheScope",
        "ChatPrompt",
        "Generate",
        "InfillPrompt",
        "TextPrompt",
        "Timeouts",
        "TokenPrompt",
    ),
    "trouper.protocol.sampling": ("Sampling",),
    "trouper.protocol.setting_fields": ("ByteSize",),
    "trouper.protocol.settings": ("ServerSettings", "Settings"),
    "trouper.storage.model_files": ("ModelFiles",),
    "trouper.run": ("run_models", "run_runtime"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_FORMER_NAMES = {
    "BatchFacts": "BatchStats",
    "ChannelFacts": "ChannelStats",
    "Fleet": "ModelManager",
    "Listed": "ModelEntry",
    "MemoryFacts": "MemoryStats",
    "run_fleet": "run_models",
}
"""Names of earlier versions. They can still be imported, and are not listed."""


if not TYPE_CHECKING:  # To a checker every name would exist.

    def __getattr__(name: str) -> Any:
        """A public name is imported when it is first asked for (PEP 562): the whole takes a second, which the help of a
        command and each completion in a shell would wait for."""
        current = _FORMER_NAMES.get(name, name)
        if current not in _HOME_OF:
            raise AttributeError(f"module 'trouper' has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(_HOME_OF[current]), current)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
