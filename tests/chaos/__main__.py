"""`python -m tests.chaos [SEEDS [FIRST]] [--until HH:MM] [--ranks-every N]`: combined faults on
real servers, one line for each seed.

SIGKILL, SIGSTOP, a full disk, a slow disk, a clock that is moved, a limit on descriptors, SIGKILL
of the process that decodes images, each at a moment that the seed chooses, one to three at a time,
while clients ask for known answers, also about images, of two models of which one at a time is
loaded; every eighth seed a rank is lost. A server serves one seed
after another until a promise is broken; then the next seed begins with a new one and an empty
directory.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import attrs
import trio

from tests.chaos.faults import drawn
from tests.chaos.house import FIRST, SECOND, SPLIT, House, described, models, small_disk
from tests.chaos.playing import Seen, drained, play
from tests.chaos.rank_loss import lose
from tests.soak.servers import group
from tests.soak.wishes import Question, questions

FRESH_EVERY = 10
"""Seeds of one server: then it is drained, and the next one finds its directory."""
Known = dict[str, list[Question]]


def known_answers(
    directories: dict[str, Path], place: Path, count: int, names: Sequence[str]
) -> Known:
    """From servers that keep nothing."""
    found: Known = {}
    for name in names:
        flags = (
            "--model",
            str(directories[name]),
            "--served-model-name",
            name,
            "--self-check",
            "off",
        )
        with group(f"quiet-{name}", place, flags, quiet=True) as served:
            found[name] = trio.run(questions, served.port, described(name), count, Random(7))
    return found


@attrs.define
class Campaign:
    """Plays seeds, on a house that is kept while no promise is broken."""

    place: Path
    directories: dict[str, Path]
    known: Known
    broken: dict[int, list[str]] = attrs.field(factory=dict)
    outcomes: Counter[str] = attrs.field(factory=Counter)
    _house: House | None = None
    _open: ExitStack = attrs.field(factory=ExitStack)
    _houses: int = 0

    def seed(self, seed: int, *, ranks: bool) -> str:
        """What was done and came of it, in one line."""
        began = time.monotonic()
        try:
            done, seen = self._lose(seed) if ranks else self._play(seed)
        except (Exception, ExceptionGroup) as error:  # noqa: BLE001  A house that cannot be asked breaks promises of any kind.
            done, seen = (
                ", ".join(map(str, drawn(Random(seed)))),
                Seen(broken=[f"{type(error).__name__}: {_reasons(error)}"]),
            )
        self.outcomes += seen.outcomes
        if seen.broken:
            self.broken[seed] = seen.broken
            self.leave()
        told = ", ".join(f"{count} {what}" for what, count in seen.outcomes.most_common())
        verdict = "; ".join(dict.fromkeys(seen.broken)) or "held"
        return f"seed {seed}: {done}: {told}: {time.monotonic() - began:.1f} s: {verdict}"

    def _play(self, seed: int) -> tuple[str, Seen]:
        house = self._running()
        both = [*self.known[FIRST], *self.known[FIRST], *self.known[FIRST], *self.known[SECOND]]
        faults, seen = trio.run(play, house, both, seed)
        if seed % FRESH_EVERY == FRESH_EVERY - 1 and not seen.broken:
            seen.broken += drained(house)
        return ", ".join(map(str, faults)), seen

    def _running(self) -> House:
        if self._house is None:
            self._house = self._new((FIRST, SECOND), 1)
        if not self._house.processes:
            self._house.start()
            self._house.until_ready()
        return self._house

    def _new(self, names: Sequence[str], ranks: int) -> House:
        self._houses += 1
        place = self.place / f"house {self._houses}"
        place.mkdir()
        disk = place / "disk"
        self._open.enter_context(small_disk(disk))
        return House(place, disk, self.directories, names, ranks)

    def _lose(self, seed: int) -> tuple[str, Seen]:
        self.leave()
        house = self._new((SPLIT,), 2)
        try:
            return trio.run(lose, house, self.known[SPLIT], seed)
        finally:
            house.kill()
            self._open.close()

    def leave(self) -> None:
        if self._house is not None:
            self._house.kill()
            self._house = None
        self._open.close()


def _reasons(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(map(_reasons, error.exceptions))
    return f"{type(error).__name__} {error}"[-1500:]


@contextmanager
def campaign(*, count: int = 2, ranks: bool = True) -> Iterator[Campaign]:
    with TemporaryDirectory() as scratch:
        place = Path(scratch)
        directories = models(place / "models")
        names = (FIRST, SECOND, SPLIT) if ranks else (FIRST, SECOND)
        played = Campaign(place, directories, known_answers(directories, place, count, names))
        try:
            yield played
        finally:
            played.leave()


def main() -> int:
    parser = argparse.ArgumentParser(prog="just chaos", description=__doc__)
    parser.add_argument("seeds", type=int, nargs="?", default=20)
    parser.add_argument("first", type=int, nargs="?", default=0)
    parser.add_argument("--until", metavar="HH:MM", help="begin no seed after this time of day")
    parser.add_argument("--ranks-every", type=int, default=8, metavar="N", help="0: never")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # So that the servers end, too.
    done, every = 0, arguments.ranks_every
    with campaign(ranks=bool(every)) as played:
        for seed in range(arguments.first, arguments.first + arguments.seeds):
            if arguments.until and time.strftime("%H:%M") >= arguments.until:
                break
            print(
                played.seed(seed, ranks=bool(every) and seed % every == every - 1).replace(
                    "\n", " | "
                ),
                flush=True,
            )
            done += 1
    print(", ".join(f"{count} {what}" for what, count in played.outcomes.most_common()))
    print(
        f"{done} seeds from {arguments.first}, {len(played.broken)} broke a promise: "
        f"{list(played.broken)}"
    )
    return int(bool(played.broken))


if __name__ == "__main__":
    sys.exit(main())
