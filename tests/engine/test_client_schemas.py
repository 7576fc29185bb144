"""Schemas as pydantic 2 and zod 4 write them: each is followed, and a value of the type may be
written. `schemas_of_zod.json` is what `z.toJSONSchema` of zod 4.4 returns."""

from __future__ import annotations

import datetime as dt
import enum
import json
from collections import deque
from decimal import Decimal
from fractions import Fraction
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path
from re import Pattern
from typing import Annotated, Any, Literal, NamedTuple, Union
from uuid import UUID

import pydantic
import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict

from tests.engine.test_followed_schema import allows
from tests.engine.test_grammar import tiny
from trouper import RequestFailed
from trouper.protocol.grammar import Grammar

ZOD: dict[str, Any] = json.loads((Path(__file__).parent / "schemas_of_zod.json").read_text())


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["dog"] = "dog"
    name: str | None = None


class Tree(BaseModel):
    value: int
    children: list[Tree] = []


class Point(NamedTuple):
    x: float
    y: float


class Movie(TypedDict, total=False):
    title: str
    year: int


class Loose(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int = Field(default=1, alias="größe", description="A field.", examples=[1])


PET = Annotated[Cat | Dog, Field(discriminator="kind")]
PYDANTIC: tuple[tuple[Any, Any], ...] = (
    (str, "é"),
    (int, -3),
    (float, 1.5),
    (bool, True),
    (None, None),
    (bytes, b"ab"),
    (Decimal, Decimal("1.50")),
    (Annotated[Decimal, Field(max_digits=5, decimal_places=2)], Decimal("12.30")),
    (Annotated[Decimal, Field(gt=0)], Decimal("0.1")),
    (complex, 1 + 2j),
    (Fraction, Fraction(1, 3)),
    (dt.datetime, dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)),
    (dt.date, dt.date(2026, 1, 2)),
    (dt.time, dt.time(3, 4, 5, tzinfo=dt.UTC)),
    (dt.timedelta, dt.timedelta(days=1, seconds=5)),
    (pydantic.AwareDatetime, dt.datetime(2026, 1, 2, tzinfo=dt.UTC)),
    (pydantic.PastDate, dt.date(2020, 1, 2)),
    (UUID, UUID(int=5)),
    (pydantic.UUID4, UUID("12345678-1234-4234-8234-123456789abc")),
    (pydantic.AnyUrl, pydantic.AnyUrl("ftp://example.com/a?b=c")),
    (pydantic.HttpUrl, pydantic.HttpUrl("https://example.com/")),
    (pydantic.PostgresDsn, pydantic.PostgresDsn("postgres://u:p@localhost:5432/db")),
    (pydantic.Base64Str, None),
    (pydantic.Json[list[int]], None),
    (pydantic.SecretStr, None),
    (pydantic.ByteSize, None),
    (pydantic.FilePath, None),
    (Path, Path("/a/b")),
    (Pattern[str], None),
    (IPv4Address, IPv4Address("10.0.0.1")),
    (IPv6Address, IPv6Address("::1")),
    (IPv4Network, IPv4Network("10.0.0.0/8")),
    (IPv6Network, IPv6Network("fe80::/10")),
    (IPv4Interface, IPv4Interface("10.0.0.1/8")),
    (Colour, Colour.RED),
    (Level, Level.HIGH),
    (Literal["a", 1, True] | None, 1),
    (Literal["only"], "only"),
    (str | None, None),
    (int | str | None, "x"),
    (Union[int, float], 0.5),  # noqa: UP007 - as older programs write it
    (Any, {"a": [1]}),
    (object, [1]),
    (list, [1, "x"]),
    (list[int], [1, 2]),
    (set[str], {"a"}),
    (frozenset[int], frozenset({1})),
    (Annotated[set[int], Field(min_length=1, max_length=3)], {1}),
    (deque[int], deque([1])),
    (tuple[int, str], (1, "a")),
    (tuple[int, ...], (1, 2)),
    (tuple[()], ()),
    (tuple[UUID, set[dt.date]], (UUID(int=1), {dt.date(2026, 1, 2)})),
    (dict, {"a": 1}),
    (dict[str, int], {"a": 1}),
    (dict[int, str], {1: "a"}),
    (dict[UUID, Decimal], {UUID(int=1): Decimal("1.5")}),
    (dict[Colour, int], {Colour.RED: 1}),
    (dict[Literal["a", "b"], int], {"b": 1}),
    (dict[Annotated[str, Field(pattern="^x[0-9]+$")], int], {"x1": 1}),
    (dict[Annotated[str, Field(min_length=2, max_length=4)], int], {"ab": 1}),
    (Annotated[dict[str, int], Field(min_length=1, max_length=2)], {"a": 1}),
    (Annotated[str, Field(min_length=1, max_length=5, pattern="^[a-z]+$")], "abc"),
    (Annotated[str, Field(pattern=r"^\+?[1-9]\d{1,14}$")], "+4912345"),
    (Annotated[int, Field(gt=0, le=10, multiple_of=5)], 5),
    (Annotated[int, Field(ge=-(2**63), le=2**63 - 1)], 2**63 - 1),
    (Annotated[int, Field(ge=0, le=2**64 - 1)], 2**62),
    (Annotated[float, Field(ge=0, lt=1)], 0.25),
    (Annotated[float, Field(allow_inf_nan=False, multiple_of=0.01)], 0.25),
    (pydantic.PositiveInt, 1),
    (pydantic.NonNegativeFloat, 0.5),
    (pydantic.StrictInt, 1),
    (pydantic.FiniteFloat, 2.5),
    (Annotated[list[str], Field(min_length=1, max_length=3)], ["a"]),
    (Cat, Cat()),
    (Dog, Dog(name="Rex")),
    (PET, Dog()),
    (list[PET], [Cat(), Dog()]),
    (Tree, Tree(value=1, children=[Tree(value=2)])),
    (Point, Point(1.0, 2.5)),
    (Movie, {"title": "M"}),
    (Loose, None),
    (pydantic.RootModel[list[int]], pydantic.RootModel[list[int]]([1])),
    (list[Annotated[Cat, Field(description="Described.", title="T")]], [Cat()]),
)


def test_a_value_of_each_type_of_pydantic_may_be_written() -> None:
    assert len(PYDANTIC) >= 60
    wrong = []
    for kind, value in PYDANTIC:
        adapter = TypeAdapter[Any](kind)
        schema = adapter.json_schema(mode="validation")
        text = adapter.dump_json(value).decode() if value is not None or kind is None else ""
        try:
            if text and not allows(schema, text):
                wrong.append((kind, text, schema))
            elif not text:
                compiled(schema)
        except RequestFailed as refused:
            wrong.append((kind, refused.problem.message, schema))
    assert wrong == []


def compiled(schema: Any) -> tuple[str, ...]:
    """The keywords of the schema that are dropped."""
    grammar = Grammar("json_schema", json.dumps(schema), "s", strict=False)
    return tiny().tokenizer.compile_grammar(grammar).ignored


def test_each_type_of_zod_is_followed() -> None:
    dropped = {name: compiled(schema) for name, schema in ZOD.items()}
    assert len(dropped) >= 60
    kept = {"format", "pattern", "uniqueItems", "oneOf", "propertyNames", "minimum", "maximum"}
    assert {path.rpartition(".")[2] for paths in dropped.values() for path in paths} <= kept


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("int", str(2**53 - 1)),
        ("recordEnum", '{"a":1,"b":2}'),
        ("partialRecord", '{"b":2}'),
        ("email", '"a@b.example"'),
        ("xorOverlap", '{"a":1}'),
        ("tupleRest", '["a",1,2]'),
        ("json", '{"a":[null]}'),
        ("set", '{"a":["x"]}'),
        ("uuid", '"12345678-1234-4234-8234-123456789abc"'),
    ],
)
def test_a_value_of_a_type_of_zod_may_be_written(name: str, text: str) -> None:
    assert allows(ZOD[name], text)
