"""LoRA adapters by request: rows of the base, and rows of several adapters in one batch, in turns
on one server.

python -m benchmarks.lora --adapters 8 --rows 16 --rank 8

The adapters are random, over all linear layers of the model's blocks. Each round sends the same
number of requests to the base and to the adapters in turn, with prompts of their own, and compares
tokens a second. At first `--check` answers of each adapter are compared with those of the model
that mlx-lm fuses.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import benchmarks.prepared  # noqa: F401 - OpenBLAS before MLX

# isort: split
import httpx2
import mlx.core as mx
import trio

from tests.adapters import flags, fused, save_adapter
from tests.families import reference
from trouper import Runtime, ServerSettings, Settings, run_runtime
from trouper.engine.loading.model_source import resolve
from trouper.web.server import serve_http


async def complete(client: httpx2.AsyncClient, url: str, **body: Any) -> dict[str, Any]:
    request = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, **body}
    answer: dict[str, Any] = (
        (await client.post(f"{url}/v1/completions", json=request)).raise_for_status().json()
    )
    return answer


async def together(
    url: str, models: list[str | None], prompts: list[list[int]], tokens: int
) -> tuple[float, list[Any]]:
    """Seconds, and the answers."""
    answers: list[Any] = [None] * len(models)
    async with httpx2.AsyncClient(
        timeout=600, limits=httpx2.Limits(max_connections=None)
    ) as client:

        async def ask(index: int) -> None:
            answers[index] = await complete(
                client, url, model=models[index], prompt=prompts[index], max_tokens=tokens
            )

        began = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for index in range(len(models)):
                nursery.start_soon(ask, index)
        return time.perf_counter() - began, answers


def compare(
    base: Path, directories: list[Path], prompts: list[list[int]], answers: list[Any], count: int
) -> None:
    """Print how many answers are those of the fused models."""
    same = 0
    for number, directory in enumerate(directories):
        model = fused(base, directory)
        for index in range(number, len(prompts), len(directories)):
            said = answers[index]["choices"][0]["token_ids"]
            same += said == reference(model, prompts[index], len(said), 2048)
        del model
        mx.clear_cache()
    print(
        f"{same} of {len(prompts)} answers are those of the fused models; hits {count} tokens",
        flush=True,
    )


async def main(options: argparse.Namespace, directory: Path) -> None:
    base = resolve(options.model, lambda _: None)
    plain = fused(base, None)
    directories = [
        save_adapter(plain, directory / f"a{number}", number, rank=options.rank)
        for number in range(options.adapters)
    ]
    del plain
    settings = Settings(
        model=options.model,
        adapter=flags(directories),
        no_ssd=True,
        speculation="off",
        completion_batch_size=options.rows,
        prefill_batch_size=min(256, options.rows),
    )
    shutdown = trio.Event()
    async with trio.open_nursery() as nursery:
        runtime: Runtime = await nursery.start(run_runtime, settings)
        [url] = await nursery.start(
            partial(serve_http, runtime, ServerSettings(port=0), shutdown=shutdown)
        )
        names: list[str | None] = [f"a{row % options.adapters}" for row in range(options.rows)]
        same_prompt = [[5 + 7 * token for token in range(options.prompt)]] * options.rows
        _, answers = await together(url, names, same_prompt, options.check)
        hits = sum(
            answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            for answer in answers[: options.adapters]
        )
        await trio.to_thread.run_sync(compare, base, directories, same_prompt, answers, hits)
        rates: dict[str, list[float]] = {"base": [], "adapters": []}
        for number in range(options.rounds):
            for name, models in (("base", [None] * options.rows), ("adapters", names)):
                first = 1000 * (2 * number + (name == "base"))
                prompts = [
                    [first + row + 11 * token for token in range(options.prompt)]
                    for row in range(options.rows)
                ]
                seconds, _ = await together(url, [*models], prompts, options.tokens)
                rates[name].append(options.rows * options.tokens / seconds)
            print(
                f"round {number}: "
                + ", ".join(f"{name} {found[-1]:.0f} tokens/s" for name, found in rates.items()),
                flush=True,
            )
        ratios = [one / other for one, other in zip(rates["adapters"], rates["base"], strict=True)]
        print(
            f"adapters / base: median of rounds {median(ratios):.2f} ({min(ratios):.2f} to "
            f"{max(ratios):.2f})"
        )
        shutdown.set()
        await runtime.drain(5)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--model", help="nothing: the embedded model")
    arguments.add_argument("--adapters", type=int, default=8)
    arguments.add_argument("--rank", type=int, default=8)
    arguments.add_argument("--rows", type=int, default=16)
    arguments.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    arguments.add_argument("--tokens", type=int, default=48)
    arguments.add_argument(
        "--check", type=int, default=32, help="tokens of each answer that is compared"
    )
    arguments.add_argument("--rounds", type=int, default=5)
    with TemporaryDirectory() as made:
        trio.run(main, arguments.parse_args(), Path(made))
