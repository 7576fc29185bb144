"""Servers of other packages, each in an environment of its own (benchmarks.throughput says how to
make them), since they want other versions of mlx-lm than Trouper does.

`scipy-openblas32` lies there unused where a peer is measured with the BLAS of MLX's wheel.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

from benchmarks import servers
from trouper.system.ports import free_ports

SUFFIXES = {"": "products", "_openblas": "openblas", "_installed": "installed"}
"""Of a subject's name, by its BLAS (see benchmarks.blas)."""
CHANGED = ("config.json", "generation_config.json", "tokenizer_config.json")


@attrs.frozen
class Peer:
    entry: str
    flags: tuple[str, ...]
    batching: tuple[str, ...] = ()
    """What it needs beside, if several streams are measured."""
    environment: dict[str, str] = attrs.Factory(dict)


PEERS = {
    # Without --continuous-batching it runs one request at a time, and its help says that one stream
    # is slower with it.
    "vllm_mlx": Peer(
        "vllm_mlx.cli:main",
        ("--offline", "--disable-prefix-cache", "--timeout", "86400", "--max-num-seqs", "128"),
        batching=("--continuous-batching", "--completion-batch-size", "128"),
    ),
    "rapid_mlx": Peer(
        "rapid_mlx.cli:cli_entrypoint",
        (
            "--no-preflight",
            "--disable-model-downloads",
            "--disable-disk-caches",
            "--timeout",
            "86400",
            "--max-num-seqs",
            "128",
            "--completion-batch-size",
            "128",
        ),
        environment={"RAPID_MLX_TELEMETRY": "0", "RAPID_MLX_DISABLE_VERSION_CHECK": "1"},
    ),
}
SUBJECTS = {peer + suffix: (peer, blas) for peer in PEERS for suffix, blas in SUFFIXES.items()}


def flag(peer: str) -> str:
    """The flag that names the interpreter of its environment."""
    return f"--{peer.replace('_', '-')}"


@contextmanager
def serving(subject: str, python: str, model: Path, streams: int) -> Iterator[servers.Server]:
    """`python`: the interpreter of the peer's environment; `streams`: the most that will be
    measured."""
    name, blas = SUBJECTS[subject]
    peer, port = PEERS[name], free_ports(1)[0]
    batching = peer.batching if streams > 1 else ()
    command = [python, "-m", "benchmarks.peer_server", blas, peer.entry, "serve", str(model)]
    # They keep caches and state there, which would help the next run.
    with tempfile.TemporaryDirectory() as home:
        environment = peer.environment | {"HOME": home}
        command += ["--host", "127.0.0.1", "--port", str(port), *peer.flags, *batching]
        with servers.serving(subject, command, port, environment, model=str(model)) as server:
            yield server


@contextmanager
def endless_copy(model: Path) -> Iterator[Path]:
    """`model` with another token for the end of an answer: the last one of its vocabulary, which is
    the rarest.

    No other server knows `ignore_eos` on this endpoint, and an answer that ends early says nothing
    about a rate. The weights are links. The directory's name says nothing, since vllm-mlx gives
    models other ends by their names.
    """
    vocabulary: dict[str, int] = json.loads((model / "tokenizer.json").read_text())["model"][
        "vocab"
    ]
    rarest = max(vocabulary, key=vocabulary.__getitem__)
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "model"
        copy.mkdir()
        for file in model.iterdir():
            if file.name not in CHANGED:
                (copy / file.name).symlink_to(file.resolve())
        _write(model, copy, "config.json", {"eos_token_id": vocabulary[rarest]})
        _write(model, copy, "tokenizer_config.json", {"eos_token": rarest})
        yield copy


def _write(model: Path, copy: Path, name: str, changes: dict[str, object]) -> None:
    (copy / name).write_text(json.dumps(json.loads((model / name).read_text()) | changes))
