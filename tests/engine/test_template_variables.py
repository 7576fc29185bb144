"""Thinking is switched under the name that the template reads."""

from __future__ import annotations

from typing import Any

import pytest

from trouper.engine.loading.tokenizer_files import rename_switches

ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}


@pytest.mark.parametrize(
    ("template", "off", "on"),
    [
        ("{% if thinking is defined and thinking %}{% endif %}", ("thinking", False), True),
        (
            "{% if not thinking_budget is defined %}{% set thinking_budget = -1 %}{% endif %}",
            ("thinking_budget", 0),
            -1,
        ),
        (
            "{% if thinking_mode == 'enabled' %}{% endif %}",
            ("thinking_mode", "disabled"),
            "enabled",
        ),
        (
            "{% set reasoning = reasoning if reasoning is not undefined else true %}",
            ("reasoning", False),
            True,
        ),
        (
            (
                "{% generation %}{% for m in messages %}{% break %}{% endfor %}"
                "{%- endgeneration -%}{{ thinking }}"
            ),
            ("thinking", False),
            True,
        ),
    ],
)
def test_a_switch_has_the_templates_name(template: str, off: tuple[str, Any], on: object) -> None:
    name, value = off
    assert rename_switches(template, OFF) == OFF | {name: value}
    assert rename_switches(template, ON) == ON | {name: on}
    own = {"enable_thinking": False, name: "own"}
    assert rename_switches(template, own) == own, "the request's own value stays"
    assert rename_switches({"default": "", "tool_use": template}, ON) == ON | {name: on}


@pytest.mark.parametrize(
    "template",
    [
        "{% if enable_thinking and thinking %}{% endif %}",
        "{# thinking_budget #}{{ messages }}",
        "{% for thinking in messages %}{{ thinking }}{% endfor %}",
        "{% if %}",
    ],
)
def test_other_templates_get_what_the_request_says(template: str) -> None:
    assert rename_switches(template, OFF) == OFF


def test_efforts_have_the_templates_names() -> None:
    template = "{% if thinking_effort is undefined %}{% endif %}"
    for effort, name in (("xhigh", "max"), ("minimal", "low"), ("high", "high")):
        options = {"reasoning_effort": effort}
        assert rename_switches(template, options)["thinking_effort"] == name
