"""The checks of `trouper doctor --for agents`."""

from __future__ import annotations

from collections.abc import Iterator

from rich.filesize import decimal

from trouper.cli.agents.agent import first_prompts
from trouper.cli.doctor_checks import Check, CheckedSettings, Finding, memory, model
from trouper.protocol.names import EMBEDDED
from trouper.protocol.settings import Settings
from trouper.protocol.suggested_models import AGENT_TOKENS, SUGGESTED, SuggestedModel, that_fit

LARGER_CONTEXT = f"give a --model with at least {AGENT_TOKENS:,} tokens of context"


def context(checked: CheckedSettings) -> Iterator[Finding]:
    from trouper.engine.probe import probe_for_agents

    longest = max(first.tokens for first in first_prompts().values())
    for name, settings in _local(checked):
        length = probe_for_agents(settings).context_length
        message = f"{name}: {length:,} tokens of context"
        if length < AGENT_TOKENS:
            yield Finding(
                "warn",
                f"{message}; first prompts of coding agents have up to {longest:,}",
                LARGER_CONTEXT,
            )
        else:
            yield Finding("ok", message)


def template(checked: CheckedSettings) -> Iterator[Finding]:
    from trouper.engine.probe import probe_for_agents

    for name, settings in _local(checked):
        probed = probe_for_agents(settings)
        if not probed.tokenizer.has_chat_template:
            yield Finding(
                "fail", f"{name} has no chat template: conversations are refused", _remedy(checked)
            )
            continue
        if (fault := probed.tokenizer.template.fault) is not None:
            yield Finding(
                "fail",
                f"{name}: the chat template does not render a question ({fault})",
                _remedy(checked),
            )
            continue
        if not probed.renders_tools:
            yield Finding(
                "warn", f"{name}: the chat template has no place for tools", _remedy(checked)
            )
        else:
            yield Finding("ok", f"{name}: the chat template takes tools")
        for change, text in probed.tokenizer.template.lines:
            yield Finding("ok", f"{name}: messages are adapted to the template: {change}: {text}")


def parsers(checked: CheckedSettings) -> Iterator[Finding]:
    from trouper.engine.probe import probe_for_agents
    from trouper.web.serving.tool_support import can_call_tools, why_not  # Imports the HTTP server.

    for name, settings in _local(checked):
        words = probe_for_agents(settings).tokenizer
        if can_call_tools(words):
            yield Finding(
                "ok", f"{name}: tool calls are parsed as {words.tool_parser} (--tool-parser)"
            )
        else:
            reason = why_not(name, words)
            message = f"{reason}: agents get plain text, and only forced calls work"
            yield Finding("warn", message, _remedy(checked))
        reasoning = (
            "none" if words.reasoning_parser is None else f"parsed as {words.reasoning_parser}"
        )
        yield Finding("ok", f"{name}: reasoning: {reasoning} (--reasoning-parser)")


def agent_memory(checked: CheckedSettings) -> Iterator[Finding]:
    from trouper.engine import probe

    for name, settings in _local(checked):
        fit, room = probe.fit(settings), _room(settings)
        needed = fit.weights_bytes + fit.token_bytes * AGENT_TOKENS
        message = (
            f"{name}: {decimal(needed)} for weights and {AGENT_TOKENS:,} tokens, "
            f"{decimal(int(room))} may be used"
        )
        if needed > room:
            yield Finding("warn", message, f"give --kv-bits 8, or {_remedy(checked)}")
        else:
            yield Finding("ok", message)


def suggested(checked: CheckedSettings) -> Iterator[Finding]:
    float32, fitting = _float32(), _fitting(checked)
    for candidate in fitting:
        yield Finding("ok", f"{_described(candidate, float32)}: fits")
    too_large = [candidate for candidate in SUGGESTED if candidate not in fitting]
    if too_large:
        names = ", ".join(
            f"{one.name} ({decimal(one.needed_bytes(float32=float32))})" for one in too_large
        )
        yield Finding("ok", f"too large for this device: {names}")


def _described(candidate: SuggestedModel, float32: bool) -> str:
    needed = decimal(candidate.needed_bytes(float32=float32))
    return (
        f"{candidate.name}: {decimal(candidate.weights_bytes)} to download, {needed} with "
        f"{AGENT_TOKENS:,} tokens, "
        f"context {candidate.context_length:,}, calls as {candidate.calls}"
    )


def _local(checked: CheckedSettings) -> Iterator[tuple[str, Settings]]:
    from trouper.engine import probe

    for settings in checked.models:
        if probe.is_here(settings.model):
            yield settings.model or EMBEDDED, settings


def _remedy(checked: CheckedSettings) -> str:
    fitting = _fitting(checked)
    if not fitting:
        return "use a machine with more memory: no suggested model fits this one"
    return f"trouper serve --model {fitting[0].name}"


def _fitting(checked: CheckedSettings) -> tuple[SuggestedModel, ...]:
    return that_fit(_room(checked.models[0]), float32=_float32())


def _room(settings: Settings) -> float:
    from trouper.engine import probe

    return probe.device_stats().memory_bytes * settings.memory_fraction


def _float32() -> bool:
    from trouper.engine import probe

    return probe.device_stats().is_cpu


CHECKS_FOR_AGENTS: dict[str, Check] = {
    "memory": memory,
    "model": model,
    "context": context,
    "template": template,
    "parsers": parsers,
    "40k tokens": agent_memory,
    "suggested": suggested,
}
