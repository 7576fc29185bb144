"""What a setting may be, whoever gives it: a flag, a file, or a program."""

from __future__ import annotations

import re
from typing import Any

import attrs
import pytest

from trouper import ByteSize, ServerSettings, Settings, SettingsInvalid
from trouper.protocol.names import require_names

FIELDS = [(cls, field) for cls in (Settings, ServerSettings) for field in attrs.fields(cls)]
REAL = [(cls, field.name) for cls, field in FIELDS if isinstance(field.default, float)]
NUMBERS = [
    (cls, field.name)
    for cls, field in FIELDS
    if isinstance(field.default, float | int) and not isinstance(field.default, bool)
]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize(
    ("cls", "name"), REAL, ids=lambda part: part if isinstance(part, str) else ""
)
def test_a_number_is_finite(cls: Any, name: str, value: float) -> None:
    """0 says that there is no limit, where there can be none."""
    with pytest.raises(SettingsInvalid, match=f"^{flag(name)} must be .*not {value:g}$") as raised:
        cls(**{name: value})
    assert raised.value.flag == flag(name)


@pytest.mark.parametrize(
    ("cls", "name"), NUMBERS, ids=lambda part: part if isinstance(part, str) else ""
)
def test_a_text_that_is_no_number_is_refused_by_name(cls: Any, name: str) -> None:
    with pytest.raises(SettingsInvalid, match=f"^{flag(name)}"):
        cls(**{name: "some"})


def test_a_program_may_give_a_size_as_text() -> None:
    given: Any = {"ssd_max_bytes": "1GB", "cache_memory": "4GiB", "ssd_keep_free": 5}
    settings = Settings(**given)
    assert (settings.ssd_max_bytes, settings.cache_memory, settings.ssd_keep_free) == (
        10**9,
        2**32,
        5,
    )
    assert isinstance(settings.ssd_keep_free, ByteSize)


@pytest.mark.parametrize("text", ["", "GB", "1XB", "-1GB", "9" * 400, "1e9", "1..5GB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        ByteSize(text)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": ""}, "--model is empty"),
        ({"model": "  "}, "--model is empty"),
        ({"max_kv_size": 2}, "--max-kv-size must be at least 32, not 2"),
        ({"decode_stall_ms": 1e9}, "--decode-stall-ms must be between 1 and 60000, not 1e"),
        ({"kv_group_size": 33}, "--kv-group-size must be 32, 64 or 128, not 33"),
        ({"speculation": "draft_model"}, "--speculation draft_model needs --draft-model"),
        (
            {"speculation": "on"},
            "--speculation must be auto, ngram, draft_model, mtp or off, not on",
        ),
        ({"spec_ngram_min": 9}, "--spec-ngram-min must not be more than --spec-ngram-max"),
    ],
)
def test_what_cannot_be(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsInvalid, match=said):
        Settings(**given)


@pytest.mark.parametrize(
    ("aliases", "said"),
    [
        (("foo=bar",), "--served-model-name foo=bar: 'bar' is none of --model (a, b=c)"),
        (("a=b=d",), "'b=d' is none of --model"),
        (("foo=",), "'' is none of --model"),
        (("",), "--served-model-name '' has no name"),
        (("=a",), "--served-model-name '=a' has no name"),
        (("x=a", "x=b=c"), "--served-model-name x is given to two models"),
    ],
)
def test_a_name_without_effect_is_refused(aliases: tuple[str, ...], said: str) -> None:
    with pytest.raises(SettingsInvalid, match=re.escape(said)):
        require_names(["a", "b=c"], aliases)


def test_names_that_have_an_effect() -> None:
    require_names(["a", "b=c"], ("foo", "bar=a", "My Model=b=c", "foo=a"))
    require_names(["a"], ())
