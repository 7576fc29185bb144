"""The classes that programs ask an object of, each with a value that the scripted model writes."""

import datetime as dt
import enum
from decimal import Decimal
from ipaddress import IPv4Address
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple
from uuid import UUID

import loop
from pydantic import AnyUrl, AwareDatetime, BaseModel, ConfigDict, Field

PROMPT = "Write this: "
"""Stands before the JSON that the scripted model writes."""


class Colour(enum.Enum):
    RED = "red"
    BLUE = "light blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Point(NamedTuple):
    x: float
    y: float


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str | None = None


PET = Annotated[Cat | Dog, Field(discriminator="kind")]


class Tree(BaseModel):
    value: int
    children: list["Tree"] = []


class Folder(BaseModel):
    name: str
    entries: list["Folder | File"]


class File(BaseModel):
    size: int
    parent: Folder | None = None


class Sets(BaseModel):
    tags: set[str]
    numbers: frozenset[int]
    few: Annotated[set[Colour], Field(min_length=1, max_length=2)]


class Tuples(BaseModel):
    pair: tuple[int, str]
    many: tuple[float, ...]
    points: list[Point]


class Unions(BaseModel):
    either: int | str
    perhaps: bool | None
    mixed: list[int | str | None]
    shape: Cat | list[int]


class Discriminated(BaseModel):
    pet: PET
    pets: list[PET]
    by_name: PET | None = None


class Recursive(BaseModel):
    tree: Tree
    folder: Folder


class Decimals(BaseModel):
    price: Decimal
    rate: Annotated[Decimal, Field(max_digits=6, decimal_places=2)]
    share: Annotated[Decimal, Field(ge=0, le=1)]


class Times(BaseModel):
    moment: dt.datetime
    zoned: AwareDatetime
    day: dt.date
    hour: dt.time
    span: dt.timedelta


class Identifiers(BaseModel):
    one: UUID
    others: list[UUID]
    address: IPv4Address
    link: AnyUrl


class Integers(BaseModel):
    signed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
    unsigned: Annotated[int, Field(ge=0, le=2**64 - 1)]
    exclusive: Annotated[int, Field(gt=-(2**53), lt=2**53)]
    free: int


class Choices(BaseModel):
    word: Literal["yes", "no"]
    number: Literal[1, 2, 3]
    any_kind: Literal["a", 1, True] | None
    colour: Colour
    level: Level


class Numbers(BaseModel):
    count: Annotated[int, Field(gt=0, le=10)]
    fives: Annotated[int, Field(multiple_of=5)]
    part: Annotated[float, Field(ge=0, lt=1)]
    cents: Annotated[float, Field(multiple_of=0.01)]


class Strings(BaseModel):
    code: Annotated[str, Field(pattern=r"^[A-Z]{2}-\d{3,4}$")]
    phone: Annotated[str, Field(pattern=r"^\+?[1-9]\d{1,14}$")]
    short: Annotated[str, Field(min_length=1, max_length=8)]
    raw: bytes


class Dicts(BaseModel):
    words: dict[str, int]
    numbers: dict[int, str]
    identifiers: dict[UUID, Decimal]
    colours: dict[Colour, int]
    patterned: dict[Annotated[str, Field(pattern="^x[0-9]+$")], list[int]]
    free: dict[str, Any]


class Street(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(description="As on the sign.", examples=["Karl Johans gate"])
    number: int = 1


class City(BaseModel):
    """A city and its streets."""

    streets: list[Street]
    main: Street | None = None


class Nested(BaseModel):
    city: City
    by_name: dict[str, Street]


class Defaults(BaseModel):
    name: str
    nick: str | None = None
    tags: list[str] = []
    colour: Colour = Colour.RED
    street: Street = Street(name="Main")
    since: dt.date | None = dt.date(2026, 1, 2)


UTC = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
ONE, TWO = UUID(int=1), UUID("12345678-1234-4234-8234-123456789abc")
STREET = Street(name="Göteborgs gata", number=7)
VALUES = {
    "sets": Sets(tags={"a"}, numbers=frozenset({-3}), few={Colour.BLUE}),
    "tuples": Tuples(pair=(1, "a"), many=(1.5, 2.0), points=[Point(0.5, -1.0)]),
    "unions": Unions(either="x", perhaps=None, mixed=[1, "a", None], shape=[1, 2]),
    "discriminated unions": Discriminated(
        pet=Dog(kind="dog", name="Rex"), pets=[Cat(kind="cat", lives=9), Dog(kind="dog")]
    ),
    "recursion": Recursive(
        tree=Tree(value=1, children=[Tree(value=2, children=[Tree(value=3)])]),
        folder=Folder(name="/", entries=[File(size=3), Folder(name="a", entries=[])]),
    ),
    "decimals": Decimals(price=Decimal("12.50"), rate=Decimal("-0.25"), share=Decimal("0.5")),
    "times": Times(
        moment=UTC,
        zoned=UTC,
        day=UTC.date(),
        hour=UTC.timetz(),
        span=dt.timedelta(days=1),
    ),
    "identifiers": Identifiers(
        one=ONE, others=[TWO], address="10.0.0.1", link="https://example.com/a?b=c"
    ),
    "64-bit integers": Integers(
        signed=-(2**62), unsigned=2**63 - 1, exclusive=2**53 - 1, free=-(10**18)
    ),
    "literals and enums": Choices(
        word="no", number=3, any_kind="a", colour=Colour.BLUE, level=Level.HIGH
    ),
    "constrained numbers": Numbers(count=10, fives=-15, part=0.125, cents=0.25),
    "strings": Strings(code="NO-123", phone="+4712345", short='"ø\n', raw=b"ab"),
    "dicts": Dicts(
        words={"a": 1},
        numbers={7: "x"},
        identifiers={TWO: Decimal("1.5")},
        colours=dict.fromkeys(Colour, 1),
        patterned={"x1": [1]},
        free={"a": [1, None]},
    ),
    "nested models": Nested(
        city=City(streets=[STREET, STREET], main=STREET), by_name={"first": STREET}
    ),
    "defaults": Defaults(name="Ada"),
}
OPEN = {"dicts", "nested models"}
"""Classes that OpenAI's strict mode has no schema for: their objects have any names."""
STRICT = [name for name in VALUES if name not in OPEN | {"sets"}]
WEATHER = "It is sunny."


def question(value):
    return PROMPT + value.model_dump_json()


def check(value, answer):
    """Instructor's answers have a class of its own."""
    assert isinstance(answer, type(value)) or type(answer).__name__ == type(value).__name__, answer
    assert answer.model_dump() == value.model_dump(), f"{answer} in place of {value}"


def each(label, streamed, function, names=VALUES, limits=MappingProxyType({})):
    """Run one case for each class: `function` takes the value, and returns the answer. `limits`:
    the classes that the library itself cannot ask for, with the reason."""
    for name in names:
        loop.case(
            f"{label}: {name}",
            streamed,
            lambda n=name: check(VALUES[n], function(VALUES[n])),
            limits.get(name, ""),
        )
