"""What an MTP head is worth, and what a useless one costs: `python -m benchmarks.mtp_head`.

A qwen3_5 of 102 million random parameters whose next token follows from the last one
(`benchmarks/copying.py`), with a head that is right or a random one. The same requests in turns:
with the head, on the same server without drafts, and on a server that has left the head out.
Decoding only, from the first token of all on. Tokens are compared, too. CPU seconds of the process
tell more than its rate on a machine that does something else besides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import benchmarks.prepared  # noqa: F401 - OpenBLAS before MLX

# isort: split
import mlx.core as mx
import trio

from benchmarks.copying import CONFIGS, HIDDEN, LOUD, save_copying
from benchmarks.speculation import Said, ask
from tests.heads import head_weights, published
from trouper import Runtime, Settings, run_runtime

FAMILY, TASK = "qwen3_5", "copy"


def save(directory: Path, kind: str) -> str:
    """The copying model with a head. A right one takes the embedding, which is as loud as in the
    model, and adds what its layer says."""
    config = CONFIGS[FAMILY]
    path = save_copying(FAMILY, directory / kind)
    model = mx.load(str(path / "model.safetensors"))
    assert isinstance(model, dict)
    weights = head_weights(FAMILY, "random", config=config)
    if kind == "right":
        unit = LOUD * mx.eye(HIDDEN)
        weights["projection.weight"] = mx.concatenate([unit, mx.zeros_like(unit)], axis=1)
    named = published(FAMILY, weights, original=False, config=config)
    mx.eval(model, named)
    mx.save_safetensors(str(path / "model.safetensors"), model | named, {"format": "mlx"})
    assert json.loads((path / "config.json").read_text("utf-8"))["model_type"] == FAMILY
    return str(path)


async def compare(headed: Runtime, bare: Runtime, rows: int, options: argparse.Namespace) -> None:
    ways = {"mtp": (headed, "mtp"), "off": (headed, "off"), "no head": (bare, "off")}
    said: dict[str, list[Said]] = {way: [] for way in ways}
    cpu: dict[str, list[float]] = {way: [] for way in ways}
    for name, (runtime, how) in ways.items():
        await ask(runtime, TASK, rows, 12, how)  # type: ignore[arg-type]
        assert name in said
    before = headed.health().scheduler.speculation
    for turn in range(options.rounds):
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            runtime, how = ways[name]
            began = time.process_time()
            said[name].append(await ask(runtime, TASK, rows, options.tokens, how))  # type: ignore[arg-type]
            cpu[name].append(time.process_time() - began)
    after = headed.health().scheduler.speculation
    assert {each.tokens for each in said["mtp"]} == {each.tokens for each in said["no head"]}, (
        "other tokens"
    )
    rates = {
        name: statistics.median(each.rate for each in each_said) for name, each_said in said.items()
    }
    cpu_seconds = [
        f"{name} {statistics.median(seconds):.2f} (least {min(seconds):.2f})"
        for name, seconds in cpu.items()
    ]
    print(
        f"{rows:2} rows, {options.head} head: {rates['mtp']:.1f} tok/s, without drafts "
        f"{rates['off']:.1f}, without the head "
        f"{rates['no head']:.1f} ({rates['mtp'] / rates['no head']:.3f}, "
        f"{rates['off'] / rates['no head']:.3f}); CPU seconds "
        f"{', '.join(cpu_seconds)}; "
        f"{after.accepted - before.accepted} of {after.drafted - before.drafted} drafted tokens "
        "right, in "
        f"{after.steps - before.steps} steps",
        flush=True,
    )


async def run(options: argparse.Namespace) -> None:
    with TemporaryDirectory() as directory:
        model = save(Path(directory), options.head)
        async with trio.open_nursery() as nursery:
            headed: Runtime = await nursery.start(
                run_runtime, Settings(model=model, no_ssd=True, gather_ms=20)
            )
            bare: Runtime = await nursery.start(
                run_runtime, Settings(model=model, no_ssd=True, gather_ms=20, speculation="off")
            )
            assert not headed.model.no_mtp and bare.model.no_mtp
            for rows in options.rows:
                await compare(headed, bare, rows, options)
            await headed.drain(10)
            await bare.drain(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", choices=("right", "random"), default="right")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=4)
    trio.run(run, parser.parse_args())


if __name__ == "__main__":
    main()
