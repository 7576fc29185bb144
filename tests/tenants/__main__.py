"""`python -m tests.tenants [MINUTES] [--tiny]`: three honest tenants and a fourth, which is honest
and hostile in turns.

So many minutes of each, in turns of a minute on one server. Prints what each honest tenant got
beside the hostile one, over what it got beside an honest one: tokens a second, and seconds until
the first token. Exits 1 if a tenant kept less than 0.7 of its rate, waited more than twice as long,
met an error, or the hostile one saw something of it.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import trio

from tests.abuse.asking import Ask, ask
from tests.abuse.playing import server, tiny_model
from tests.tenants.honest import Honest, Tally
from tests.tenants.hostile import Took

LEAST_RATE, MOST_FIRST = 0.7, 2.0
PHASE_S = 60.0
SETTLE_S = 10.0
"""After each change, before it counts."""
NAMES = ("anna", "bert", "carl")
VIEWER = "sk-viewer"
KEYS = "".join(f"sk-{name} name={name}\n" for name in (*NAMES, "fourth", "hostile"))
KEYS += f"{VIEWER} inference=false observability=true\n"


async def play(
    port: int, process: psutil.Process, seconds: float, streams: int, only: str = ""
) -> list[str]:
    """Faults, as a reader needs them."""
    tenants = [Honest(name, port, streams, {}) for name in NAMES]
    fourth = Honest("fourth", port, streams, {})
    for tenant in tenants:
        await tenant.keep_something()
    took: list[Took] = []

    async def hostile(turn: int) -> None:
        length = min(SETTLE_S, phase_s / 4) + phase_s
        victims = [f"{tenant.name}={tenant.response}" for tenant in tenants]
        command = [
            sys.executable,
            "-m",
            "tests.tenants.hostile",
            str(port),
            str(length),
            str(turn),
            only,
            *victims,
        ]
        ended = await trio.run_process(command, capture_stdout=True)
        took.append(Took(**json.loads(ended.stdout)))

    rounds = max(1, round(seconds / PHASE_S))
    phase_s = seconds / rounds
    async with trio.open_nursery() as nursery:
        for tenant in tenants:
            nursery.start_soon(tenant.run, 1)
        for turn in range(rounds):
            for phase, beside in (("honest", fourth.run), ("hostile", hostile)):
                async with trio.open_nursery() as fourths:
                    fourths.start_soon(beside, turn)
                    await run_phase(tenants, phase, phase_s)
                    if phase == "honest":
                        fourths.cancel_scope.cancel()
            held = await held_megabytes(port)
            print(
                f"{turn + 1} of {rounds}: RSS {process.memory_info().rss / 1e6:.0f} MB, "
                f"{held['trouper_cache_bytes']} of them cached blocks, "
                f"{held['trouper_memory_active_bytes']} in use by MLX",
                flush=True,
            )
        nursery.cancel_scope.cancel()
    statuses = sum((Counter(one.statuses) for one in took), Counter[str]())
    print(f"answers to the hostile tenant, by status (0: none): {dict(sorted(statuses.items()))}")
    leaks = [leak for one in took for leak in one.leaks]
    return [*(fault for tenant in tenants for fault in faults(tenant)), *leaks[:10]]


async def held_megabytes(port: int) -> dict[str, int]:
    """The server's own gauges, in megabytes by name."""
    key = (("Authorization", f"Bearer {VIEWER}"),)
    heard = await ask(port, Ask(bytes, "/metrics", key, method="GET"))
    lines = heard.body.decode().splitlines()
    return {
        line.partition("{")[0]: round(float(line.rpartition(" ")[2]) / 1e6)
        for line in lines
        if line.startswith(("trouper_cache_bytes{", "trouper_memory_active_bytes{"))
    }


async def run_phase(tenants: list[Honest], phase: str, seconds: float) -> None:
    for tenant in tenants:
        tenant.phase = "between"
    await trio.sleep(min(SETTLE_S, seconds / 4))
    for tenant in tenants:
        tenant.phase = phase
    await trio.sleep(seconds)
    for tenant in tenants:
        tenant.tallies.setdefault(phase, Tally()).seconds += seconds
        tenant.phase = "between"


def faults(tenant: Honest) -> list[str]:
    before, beside = (tenant.tallies.get(phase, Tally()) for phase in ("honest", "hostile"))
    if not (before.first_s and beside.first_s):
        return [f"{tenant.name}: no answers ({before.errors[:2]} {beside.errors[:2]})"]
    rate = beside.rate / before.rate
    firsts = [statistics.median(tally.first_s) for tally in (before, beside)]
    late = [
        max(tally.first_s)
        if len(tally.first_s) < 10
        else statistics.quantiles(tally.first_s, n=10)[-1]
        for tally in (before, beside)
    ]
    print(
        f"{tenant.name}: {beside.rate:.1f} tokens a second beside the hostile tenant, "
        f"{before.rate:.1f} beside an honest one "
        f"({rate:.2f}); first token {firsts[1]:.2f} s, {firsts[0]:.2f} "
        f"({firsts[1] / firsts[0]:.2f}); slowest tenth {late[1]:.2f}, "
        f"{late[0]:.2f}; {len(beside.errors)} and {len(before.errors)} errors"
    )
    found = [f"{tenant.name}: {error}" for error in (*before.errors, *beside.errors)][:3]
    if rate < LEAST_RATE:
        found.append(f"{tenant.name} kept {rate:.2f} of its rate")
    if firsts[1] > MOST_FIRST * firsts[0]:
        found.append(f"{tenant.name} waited {firsts[1] / firsts[0]:.2f} times as long")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="just tenants", description=__doc__)
    parser.add_argument("minutes", nargs="?", type=float, default=10.0)
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny random model in place of the embedded one"
    )
    parser.add_argument("--streams", type=int, default=2, help="of each honest tenant")
    parser.add_argument(
        "--only", default="", metavar="ATTACK", help="one attack, as hostile.py names it"
    )
    given = parser.parse_args()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with TemporaryDirectory() as scratch:
        keys = Path(scratch) / "keys"
        keys.touch(0o600)
        keys.write_text(KEYS)
        model = tiny_model(Path(scratch) / "model") if given.tiny else None
        flags = ("--api-key-file", str(keys), "--no-ssd", "--batch-dir", f"{scratch}/batches")
        with server(model, *flags) as (port, process):
            found = trio.run(play, port, process, given.minutes * 60, given.streams, given.only)
            if not process.is_running():
                found.append("the server ended")
    print("\n".join(found) or "each tenant kept what it had")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
