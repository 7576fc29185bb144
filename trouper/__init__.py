"""Trouper: an LLM server on MLX and Trio, and the runtime to embed.

async with trio.open_nursery() as nursery:
    runtime = await nursery.start(run_runtime, Settings())
    with await runtime.submit(Generate(request_id="1", prompt=TextPrompt("Once"))) as answer:
        async for delta in answer:
            print(delta.text, end="")
    await runtime.drain(10)
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from trouper.protocol.version import VERSION

if TYPE_CHECKING:
    from trouper.public_names import *  # noqa: F403 - it has __all__.

__version__ = VERSION


if not TYPE_CHECKING:  # To a checker every name would exist.

    def __getattr__(name: str) -> Any:
        """Import public names, or MODULE of `from trouper import MODULE`, at the first use (PEP
        562): the import takes a second."""
        if find_spec(f"trouper.{name}") is None:
            from trouper import public_names

            if name == "__all__":
                return public_names.__all__
            if name in public_names.__all__:
                return getattr(public_names, name)
        raise AttributeError(f"module 'trouper' has no attribute {name!r}")


def __dir__() -> list[str]:
    from trouper import public_names

    return sorted({*globals(), *public_names.__all__})
