"""`trouper launch`: what it starts, when it starts again, and that nothing is left. With real
ranks: tests/ranks/test_losses.py."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import attrs
import psutil
import pytest
import trio
from click.testing import CliRunner
from trio.testing import memory_stream_one_way_pair, wait_all_tasks_blocked

from trouper.cli import main, process_group
from trouper.cli.exits import USAGE_ERROR
from trouper.cli.process_group import SECRET_FILE, Hosts, LocalRanks, ProcessSpec, Supervisor
from trouper.cli.rank_process import control_host, rank_of, rank_secret
from trouper.protocol.problems import SettingsInvalid
from trouper.protocol.settings import Settings

SLEEPS = "import time; time.sleep(600)"


@attrs.define
class Scripts:
    """A group of Python programs, one for each rank; the next life has the next ones."""

    lives: list[tuple[str, ...]]
    lived: int = 0
    begins_last_life: Callable[[], None] = lambda: None

    @contextmanager
    def processes(self) -> Iterator[list[ProcessSpec]]:
        if self.lived == len(self.lives) - 1:
            self.begins_last_life()
        programs = self.lives[min(self.lived, len(self.lives) - 1)]
        self.lived += 1
        yield [
            ProcessSpec(str(rank), (sys.executable, "-c", program), dict(os.environ))
            for rank, program in enumerate(programs)
        ]

    def code_in(self, line: str) -> int | None:
        return Hosts(2, None, None, ()).code_in(line)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "GRACE_S", 0.1)
    monkeypatch.setattr(process_group, "FIRST_PAUSE_S", 0.01)


def no_children() -> bool:
    return not any(
        SLEEPS in " ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)
    )


async def test_a_group_that_ends_well_is_not_started_again(
    capfd: pytest.CaptureFixture[str],
) -> None:
    group = Scripts([("print('hello')", "import sys; print('there', file=sys.stderr)")])
    assert await Supervisor(group, None).run() == 0
    assert group.lived == 1
    said = capfd.readouterr()
    assert (said.out, said.err) == ("[0] hello\n", "[1] there\n")


async def test_output_without_ends_of_lines_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], nursery: trio.Nursery
) -> None:
    monkeypatch.setattr(process_group, "LONGEST_LINE", 9)
    group, (written, read) = Scripts([]), memory_stream_one_way_pair()
    spec = ProcessSpec("0", (), {})
    nursery.start_soon(Supervisor(group, 0)._relay, process_group.Life(), spec, read, False)
    await written.send_all(b"x" * 10)
    await wait_all_tasks_blocked()
    assert capfd.readouterr().out == "[0] xxxxxxxxxx\n"
    await written.aclose()


def _written_by_nobody(name: str) -> int:
    if name == "pipe":
        read, write = os.pipe()
        os.close(read)
        return write
    if not Path(name).exists():
        pytest.skip("a device of Linux")
    return os.open(name, os.O_WRONLY)


@pytest.mark.parametrize("broken", ["/dev/full", "pipe"])
@pytest.mark.parametrize("name", ["stdout", "stderr"])
async def test_a_group_goes_on_when_its_output_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str, broken: str
) -> None:
    """To a full disk, or to a pipe that nobody reads any more, as behind `| head -1`."""
    target = _written_by_nobody(broken)
    group = Scripts(
        [("import sys\nfor _ in range(3): print('x', flush=True); print('y', file=sys.stderr)",)]
    )
    stream = os.fdopen(target, "w")
    try:
        monkeypatch.setattr(sys, name, stream)
        assert await Supervisor(group, 0).run() == 0
    finally:
        monkeypatch.undo()
        with suppress(OSError):
            stream.close()
    said = capfd.readouterr()
    assert (said.err if name == "stdout" else said.out).count("[0] ") == 3


async def test_one_that_is_lost_takes_the_others_with_it_and_all_start_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the second life both end well. One may take longer to start, and is not killed
    meanwhile."""

    def patient() -> None:
        monkeypatch.setattr(process_group, "GRACE_S", 60.0)

    group = Scripts(
        [(SLEEPS, "import sys; sys.exit(75)"), ("pass", "pass")], begins_last_life=patient
    )
    assert await Supervisor(group, None).run() == 0
    assert group.lived == 2
    assert no_children()


async def test_a_moment_without_processes_ends_one_life(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    start, starts = process_group._start, count()

    async def refused_once(spec: ProcessSpec, end: int) -> trio.Process:
        if next(starts) == 1:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return await start(spec, end)

    monkeypatch.setattr(process_group, "_start", refused_once)
    group = Scripts([(SLEEPS, SLEEPS), ("pass",)])
    assert await Supervisor(group, None).run() == 0
    assert (group.lived, no_children()) == (2, True)
    assert "launch: no process can be started: " in capfd.readouterr().err


async def test_the_group_ends_where_macos_refuses_signals_to_what_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killpg = os.killpg

    def refused(group: int, number: int) -> None:
        with suppress(ProcessLookupError):
            killpg(group, number)
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "killpg", refused)
    assert await Supervisor(Scripts([(SLEEPS, "pass")]), 0).run() == 128 + signal.SIGKILL
    assert no_children()


async def test_what_cannot_be_is_not_tried_again() -> None:
    """A flag or a model that is wrong for one is wrong the next time, too."""
    group = Scripts([("import sys; sys.exit(2)", SLEEPS)])
    assert await Supervisor(group, None).run() == 2
    assert (group.lived, no_children()) == (1, True)


async def test_it_gives_up_after_so_many_starts(capfd: pytest.CaptureFixture[str]) -> None:
    group = Scripts([("import os; os.abort()",)])
    assert await Supervisor(group, 2).run() == 128 + 6
    assert group.lived == 3
    assert "launch: the group has ended (exit codes -6); starting again" in capfd.readouterr().err


async def test_exit_codes_that_mlx_launch_only_tells_count() -> None:
    group = Scripts([("print('[WARN] Node with rank 1 exited with code 2 ')",)])
    assert await Supervisor(group, None).run() == 2


def test_ranks_here_have_what_mlx_launch_would_give_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with LocalRanks(2, "ring", ("serve",)).processes() as [zero, one]:
        hosts = json.loads(Path(zero.environment["MLX_HOSTFILE"]).read_text())
        assert len({address for [address] in hosts}) == 2
        assert (rank_of(zero.environment), rank_of(one.environment)) == (0, 1)
        assert control_host(one.environment) == "127.0.0.1"
        assert int(zero.environment["OMP_NUM_THREADS"]) >= 1
        secret = Path(zero.environment[SECRET_FILE])
        assert secret.stat().st_mode & 0o777 == 0o600
        assert one.environment[SECRET_FILE] == str(secret)
        assert rank_secret(Settings(rank_secret_file=str(secret))) == secret.read_bytes()
    assert not secret.exists()
    with LocalRanks(2, "nccl", ("serve",)).processes() as [zero, one]:
        assert (rank_of(one.environment), control_host(one.environment)) == (1, "127.0.0.1")
        assert zero.environment["CUDA_VISIBLE_DEVICES"] != one.environment["CUDA_VISIBLE_DEVICES"]
    with LocalRanks(1, "ring", ("serve",)).processes() as [alone]:
        assert rank_of(alone.environment) is None


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        ("x" * 64, 0o640, "may be read by others"),
        ("short", 0o600, "less than 16 bytes"),
        ("", None, "No such file"),
    ],
)
def test_a_secret_that_is_none_is_refused(
    content: str, mode: int | None, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "secret"
    if mode is not None:
        path.write_text(content)
        path.chmod(mode)
    with pytest.raises(SettingsInvalid, match=f"--rank-secret-file {path}.*{reason}"):
        rank_secret(Settings(rank_secret_file=str(path)))


def test_a_secret_that_is_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "secret", 0o600)
    with pytest.raises(SettingsInvalid, match="is no regular file"):
        rank_secret(Settings(rank_secret_file=str(path)))


@pytest.mark.parametrize(
    "host", ["-oProxyCommand=touch x", "a b", "a;b", "'a'", "$(a)", "a\nb", ""]
)
def test_a_host_that_ssh_would_take_as_an_option_is_refused(host: str, tmp_path: Path) -> None:
    (tmp_path / "hosts.json").write_text(json.dumps([{"ssh": "user@mac-1.local"}, {"ssh": host}]))
    outcome = CliRunner().invoke(
        main, ["launch", "--hostfile", str(tmp_path / "hosts.json"), "--", "serve"]
    )
    assert outcome.exit_code == USAGE_ERROR
    assert outcome.stderr.endswith(f": {host!r} is no name of a host for ssh\n")


@pytest.mark.parametrize("content", ["[]", '{"hosts": []}'])
def test_a_hostfile_without_hosts_is_refused(content: str, tmp_path: Path) -> None:
    """Found by use: nothing was started, nothing said, and the exit code was 0."""
    (tmp_path / "hosts.json").write_text(content)
    outcome = CliRunner().invoke(
        main, ["launch", "--hostfile", str(tmp_path / "hosts.json"), "--", "serve"]
    )
    assert outcome.exit_code == USAGE_ERROR
    assert (
        outcome.stderr
        == f"trouper: --hostfile {tmp_path}/hosts.json names no host; give one for each rank\n"
    )


def test_what_is_launched_is_serve() -> None:
    outcome = CliRunner().invoke(main, ["launch", "-n", "2", "--", "bench"])
    assert outcome.exit_code == 2
    assert "launch starts `serve`" in outcome.output


@pytest.mark.parametrize(
    ("variables", "host"),
    [
        ({"MLX_JACCL_COORDINATOR": "10.0.0.1:32323"}, "10.0.0.1"),
        ({"NCCL_HOST_IP": "10.0.0.2"}, "10.0.0.2"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "127.0.0.1"),
    ],
)
def test_rank_0_listens_where_the_launcher_says_it_is(variables: dict[str, str], host: str) -> None:
    assert control_host(variables) == host
