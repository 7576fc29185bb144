"""Thinking under the names that a chat template reads.

Requests switch thinking by `enable_thinking` and `reasoning_effort`; some makers read other names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinja2 import Environment, TemplateError, meta
from jinja2.ext import loopcontrols

SWITCH, EFFORT = "enable_thinking", "reasoning_effort"
OTHER_SWITCHES: Mapping[str, tuple[Any, Any]] = {
    "thinking": (False, True),
    "reasoning": (False, True),
    "thinking_mode": ("disabled", "enabled"),
    "thinking_budget": (0, -1),
}
"""Values for off and on: DeepSeek V3.1, Granite, Kimi and Hermes 4; Cohere's North; MiniMax M3;
Seed-OSS, whose budget of -1 has no end."""
EFFORTS = {"minimal": "low", "xhigh": "max"}
"""Kimi K3's names, in `thinking_effort`."""
GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""A tag of transformers' own."""


def rename_switches(template: object, options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` with the template's own names of thinking; a name that the request has stays.
    `template`: text, or texts by name."""
    texts = template.values() if isinstance(template, Mapping) else (template,)
    read = frozenset[str]().union(*(_variables_of(str(text)) for text in texts))
    added: dict[str, Any] = {}
    if isinstance(enabled := options.get(SWITCH), bool) and SWITCH not in read:
        switches = OTHER_SWITCHES.items()
        added = {name: values[enabled] for name, values in switches if name in read}
    if isinstance(effort := options.get(EFFORT), str) and "thinking_effort" in read:
        added["thinking_effort"] = EFFORTS.get(effort, effort)
    return added | dict(options)


@lru_cache(maxsize=32)
def _variables_of(template: str) -> frozenset[str]:
    try:
        environment = Environment(extensions=[loopcontrols])  # noqa: S701 - nothing is rendered
        parsed = environment.parse(GENERATION.sub("", template))
        return frozenset(meta.find_undeclared_variables(parsed))
    except (TemplateError, RecursionError):
        return frozenset()
