"""The runtime inside another Trio program, without HTTP: stream one answer and leave.

python examples/embed.py --model DIR "What is the capital of France?"
"""

from __future__ import annotations

import argparse
from functools import partial

import trio

from trouper import ChatPrompt, Engine, Generate, Runtime, Sampling, Settings, run_runtime


async def main(question: str, *, model: str | None = None, engine: Engine | None = None) -> None:
    """`engine` None: the real one. Tests bring their own."""
    async with trio.open_nursery() as nursery:
        start = partial(run_runtime, Settings(model=model), engine=engine)
        runtime: Runtime = await nursery.start(start)
        prompt = ChatPrompt(({"role": "user", "content": question},))
        request = Generate(
            request_id="1", prompt=prompt, sampling=Sampling(temperature=0), max_tokens=64
        )
        with await runtime.submit(request) as answer:
            async for delta in answer:
                print(delta.text, end="", flush=True)
        print(f"\n[{answer.completion_tokens} tokens]")
        await runtime.drain(timeout_s=10)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description="Ask a model one question.")
    arguments.add_argument("question", nargs="?", default="What is the capital of France?")
    arguments.add_argument("--model", help="local directory or hub id; nothing: the embedded model")
    options = arguments.parse_args()
    trio.run(partial(main, options.question, model=options.model))
