"""A supervisor for ranks. Each process is a session, which Ctrl-C does not reach, and reads a
pipe that closes when the supervisor dies."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

import attrs
import trio

from trouper.actors.runtime.supervision import innermost
from trouper.cli.exits import USAGE_ERROR, echo_if_possible, insists, leaving_signals
from trouper.process import NCCL_HOST
from trouper.protocol.problems import is_shortage
from trouper.system.lifeline import LAUNCHER, lifeline
from trouper.system.ports import free_ports

GRACE_S = 5.0  # Time for the other processes to end by themselves
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # Doubled each time until a group has lived for a while
LIVED_S = 60.0
LAST_LINES_S = 1.0
LONGEST_LINE = 2**16  # Bytes of output without an end of line that are kept


@attrs.define(eq=False)
class Life:
    processes: list[trio.Process] = attrs.field(factory=list)
    codes: list[int] = attrs.field(factory=list)  # Exit codes, of processes and from the output
    any_ended: trio.Event = attrs.field(factory=trio.Event)

    def signal(self, number: signal.Signals) -> None:
        """Signal each process with its children. macOS says EPERM for an ended process whose
        code was not read."""
        for process in self.processes:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)


class Supervisor:
    """Keeps a group alive until it ends well, cannot live, or is signalled."""

    def __init__(self, group: RankLauncher, restarts: int | None) -> None:
        self._group, self._restarts = group, restarts
        self._life = Life()
        self._leaving = trio.Event()

    async def run(self) -> int:
        with trio.open_signal_receiver(*leaving_signals()) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._pass_on, signals)
                code = await self._live_on()
                nursery.cancel_scope.cancel()
        return code

    async def _pass_on(self, signals: AsyncIterator[int]) -> None:
        """The first signal lets the processes drain, the second kills."""
        async for number in signals:
            once_more = insists(number)
            self._life.signal(
                signal.SIGKILL if self._leaving.is_set() and once_more else signal.SIGTERM
            )
            self._leaving.set()

    async def _live_on(self) -> int:
        """Run lives of the group until one ends well, fails for good, or is the last allowed.
        Returns the exit code."""
        pause_s, starts = FIRST_PAUSE_S, 0
        while True:
            began = trio.current_time()
            codes = await self._live_or_start_in_vain()
            # A process that ends by our signal has not failed.
            expected_code = -signal.SIGTERM if self._leaving.is_set() else 0
            failed = [code for code in codes if code not in (0, expected_code)]
            fails_for_good = USAGE_ERROR in failed
            has_ended = self._leaving.is_set() or not failed
            if has_ended or fails_for_good or starts == self._restarts:
                return USAGE_ERROR if fails_for_good else _exit_code(failed)
            if trio.current_time() - began > LIVED_S:
                pause_s = FIRST_PAUSE_S
            starts += 1
            text = ", ".join(str(code) for code in codes)
            echo_if_possible(
                f"launch: the group has ended (exit codes {text}); starting again in {pause_s:g} s",
                err=True,
            )
            with trio.move_on_after(pause_s):
                await self._leaving.wait()
                return _exit_code(failed)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _live_or_start_in_vain(self) -> list[int]:
        """A moment without processes or descriptors is the end of a life, as a lost rank is."""
        codes = [1]
        try:
            codes = await self._live()
        except* OSError as errors:
            if not is_shortage(error := innermost(errors)):
                raise
            echo_if_possible(f"launch: no process can be started: {error}", err=True)
        return codes

    async def _live(self) -> list[int]:
        self._life = life = Life()
        with self._group.processes() as specs, lifeline() as end:
            try:
                async with trio.open_nursery() as nursery:
                    for spec in specs:
                        process = await _start(spec, end)
                        life.processes.append(process)
                        nursery.start_soon(self._accompany, life, spec, process)
                    if self._leaving.is_set():  # The signal came before the processes were started.
                        life.signal(signal.SIGTERM)
                    await life.any_ended.wait()
                    nursery.cancel_scope.deadline = trio.current_time() + GRACE_S
            finally:
                life.signal(signal.SIGKILL)
                with trio.CancelScope(shield=True):
                    for process in life.processes:
                        await process.wait()
        return [*life.codes, *(process.returncode or 0 for process in life.processes)]

    async def _accompany(self, life: Life, spec: ProcessSpec, process: trio.Process) -> None:
        assert process.stdout is not None and process.stderr is not None
        async with trio.open_nursery() as relays:
            relays.start_soon(self._relay, life, spec, process.stdout, False)
            relays.start_soon(self._relay, life, spec, process.stderr, True)
            await process.wait()
            life.any_ended.set()
            relays.cancel_scope.deadline = trio.current_time() + LAST_LINES_S

    async def _relay(
        self, life: Life, spec: ProcessSpec, stream: trio.abc.ReceiveStream, err: bool
    ) -> None:
        prefix = f"[{spec.name}] " if spec.name else ""
        incomplete = b""
        async for data in stream:
            *lines, incomplete = (incomplete + data).split(b"\n")
            if len(incomplete) > LONGEST_LINE:
                lines, incomplete = [*lines, incomplete], b""
            for line in lines:
                text = line.decode(errors="replace")
                echo_if_possible(prefix + text, err=err)
                if code := self._group.code_in(text):
                    life.codes.append(code)
        if incomplete:
            echo_if_possible(prefix + incomplete.decode(errors="replace"), err=err)


async def _start(spec: ProcessSpec, end: int) -> trio.Process:
    return await trio.lowlevel.open_process(
        spec.command,
        env=spec.environment | {LAUNCHER: str(end)},
        stdin=end,  # Empty, but without an end of file, which mlx.launch would read in a loop.
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(end,),
        start_new_session=True,
    )


def _exit_code(failed: list[int]) -> int:
    """Return the code of the first process that failed; a signal's as in shells."""
    code = failed[0] if failed else 0
    return 128 - code if code < 0 else code


SECRET_FILE = "TROUPER_RANK_SECRET_FILE"  # noqa: S105 - a name
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@attrs.frozen
class ProcessSpec:
    """`name`: the prefix of output lines"""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = attrs.field(repr=False)


class RankLauncher(Protocol):
    def processes(self) -> AbstractContextManager[list[ProcessSpec]]:
        """Yield the processes of one start, with their files."""

    def code_in(self, line: str) -> int | None:
        """Return a rank's exit code, if this line reports one."""


@attrs.frozen
class LocalRanks:
    """Ranks on this machine. Backend `ring` or `nccl`."""

    ranks: int
    backend: str
    command: tuple[str, ...]

    @contextmanager
    def processes(self) -> Iterator[list[ProcessSpec]]:
        with (
            tempfile.NamedTemporaryFile("w", prefix="trouper-ranks-", suffix=".json") as hosts,
            tempfile.NamedTemporaryFile("w", prefix="trouper-ranks-", suffix=".secret") as secret,
        ):
            secret.write(secrets.token_hex())
            secret.flush()
            own = {SECRET_FILE: secret.name} if self.ranks > 1 else {}
            ports = free_ports(self.ranks)
            json.dump([[f"127.0.0.1:{port}"] for port in ports], hosts)
            hosts.flush()
            yield [
                ProcessSpec(
                    str(rank),
                    self.command,
                    own | os.environ | self._variables(rank, hosts.name, ports[0]),
                )
                for rank in range(self.ranks)
            ]

    def _variables(self, rank: int, hosts: str, port: int) -> dict[str, str]:
        if self.ranks == 1:
            return {}
        if self.backend == "nccl":
            return {
                "MLX_RANK": str(rank),
                "MLX_WORLD_SIZE": str(self.ranks),
                NCCL_HOST: "127.0.0.1",
                "NCCL_PORT": str(port),
                "CUDA_VISIBLE_DEVICES": _devices(self.ranks)[rank],
            }
        threads = str(
            max(1, (os.cpu_count() or 1) // self.ranks)
        )  # All ranks together use no more threads than the machine has cores.
        thread_limits = {name: threads for name in THREADS if name not in os.environ}
        return {"MLX_RANK": str(rank), "MLX_HOSTFILE": hosts, **thread_limits}

    def code_in(self, line: str) -> int | None:  # noqa: ARG002  Processes have theirs.
        return None


@attrs.frozen
class Hosts:
    """Ranks of mlx.launch, which prints their exit codes and ends with 0."""

    ranks: int
    hostfile: Path | None
    backend: str | None
    command: tuple[str, ...]

    @contextmanager
    def processes(self) -> Iterator[list[ProcessSpec]]:
        flags = (
            ["--hostfile", str(self.hostfile)]
            if self.hostfile is not None
            else ["-n", str(self.ranks)]
        )
        flags += ["--backend", self.backend] if self.backend is not None else []
        python = (sys.executable, "-P", "-m", "trouper.cli.mpi_delegate")
        environment = os.environ | {"PYTHONSAFEPATH": "1"}
        yield [ProcessSpec("", (*python, *flags, "--", *self.command), environment)]

    def code_in(self, line: str) -> int | None:
        match = re.search(r"Node with rank \d+ exited with code (-?\d+)", line)
        return int(match[1]) if match else None


def _devices(ranks: int) -> Sequence[str]:
    visible = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    return visible if len(visible) >= ranks else [str(rank) for rank in range(ranks)]
