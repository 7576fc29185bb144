"""`just bench-launching`: what a pass of the engine takes by how MLX sends its kernels to a CUDA
device.

On a fast GPU sending a pass takes longer than computing it. MLX puts kernels into CUDA graphs of
MLX_MAX_OPS_PER_BUFFER operations, or sends each by itself (MLX_USE_CUDA_GRAPHS=0). For each of
these settings a process of its own makes a model of the shape with random weights. Then they take
turns, and each reports the milliseconds of the first pass over a lone prompt, of decode steps of so
many rows, and the longest of the steps in which these rows joined one by one. No server: the steps
are planned here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

from rich.console import Console

WAYS: dict[str, dict[str, str]] = {
    "as Trouper sets it": {},
    "graphs of 100": {"MLX_MAX_OPS_PER_BUFFER": "100"},
    "no graphs": {"MLX_USE_CUDA_GRAPHS": "0"},
    "no graphs, batches of 100": {"MLX_USE_CUDA_GRAPHS": "0", "MLX_MAX_OPS_PER_BUFFER": "100"},
    "no graphs, batches of 400": {"MLX_USE_CUDA_GRAPHS": "0", "MLX_MAX_OPS_PER_BUFFER": "400"},
}
"""Variables of the environment. Trouper's are in trouper/process.py."""
Row = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["0.6b", "4b"],
        help="shapes of benchmarks/models.py, in 16 bits",
    )
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=tuple(WAYS))
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[77, 300], help="tokens of lone prompts"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    console = Console(width=200)
    for shape in chosen.shapes:
        command = [sys.executable, "-m", "benchmarks.planned_steps", shape]
        processes = {
            way: subprocess.Popen(
                command, stdin=-1, stdout=-1, text=True, env=os.environ | WAYS[way]
            )
            for way in chosen.ways
        }
        rounds = {way: list[Row]() for way in processes}
        for _ in range(chosen.rounds):
            for way, process in processes.items():
                assert process.stdin and process.stdout
                print(json.dumps((chosen.prompts, chosen.rows)), file=process.stdin, flush=True)
                rounds[way].append(json.loads(process.stdout.readline()))
        for process in processes.values():
            process.communicate()
        for way, found in rounds.items():
            medians = {
                key: round(statistics.median(one[key] for one in found), 2) for key in found[0]
            }
            console.print({"shape": shape, "way": way, **medians})


if __name__ == "__main__":
    main()
