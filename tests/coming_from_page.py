"""`python -m tests.coming_from_page` writes the tables of docs/coming-from.md from
`trouper/cli/foreign_flags.toml`. What stands before each table is written by hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from trouper.cli.foreign_flags import ForeignFlag, list_foreign_flags

VLLM = "vLLM"
SGLANG = "SGLang"
LLAMA = "llama.cpp"
MLX_LM = "mlx_lm.server"
VLLM_MLX = "vllm-mlx"
LM_STUDIO = "LM Studio"
OLLAMA = "ollama"
SERVERS = (OLLAMA, LM_STUDIO, LLAMA, MLX_LM, VLLM, SGLANG, VLLM_MLX)

PAGE = Path(__file__).parent.parent / "docs" / "coming-from.md"
# The page is for reading, and leaves out vllm-mlx, which has many of vLLM's names.
MAX_SHOWN = 4  # The error knows all.
TABLES = ((OLLAMA,), (LM_STUDIO,), (LLAMA,), (MLX_LM,), (VLLM, SGLANG))


def table_of(servers: Sequence[str]) -> str:
    """One row for each thing that one of the servers has flags of."""
    head = f"{_head(servers)}\n|{'---|' * (len(servers) + 1)}\n"
    return head + "".join(
        f"| {' | '.join(_names(row, server) for server in servers)} | {row.meaning('`')} |\n"
        for row in list_foreign_flags()
        if row.names.keys() & servers
    )


def _head(servers: Sequence[str]) -> str:
    return f"| {' | '.join(servers)} | here, `trouper serve` |"


def _names(row: ForeignFlag, server: str) -> str:
    names = row.names.get(server, "").split()
    shown = [f"`{name}`" for name in names[:MAX_SHOWN]]
    return ", ".join([*shown, "..."] if len(names) > MAX_SHOWN else shown)


def rendered(page: str) -> str:
    for servers in TABLES:
        head = re.escape(_head(servers))
        tables = [*re.finditer(rf"^{head}\n(?:\|[^\n]*\n)*", page, re.MULTILINE)]
        assert len(tables) == 1, f"docs/coming-from.md has {len(tables)} tables of {servers}"
        [table] = tables
        page = page[: table.start()] + table_of(servers) + page[table.end() :]
    return page


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
