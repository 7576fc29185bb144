"""What is sampled of the servers: /proc, /health, /metrics and their directories, every few
seconds, as lines of JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import attrs
import psutil
import trio

from tests.soak.client import Ask, ask
from tests.soak.servers import Group, neighbours

Sample = dict[str, float]
TASKS = re.compile(rb"^trouper_tasks ([0-9.e+]+)$", re.MULTILINE)


def of_process(process: psutil.Process) -> Sample:
    """Bytes, counts and seconds of one process; {} if it is gone."""
    with suppress(OSError, psutil.Error):
        own = Path(f"/proc/{process.pid}")
        rollup = _fields((own / "smaps_rollup").read_text())
        status = _fields((own / "status").read_text())
        times = process.cpu_times()
        return {
            "anonymous": rollup["Anonymous"] * 1024,
            "resident": status["VmRSS"] * 1024,
            "descriptors": len(list((own / "fd").iterdir())),
            "threads": status["Threads"],
            "children": len(process.children(recursive=True)),
            "cpu_s": times.user + times.system,
        }
    return {}


def _fields(text: str) -> dict[str, int]:
    """Of a file of /proc, whose lines are `Name:  number kB`."""
    return {
        name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+)\b", text, re.MULTILINE)
    }


def of_health(health: Any) -> Sample:
    """Sums over the models of one server."""
    models = [model for model in health.get("models", {}).values() if "memory" in model] or [health]
    return {
        "mlx_active": sum(model["memory"]["active_bytes"] for model in models),
        "queried": sum(model["cache"]["queried_tokens"] for model in models),
        "hit": sum(model["cache"]["hit_tokens"] for model in models),
        "from_disk": sum(model["cache"]["hits_disk"] for model in models),
        "generated": sum(model["cache_stats"]["tokens_generated"] for model in models),
        "prefilled": sum(model["cache_stats"]["total_prefill_tokens"] for model in models),
        "restarts": sum(actor["restarts"] for model in models for actor in model["actors"]),
        "crashes": sum(model["recovery"]["crashes"] for model in models),
        "damaged": sum(model["directory"]["damaged"] for model in models),
        "preemptions": sum(model["memory"]["preemptions"] for model in models),
        "loaded": len(models),
    }


def of_directories(group: Group) -> Sample:
    """Files and bytes on disk; what vanishes meanwhile counts as gone."""
    sizes = list(_sizes(group.cache))
    return {
        "files": len(sizes),
        "disk_bytes": sum(sizes),
        "temporary_files": len(list(_sizes(group.temporary))),
    }


def _sizes(directory: Path) -> Sequence[int]:
    found = []
    for path in directory.rglob("*"):
        with suppress(OSError):
            if path.is_file():
                found.append(path.stat().st_size)
    return found


@attrs.define
class Sampler:
    """Appends a line for each look: {"at": seconds, "NAME.field": number}."""

    groups: Sequence[Group]
    now: Callable[[], float]
    sink: TextIO
    samples: list[Sample] = attrs.field(factory=list)

    async def run(self, every_s: float) -> None:
        while True:
            await self.look()
            await trio.sleep(every_s)

    async def look(self) -> None:
        sample: Sample = {"at": self.now(), "load": neighbours()}
        for group in self.groups:
            sample |= {
                f"{group.name}.{name}": value for name, value in (await self._of(group)).items()
            }
        self.samples.append(sample)
        self.sink.write(json.dumps(sample) + "\n")
        self.sink.flush()

    async def _of(self, group: Group) -> Sample:
        found: Sample = {}
        for rank, process in enumerate(group.processes):
            suffix = f" of rank {rank}" if len(group.processes) > 1 else ""
            found |= {name + suffix: value for name, value in of_process(process).items()}
        found |= of_directories(group)
        if (health := (await ask(group.port, Ask("/health", method="GET"))).json()) is not None:
            found |= of_health(health)
        metrics = (await ask(group.port, Ask("/metrics", method="GET"))).body
        if (tasks := TASKS.search(metrics)) is not None:
            found["tasks"] = float(tasks[1])
        return found
