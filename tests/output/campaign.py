"""Random texts in each format, cut at random: streamed = complete, and every call has valid
arguments. `python -m tests.output.campaign [TEXTS] [SEED] [FORMATS]`"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence

from tests.output.samples import NAMES, arguments_of, pieces_of, played, random_text


def check(name: str, seed: int) -> str | None:
    """Play one text. Returns what is wrong."""
    drawn = random.Random(seed)
    text, cut, thinks = random_text(name, drawn), drawn.random() < 0.2, drawn.random() < 0.3
    complete = played(name, [text], cut=cut, thinks=thinks)
    if played(name, pieces_of(text, drawn), cut=cut, thinks=thinks) != complete:
        return f"{name} {seed}: streamed differs from complete: {text!r}"
    if played(name, list(text), cut=cut, thinks=thinks) != complete:
        return f"{name} {seed}: single characters differ from complete: {text!r}"
    for arguments in () if cut else arguments_of(complete):
        try:
            assert isinstance(json.loads(arguments), dict)
        except (ValueError, AssertionError):
            return f"{name} {seed}: arguments are no object: {arguments!r} of {text!r}"
    return None


def main(texts: int, first_seed: int, names: Sequence[str]) -> int:
    faults = 0
    for name in names:
        found = [
            fault for seed in range(first_seed, first_seed + texts) if (fault := check(name, seed))
        ]
        # A command's output
        line = f"{name}: {texts} texts, {len(found)} faults"
        print(line, *found[:3], sep="\n  ", flush=True)  # noqa: T201
        faults += len(found)
    return 1 if faults else 0


if __name__ == "__main__":
    count, seed, *chosen = [*sys.argv[1:], *("1000", "0")[len(sys.argv) - 1 :]]
    sys.exit(main(int(count), int(seed), chosen or NAMES))
