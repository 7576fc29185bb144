"""`python -m tests.broken_directories_by_cli [DIRECTORY ...]`: `models info`, `doctor`, and `serve`
with one chat, as processes, on the cases of `broken_directories.py` or on these directories.

A line for each; exits with 1 if two of them differ, or if one has a traceback.
"""

# ruff: noqa: T201
from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs
import httpx

from tests.broken_directories import CASES, build
from tests.families import save
from trouper.system.ports import free_ports

COMMAND = (sys.executable, "-c", "from trouper.cli import main; main()")
PATIENCE_S = 180


@attrs.frozen
class Verdict:
    """Of one command: why the model cannot be served, or ""."""

    reason: str
    has_traceback: bool = False


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def info(directory: Path) -> Verdict:
    ended = run("models", "info", str(directory), "--json")
    reason = json.loads(ended.stdout)["problem"] if ended.stdout else own_line(ended.stderr)
    assert (ended.returncode == 2) == bool(reason), ended
    return Verdict(reason, "Traceback" in ended.stderr)


def doctor(directory: Path) -> Verdict:
    ended = run("doctor", "--model", str(directory), "--json")
    [finding] = [each for each in json.loads(ended.stdout) if each["subject"] == "model"]
    failed = finding["level"] == "fail"
    return Verdict(finding["said"] if failed else "", "Traceback" in ended.stderr)


def serve(directory: Path) -> Verdict:
    [port] = free_ports(1)
    flags = ["--model", str(directory), "--port", str(port), "--no-ssd"]
    process = subprocess.Popen(
        [*COMMAND, "serve", *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process:
        ready = process.stdout.readline()
        if "is ready at" in ready:
            body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            answer = httpx.post(url, json=body, timeout=PATIENCE_S)
            process.terminate()
            errors = process.communicate()[1]
            return Verdict("", "Traceback" in errors or answer.status_code >= 500)
        _, errors = process.communicate()
        assert process.returncode == 2, errors
    return Verdict(own_line(errors), "Traceback" in errors)


def own_line(errors: str) -> str:
    """The last line of an error, which is the command's own."""
    return errors.strip().splitlines()[-1].removeprefix("trouper: ") if errors.strip() else ""


def play(directories: Sequence[tuple[str, Path]]) -> Iterator[str]:
    """Print a line for each, and yield the names of those about which the commands differ."""
    for name, directory in directories:
        verdicts = [command(directory) for command in (info, doctor, serve)]
        first, tried, last = (each.reason for each in verdicts)
        is_one = first == last and bool(tried) == bool(first) and first.startswith(tried)
        is_right = is_one and not any(each.has_traceback for each in verdicts)
        print(f"{'ok ' if is_right else 'BAD'} {name}: {first or 'served'}", flush=True)
        if not is_right:
            print(*verdicts, sep="\n", flush=True)
            yield name


def main() -> int:
    with TemporaryDirectory() as scratch:
        directories = [(Path(each).name, Path(each)) for each in sys.argv[1:]]
        if not directories:
            sound = save("llama", Path(scratch) / "sound")
            directories = [
                (name, build(name, sound, Path(scratch) / str(number) / "model"))
                for number, name in enumerate(CASES)
            ]
        wrong = list(play(directories))
    print(f"{len(directories)} directories, {len(wrong)} with more than one verdict")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
