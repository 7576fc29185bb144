from __future__ import annotations

import json
import logging
import os
import signal
import stat
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import trio

from trouper.actors.ranks.follower import Follower
from trouper.actors.ranks.leader import Leader
from trouper.actors.ranks.rank_link import RankLost
from trouper.cli.exits import RANK_LOST, USAGE_ERROR, end_at_once, insists, leaving_signals
from trouper.process import NCCL_HOST, backend_of
from trouper.protocol.paths import expanded
from trouper.protocol.problems import ModelUnusable, SettingsInvalid
from trouper.protocol.settings import Settings
from trouper.run import mlx_engine

logger = logging.getLogger("trouper")
RANK_VARIABLES = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
JOIN_S = 120  # Native code waits and holds the GIL, so SIGALRM keeps the limit.
SHORTEST_SECRET, LONGEST_SECRET = 16, 4096
LAST_ERRORS_S = 0.7  # For the errors that clients get
ORPHAN_S = 30.0  # For a drain after the launcher has died


def rank_of(environment: Mapping[str, str]) -> int | None:
    """None without a group."""
    if backend_of(environment) is None:
        return None
    return next((int(environment[name]) for name in RANK_VARIABLES if environment.get(name)), None)


def control_host(environment: Mapping[str, str]) -> str:
    """Return the address of rank 0; loopback if no variable names one."""
    if hosts := environment.get("MLX_HOSTFILE"):
        first: str = json.loads(Path(hosts).read_text())[0][0]
        return first.rsplit(":", 1)[0].strip("[]")
    if coordinator := environment.get("MLX_JACCL_COORDINATOR"):
        return coordinator.rsplit(":", 1)[0].strip("[]")
    return environment.get(NCCL_HOST) or "127.0.0.1"


def rank_secret(settings: Settings) -> bytes:
    """Raises `SettingsInvalid` for a file that others may read or write, or a short secret."""
    flag = "--rank-secret-file"
    if settings.rank_secret_file is None:
        return b""
    try:
        # A FIFO is opened without waiting for its other end.
        path = expanded(settings.rank_secret_file)
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise SettingsInvalid(
                    f"{flag} {settings.rank_secret_file} is no regular file", flag
                )
            secret = file.read(LONGEST_SECRET).strip()
    except OSError as error:
        reason = error.strerror or error
        raise SettingsInvalid(f"{flag} {settings.rank_secret_file}: {reason}", flag) from error
    if status.st_uid not in (0, os.getuid()) or status.st_mode & 0o077:
        text = f"{flag} {settings.rank_secret_file} may be read by others: chmod 600, and own it"
        raise SettingsInvalid(text, flag)
    if len(secret) < SHORTEST_SECRET:
        text = (
            f"{flag} {settings.rank_secret_file} has less than {SHORTEST_SECRET} bytes; make it by "
        )
        raise SettingsInvalid(text + "`openssl rand -hex 32`", flag)
    return secret


def only_model(settings: Sequence[Settings]) -> Settings:
    """Raises `SettingsInvalid` for several models."""
    if len(settings) > 1:
        raise SettingsInvalid(
            f"several ranks serve one model: give one --model instead of {len(settings)}"
        )
    return settings[0]


def bound_joining() -> None:
    signal.alarm(JOIN_S)


def leave_without_launcher() -> None:
    logger.error("the launcher is gone: leaving")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_S)
    os._exit(RANK_LOST)


def leader(settings: Settings, environment: Mapping[str, str]) -> Leader:
    host = settings.control_host or control_host(environment)
    return Leader(settings, host, rank_secret(settings))


async def _disarm(joined: trio.Event) -> None:
    await joined.wait()
    signal.alarm(0)


async def end_with_group(ranks: Leader) -> None:
    """End this process when a rank is lost (F27). Clients get their errors first."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_disarm, ranks.joined)
        await ranks.lost.wait()
        await trio.sleep(LAST_ERRORS_S)
        end_at_once(USAGE_ERROR if ranks.unusable else RANK_LOST)


@contextmanager
def lost_is_an_exit_code(ranks: Leader) -> Iterator[None]:
    try:
        yield
    except* RankLost:
        end_at_once(USAGE_ERROR if ranks.unusable else RANK_LOST)


async def follow(settings: Settings, rank: int) -> None:
    """Run a follower; never returns."""
    follower = Follower(settings, mlx_engine()(settings), secret=rank_secret(settings))
    _tell_rank_0(follower)
    with trio.open_signal_receiver(*leaving_signals()) as signals:
        async with trio.open_nursery() as watching:
            watching.start_soon(_watch_signals, signals, follower)
            watching.start_soon(_disarm, follower.joined)
            watching.start_soon(_end_with, follower, rank)
            try:
                await follower.run()
            except* (RankLost, ModelUnusable):
                if not follower.ended.is_set():
                    raise
    _end(follower, rank)


async def _end_with(follower: Follower, rank: int) -> None:
    """End this process with the follower. The engine may never end."""
    await follower.ended.wait()
    await trio.sleep(LAST_ERRORS_S)
    _end(follower, rank)


def _end(follower: Follower, rank: int) -> None:
    if follower.reason:
        _tell_here()
        logger.critical("rank %d ends: %s", rank, follower.reason)
    end_at_once(0 if not follower.reason else USAGE_ERROR if follower.unusable else RANK_LOST)


async def _watch_signals(signals: AsyncIterator[int], follower: Follower) -> None:
    # Ctrl-C reaches all ranks: rank 0 drains and lets the others end.
    reported = False
    async for number in signals:
        once_more = insists(number)
        if not follower.linked or (reported and once_more):
            end_at_once(128 + number)
        reported = True
        logger.info(
            "%s: rank 0 says when this ends; once more ends at once", signal.Signals(number).name
        )


class ToRank0(logging.Handler):
    """Logs to rank 0 while there is a link, else to this terminal."""

    def __init__(self, follower: Follower, here: Sequence[logging.Handler]) -> None:
        super().__init__()
        self._follower, self.here = follower, tuple(here)
        self._token = trio.lowlevel.current_trio_token()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._token.run_sync_soon(self._tell, record)  # A record may come from any thread.
        except trio.RunFinishedError:
            self._print(record)

    def _tell(self, record: logging.LogRecord) -> None:
        if self._follower.ended.is_set() or not self._follower.say(
            record.levelno, self.format(record)
        ):
            self._print(record)

    def _print(self, record: logging.LogRecord) -> None:
        for handler in self.here:
            handler.handle(record)


def _tell_rank_0(follower: Follower) -> None:
    root = logging.getLogger()
    root.handlers = [ToRank0(follower, root.handlers)]


def _tell_here() -> None:
    root = logging.getLogger()
    root.handlers = [
        here
        for handler in root.handlers
        for here in (handler.here if isinstance(handler, ToRank0) else (handler,))
    ]
