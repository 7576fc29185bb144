"""Limits of keys where one request has several prompts or choices, and keys that move in their
file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import FakeEngine
from tests.web.serving import STREAM, exchange, get, post, serving
from tests.web.test_key_limits import FastClock, record
from tests.web.test_key_rights import bearer, key_file
from trouper import RequestFailed, Runtime, ServerSettings
from trouper.protocol.api_keys import ApiKey, Keys
from trouper.protocol.requests import Generate
from trouper.web.keys.key_limits import WINDOW_S, KeyAccounts, SlidingWindow
from trouper.web.metrics.collector import KEY_METRICS, Metrics

LONG = "x" * 100
TOO_MANY: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [LONG] * 3, "max_tokens": 40},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": LONG}],
        "n": 3,
        "max_tokens": 60,
    },
}


async def test_choices_without_a_length_share_a_minute(tmp_path: Path) -> None:
    """The first had all of it, and the second was told to come back, at each try."""
    file = key_file(tmp_path, "sk-a tokens_per_minute=600\n")
    async with serving(FakeEngine(), api_key_file=file) as served:
        body = {"messages": [{"role": "user", "content": "hello"}], "n": 3, "ignore_eos": True}
        status, headers, data = await exchange(
            served, post("/v1/chat/completions", body, bearer("sk-a"))
        )
    assert status == 200, data
    assert len(json.loads(data)["choices"]) == 3
    assert headers["x-ratelimit-remaining-tokens"] == "0"


async def test_as_long_as_there_is_room_names_no_length(tmp_path: Path) -> None:
    """As -1 of llama.cpp's and Ollama's clients means it."""
    file = key_file(tmp_path, "sk-a tokens_per_minute=100\n")
    async with serving(FakeEngine(), api_key_file=file) as served:
        body = {"prompt": "hello", "n_predict": -1, "ignore_eos": True}
        status, _, data = await exchange(served, post("/v1/completions", body, bearer("sk-a")))
    assert status == 200, data
    assert json.loads(data)["usage"]["total_tokens"] == 100


@pytest.mark.parametrize("path", TOO_MANY)
async def test_what_no_minute_can_hold_together_is_refused_for_good(
    path: str, tmp_path: Path
) -> None:
    file = key_file(tmp_path, "sk-a name=alice tokens_per_minute=350\n")
    async with serving(FakeEngine(), api_key_file=file) as served:
        status, headers, data = await exchange(served, post(path, TOO_MANY[path], bearer("sk-a")))
        error = json.loads(data)["error"]
        assert (status, error["code"]) == (400, "tokens_per_minute_exceeded"), error
        assert "retry-after" not in headers and "'alice'" in error["message"]
        assert "send fewer prompts and choices at a time" in error["message"]


def test_a_request_that_lasts_for_minutes_may_use_each_of_them() -> None:
    """As to rank a thousand documents on a slow device does."""
    clock = FastClock()
    account = KeyAccounts(clock).of(ApiKey("k", tokens_per_minute=100))
    request = account.request_tokens()
    for _ in range(3):
        one = account.reserve("m", request)
        assert one.admit(60, 20, True) == 20
        one.end(record(60, 20))
        with pytest.raises(
            RequestFailed, match="beside 80 of the request's other prompts"
        ) as refused:
            account.reserve("m", request).admit(60, 20, True)
        assert refused.value.problem.status == 400
        with pytest.raises(RequestFailed, match="try again in 60 s"):
            account.reserve("m").admit(60, 20, True)
        clock.now += WINDOW_S


async def test_what_never_had_a_row_uses_nothing(tmp_path: Path) -> None:
    """A client that comes back after a full queue's 503 would pay for each try, until its minute is
    spent."""
    file = key_file(tmp_path, "sk-a tokens_per_minute=1000\nsk-busy\n")
    settings = {"completion_batch_size": 1, "queue_timeout_s": 0.05}
    async with (
        serving(settings=settings, api_key_file=file) as served,
        await served.connect() as busy,
    ):
        await busy.send_all(post("/v1/completions", STREAM, bearer("sk-busy")))
        while b"data: " not in await busy.receive_some():
            pass
        body = {"prompt": "x" * 100, "max_tokens": 4}
        status, headers, data = await exchange(
            served, post("/v1/completions", body, bearer("sk-a"))
        )
        assert (status, json.loads(data)["error"]["code"]) == (503, "queue_timeout")
        usage = json.loads((await exchange(served, get("/v1/usage", bearer("sk-a"))))[2])["data"]
    assert headers["x-ratelimit-remaining-tokens"] == "1000"
    assert [(one["requests"], one["prompt_tokens"]) for one in usage] == [(1, 0)]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.floats(0, 40))), st.integers(0, 5)
)
def test_the_time_until_a_limit_is_whole_again(
    past: list[tuple[int, int, float]], running: int
) -> None:
    """By the newest of what has ended alone. To look at all of them took milliseconds where a key
    asks hundreds of times a second."""
    clock = FastClock()
    window = SlidingWindow(clock)
    for held, used, pause in past:
        window.hold(held)
        window.settle(held, used)
        clock.now += pause
    window.hold(running)
    assert window.reset_s() == window.wait_s(100, 100)


def test_keys_that_move_in_their_file_are_called_by_their_new_line(tmp_path: Path) -> None:
    """Two accounts of one label are two samples of one series, and Prometheus takes none of such a
    scrape."""
    file = key_file(tmp_path, "sk-a\n")
    keys, accounts = Keys.of(ServerSettings(api_key_file=file)), KeyAccounts(FastClock())

    def asks(given: str) -> None:
        key = keys.find(None, given)
        assert key is not None
        accounts.of(key).ask("m")

    asks("sk-a")
    file.write_text("sk-new\nsk-a\n")
    reread = keys.read_again()
    assert reread is not None
    keys.take(reread)
    asks("sk-new")
    assert [(one.key.key, one.key.label) for one in accounts.listed(keys)] == [
        ("sk-new", "line-1"),
        ("sk-a", "line-2"),
    ]
    metrics = Metrics(list)
    metrics.accounts = lambda: accounts.listed(keys)
    samples = [
        (sample.name, *sorted(sample.labels.items()))
        for one in KEY_METRICS
        for sample in one.family(metrics).samples
    ]
    assert samples and len(samples) == len(set(samples))


async def test_a_request_runs_for_the_tenant_of_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tenants share the rows: `tests/core/test_tenant_shares.py`."""
    file = key_file(tmp_path, "sk-a name=alice\nsk-b name=bob\n")
    seen: list[str] = []
    send = Runtime.send

    async def watched(runtime: Runtime, generate: Generate, *more: Any) -> Any:
        seen.append(generate.tenant)
        return await send(runtime, generate, *more)

    monkeypatch.setattr(Runtime, "send", watched)
    async with serving(FakeEngine(), api_key_file=file) as served:
        for key in ("sk-a", "sk-b", "sk-a"):
            body = {"prompt": "hello", "max_tokens": 1}
            status, _, data = await exchange(served, post("/v1/completions", body, bearer(key)))
            assert status == 200, data
    assert seen[0] == seen[2] != seen[1]
    assert "" not in seen
