"""What the programs of all clients share: the tools, what must have been called, and a line for
each case.

A program runs in an environment that has its client and nothing of ours: `PYTHON program.py URL`,
URL without /v1.
"""

import json
import sys
import traceback

URL = sys.argv[1]
QUESTION = "What do the scales say?"
SYSTEM = "You weigh things."
CALLS = [
    ("weigh", {"place": 'Oslo "Ø"\n<north>', "options": {"unit": "g", "counts": [1, 2]}}),
    ("weigh", {"place": "Rome", "options": {"unit": "kg", "counts": []}}),
    ("note", {"text": "2 < 3 & that is all"}),
]
FINAL = "All done: "
OPTIONS = {
    "type": "object",
    "properties": {
        "unit": {"type": "string"},
        "counts": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["unit", "counts"],
    "additionalProperties": False,
}
WEIGH = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "options": OPTIONS},
    "required": ["place", "options"],
    "additionalProperties": False,
}
NOTE = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}
SCHEMAS = {"weigh": WEIGH, "note": NOTE}
MAX_TURNS = 8


class Tools:
    """Executes calls, and knows what was called."""

    def __init__(self):
        self.called = []

    def run(self, name, arguments):
        self.called.append((name, arguments))
        if name == "weigh":
            return f"{arguments['place'].split()[0]}={sum(arguments['options']['counts'])}"
        return "noted"

    def weigh(self, place, options):
        options = options if isinstance(options, dict) else json.loads(options.model_dump_json())
        return self.run("weigh", {"place": place, "options": options})

    def note(self, text):
        return self.run("note", {"text": text})

    def check(self, text):
        """The right calls were executed once each, and the last text has their results."""
        assert sorted(map(repr, self.called)) == sorted(map(repr, CALLS)), f"called {self.called}"
        assert FINAL in text, f"the last text is {text!r}"
        assert all(result in text for result in ("Oslo=3", "Rome=0", "noted")), (
            f"the last text is {text!r}"
        )


def check_ids(ids):
    """Ids of calls: none is empty, none comes twice."""
    assert all(ids) and len(set(ids)) == len(ids) == len(CALLS), f"ids of calls: {ids}"


def check_usage(prompt, completion, total=None):
    assert prompt and prompt > 20 and completion and completion > 5, f"usage: {prompt} {completion}"
    assert total is None or total == prompt + completion, (
        f"usage: {prompt} + {completion} is not {total}"
    )


def overflows(error, ask):
    """`ask` raises the client's own `error` for a full context."""
    try:
        ask("word " * 150_000)
    except error:
        return
    raise AssertionError("an answer to a prompt that is longer than the context")


def case(name, streamed, function, limit=""):
    """Run one case and print how it went. `limit`: why the library itself cannot do it."""
    line = {"case": name, "streamed": streamed, "ok": True, "detail": ""}
    try:
        function()
        if limit:
            line |= {"ok": False, "detail": f"it is no longer so that {limit}"}
    except BaseException as error:
        where = traceback.format_exc().strip().splitlines()
        detail = f"{type(error).__name__}: {error}"[:600]
        line |= {"ok": False, "detail": detail, "trace": where[-14:], "limit": limit}
    print("\nCASE " + json.dumps(line), flush=True)  # Behind what a client has printed.
