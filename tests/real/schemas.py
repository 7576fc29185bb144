"""Random JSON schemas: every keyword that llguidance knows, nested in the ways that clients nest
them.

hypothesis-jsonschema draws values of schemas, not schemas, and so does everything else that is kept
up.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

PATTERNS = ("^[a-z]{2,4}$", "^\\d+-\\d\\d$", "[A-F]", "^(on|off)$", "^a.c$", "\\S", "^$")
FORMATS = (
    "date",
    "time",
    "date-time",
    "uuid",
    "email",
    "ipv4",
    "ipv6",
    "hostname",
    "uri",
    "duration",
)
VALUES: tuple[Any, ...] = (
    1,
    0,
    -7,
    2.5,
    "a",
    "",
    'say "x"\n',
    "é🫖",
    None,
    True,
    {"k": [1, "v"]},
    [],
    [None, {}],
)
NAMES = ("a", "b", "name", "x y", 'q"t', "é", "$ref", "a-b", "0", "type")
TYPES = ("string", "integer", "number", "boolean", "null")


class Drawn:
    """One schema from a seed."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def schema(self, depth: int = 3) -> Schema:
        kinds: tuple[Callable[[int], Schema], ...] = (
            self.object,
            self.object,
            self.array,
            self.mixture,
        )
        return self.dice.choice(kinds)(depth - 1) if depth else self.leaf()

    def inner(self, depth: int) -> Schema:
        return self.leaf() if depth == 0 or self.dice.random() < 0.4 else self.schema(depth)

    def leaf(self) -> Schema:
        dice = self.dice
        some = dice.sample(VALUES, dice.randint(1, 4))
        return dice.choice(
            (
                {"type": "string"} | self.between("minLength", "maxLength", 0, 9),
                {"type": "string", "pattern": dice.choice(PATTERNS)},
                {"type": "string", "format": dice.choice(FORMATS)},
                {"type": "integer"} | self.between("minimum", "maximum", -1000, 1000),
                {"type": "integer"} | self.between("exclusiveMinimum", "exclusiveMaximum", -9, 9),
                {"type": "integer", "multipleOf": dice.choice((2, 7, 10))},
                {"type": "number"} | self.between("minimum", "maximum", -20, 20),
                {"type": "number"} | self.between("exclusiveMinimum", "exclusiveMaximum", -2, 2),
                {"type": "number", "multipleOf": dice.choice((0.5, 3))},
                {"type": "boolean"},
                {"type": "null"},
                {"enum": some},
                {"const": some[0]},
                {"type": dice.sample(TYPES, dice.randint(1, 3))},
            )
        )

    def between(self, low: str, high: str, least: int, most: int) -> Schema:
        """A range that is not empty; either end may be open."""
        middle = (least + most) // 2
        ends = {
            low: self.dice.randint(least, middle - 1),
            high: self.dice.randint(middle + 1, most),
        }
        return {name: end for name, end in ends.items() if self.dice.random() < 0.8}

    def object(self, depth: int) -> Schema:
        dice = self.dice
        names = dice.sample(NAMES, dice.randint(0, 4))
        schema: Schema = {
            "type": "object",
            "properties": {name: self.inner(depth) for name in names},
        }
        if names:
            schema["required"] = dice.sample(names, dice.randint(0, len(names)))
        match dice.choice(("closed", "closed", "open", "typed", "patterns", "counted")):
            case "closed":
                schema["additionalProperties"] = False
            case "typed":
                schema["additionalProperties"] = self.leaf()
            case "patterns":
                schema |= {
                    "patternProperties": {"^z[0-9]$": self.leaf()},
                    "additionalProperties": False,
                }
            case "counted":
                # llguidance wants every name to be required then; whoever forgets it is told.
                if dice.random() < 0.8:
                    schema["required"] = names
                schema |= {"minProperties": len(names), "maxProperties": len(names) + 1}
        return schema

    def array(self, depth: int) -> Schema:
        dice = self.dice
        least = dice.randint(0, 2)
        schema: Schema = {
            "type": "array",
            "minItems": least,
            "maxItems": least + dice.randint(0, 3),
        }
        if dice.random() < 0.6:
            return schema | {"items": self.inner(depth)}
        schema["prefixItems"] = [self.inner(depth) for _ in range(dice.randint(1, 3))]
        return schema | (
            {"items": self.inner(depth)} if dice.random() < 0.5 else {"items": False, "minItems": 0}
        )

    def mixture(self, depth: int) -> Schema:
        """References name the root, so what is nested has none."""
        dice = self.dice
        match dice.choice(("anyOf", "oneOf", "allOf")):
            case "anyOf":
                return {"anyOf": [self.inner(depth) for _ in range(dice.randint(1, 3))]}
            case "oneOf":
                return {"oneOf": [{"type": "null"}, self.object(depth)]}
            case _:
                return {"allOf": [self.inner(depth), {"description": "anything"}]}

    def whole(self) -> Schema:
        """One in five refers to itself."""
        match self.dice.randrange(10):
            case 0:
                return {
                    "$defs": {"it": self.schema(2)},
                    "type": "array",
                    "items": {"$ref": "#/$defs/it"},
                    "maxItems": 3,
                }
            case 1:
                following = {"anyOf": [{"type": "null"}, {"$ref": "#"}]}
                node: Schema = {
                    "type": "object",
                    "properties": {"v": self.leaf(), "next": following},
                }
                return node | {"required": ["v", "next"], "additionalProperties": False}
        return self.schema()
