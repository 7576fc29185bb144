"""Limits of keys and their usage: 50 clients by real sockets, against a clock that runs fast."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import FakeEngine
from tests.web.serving import Served, exchange, get, pace, post, serving
from tests.web.test_key_rights import CHAT, bearer, key_file
from tests.web.test_logs import Log, log
from trouper import RequestFailed
from trouper.protocol.api_keys import ApiKey
from trouper.protocol.record import RequestRecord
from trouper.web.keys.key_limits import WINDOW_S, KeyAccounts, SlidingWindow

__all__ = ["log"]
CLIENTS, REQUESTS = 50, 7
STEP_S = 0.4
LIMIT, REQUEST_LIMIT = 600, 30


@attrs.define
class FastClock:
    """Time passes with each response, however busy the machine is."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@attrs.frozen
class Spent:
    """An answer, and when its request was sent and had ended."""

    began: float
    ended: float
    tokens: int


def most_in_a_minute(answers: list[Spent], amount: Callable[[Spent], int]) -> int:
    """The largest sum of answers that began and ended within one minute, whichever minute that
    is."""
    return max(
        sum(
            amount(other)
            for other in answers
            if first.began <= other.began and other.ended < first.began + WINDOW_S
        )
        for first in answers
    )


async def test_limits_hold_to_a_token_under_50_clients(tmp_path: Path) -> None:
    """What was used in any minute is never above the limit, and near to it: clients take what there
    is."""
    file = key_file(
        tmp_path,
        f"sk-tokens tokens_per_minute={LIMIT}\nsk-requests requests_per_minute={REQUEST_LIMIT}\n",
    )
    clock, chance = FastClock(), random.Random(7)
    answers: dict[str, list[Spent]] = {"sk-tokens": [], "sk-requests": []}
    refused: list[tuple[int, dict[str, str], Any]] = []
    async with serving(FakeEngine(before_step=pace), api_key_file=file, clock=clock) as served:

        async def client(key: str, lengths: list[int]) -> None:
            for length in lengths:
                began = clock()
                body = {"prompt": "x" * length, "max_tokens": 40, "ignore_eos": length % 2 == 0}
                status, headers, data = await exchange(
                    served, post("/v1/completions", body, bearer(key))
                )
                clock.now += STEP_S
                if status == 429:
                    refused.append((status, headers, json.loads(data)))
                    continue
                assert status == 200, data
                answers[key].append(
                    Spent(began, clock(), json.loads(data)["usage"]["total_tokens"])
                )

        async with trio.open_nursery() as nursery:
            for number in range(CLIENTS):
                key = ("sk-tokens", "sk-requests")[number % 2]
                nursery.start_soon(client, key, [chance.randrange(1, 60) for _ in range(REQUESTS)])
    assert LIMIT / 2 < most_in_a_minute(answers["sk-tokens"], lambda one: one.tokens) <= LIMIT
    assert (
        REQUEST_LIMIT / 2 < most_in_a_minute(answers["sk-requests"], lambda one: 1) <= REQUEST_LIMIT
    )
    assert {body["error"]["param"] for *_, body in refused} == {
        "tokens_per_minute",
        "requests_per_minute",
    }
    for _, headers, body in refused:
        name = body["error"]["param"]
        assert name in ("tokens_per_minute", "requests_per_minute")
        assert (
            body["error"]["code"] == "rate_limit_exceeded"
            and 1 <= int(headers["retry-after"]) <= WINDOW_S
        )
        assert f"x-ratelimit-limit-{name.partition('_')[0]}" in headers


def test_nobody_waits_longer_than_the_window() -> None:
    """Found on a loaded machine: `Retry-After` of 61 seconds, since 4.001 + 60 - 4.001 is a little
    more than 60."""
    window = SlidingWindow(lambda: 4.001)
    window.settle(0, 10)
    assert window.wait_s(1, 10) == WINDOW_S


def test_what_running_requests_hold_is_asked_for_again_after_as_long_as_they_run() -> None:
    now = [100.0]
    window = SlidingWindow(lambda: now[0])
    window.hold(10)
    for passed, wait_s in ((0, 1), (7, 7), (500, WINDOW_S)):
        now[0] = 100.0 + passed
        assert window.wait_s(1, 10) == window.reset_s() == wait_s
    window.settle(10, 0)
    window.hold(10)
    assert window.wait_s(1, 10) == 1


async def test_a_request_that_no_minute_can_hold_is_refused_for_good(tmp_path: Path) -> None:
    file = key_file(tmp_path, "sk-a name=alice tokens_per_minute=100\n")
    async with serving(FakeEngine(), api_key_file=file) as served:
        ask = post("/v1/completions", {"prompt": "hello", "max_tokens": 99}, bearer("sk-a"))
        status, headers, data = await exchange(served, ask)
        error = json.loads(data)["error"]
        assert (status, error["param"], error["code"]) == (
            400,
            "max_tokens",
            "tokens_per_minute_exceeded",
        )
        assert "retry-after" not in headers and "'alice'" in error["message"]
        for expected in (200, 429):
            chat = {"messages": CHAT["messages"], "ignore_eos": True}
            ask = post("/v1/chat/completions", chat, bearer("sk-a"))
            status, headers, data = await exchange(served, ask)
            assert status == expected, data
            assert headers["x-ratelimit-remaining-tokens"] == "0"
        status, _, data = await exchange(served, post("/v1/messages", CHAT, bearer("sk-a")))
        said = json.loads(data)
        assert (status, said["error"]["type"]) == (
            429,
            "rate_limit_error",
        ) and "tokens_per_minute" in str(said)


async def used(served: Served, key: str) -> dict[str, dict[str, Any]]:
    status, _, data = await exchange(served, get("/v1/usage", bearer(key)))
    assert status == 200
    return {one["key"]: one for one in json.loads(data)["data"]}


async def test_usage_is_told_by_key_and_model(tmp_path: Path) -> None:
    file = key_file(
        tmp_path,
        "sk-a name=alice\nsk-b name=bob\nsk-old name=bob\nsk-w name=watcher observability=true\n",
    )
    async with serving(FakeEngine(), api_key_file=file) as served:
        for key, prompt in (
            ("sk-a", "x" * 300),
            ("sk-a", "x" * 300),
            ("sk-b", "abc"),
            ("sk-old", "abcd"),
        ):
            body = {"prompt": prompt, "max_tokens": 5, "ignore_eos": True, "n": 1}
            assert (await exchange(served, post("/v1/completions", body, bearer(key))))[0] == 200
        alice = (await used(served, "sk-a"))["alice"]
        [of_model] = alice["models"]
        assert {name: alice[name] for name in of_model if name != "model"} == {
            name: count for name, count in of_model.items() if name != "model"
        }
        assert (alice["requests"], alice["prompt_tokens"], alice["completion_tokens"]) == (
            2,
            600,
            10,
        )
        assert 0 < alice["cached_tokens"] < 300
        assert (
            (await used(served, "sk-b")).keys() == (await used(served, "sk-old")).keys() == {"bob"}
        )
        every = await used(served, "sk-w")
        assert every["alice"] == alice and every["bob"]["requests"] == 2
        status, _, data = await exchange(served, get("/metrics", bearer("sk-w")))
        assert status == 200
        assert (
            f'trouper_key_prompt_tokens_total{{key="alice",model_name="{of_model["model"]}"}} 600.0'
            in data.decode()
        )


async def test_who_was_refused_by_a_limit_is_named(log: Log, tmp_path: Path) -> None:
    keys = "sk-a name=alice requests_per_minute=1\nsk-boss name=boss observability=true\n"
    async with serving(api_key_file=key_file(tmp_path, keys)) as served:
        for _ in range(3):
            body = {"prompt": "abc", "max_tokens": 1}
            await exchange(served, post("/v1/completions", body, bearer("sk-a")))
        await exchange(served, post("/v1/completions", {}, bearer("sk-wrong")))
        _, _, metrics = await exchange(served, get("/metrics", bearer("sk-boss")))
    first, second, wrong, _ = log["response"]
    code = "rate_limit_exceeded"
    for line in (first, second):
        assert (line["status"], line["key"], line["code"]) == (429, "alice", code)
        assert line["message"] == f"POST '/v1/completions' by alice 429 ({code})"
    assert (wrong["status"], wrong["code"], "key" in wrong) == (401, "invalid_api_key", False)
    assert f'trouper_key_refused_total{{code="{code}",key="alice"}} 2.0' in metrics.decode()
    assert "sk-" not in log.text


def record(prompt: int, generated: int) -> RequestRecord:
    return RequestRecord(
        request_id="",
        reason="stop",
        prompt_tokens=prompt,
        generated_tokens=generated,
        arrived_at=0,
        ended_at=0,
        admitted_at=0,
    )


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 60), st.floats(0, 50), st.floats(0, 100)),
        max_size=60,
    )
)
def test_no_minute_has_more_than_the_limit(asked: list[tuple[int, int, float, float]]) -> None:
    """Whenever requests come and however long they run: what ran within any minute is within the
    limit."""
    now, limit = 0.0, 100
    account = KeyAccounts(lambda: now).of(ApiKey("k", tokens_per_minute=limit))
    running: list[tuple[float, float, int, Callable[[], None]]] = []
    spent: list[Spent] = []

    def end_until(time: float) -> None:
        nonlocal now
        for one in sorted(running, key=lambda one: one[0]):
            if one[0] <= time:
                now = one[0]
                one[3]()
                spent.append(Spent(one[1], one[0], one[2]))
                running.remove(one)
        now = time

    for prompt, most, pause, lasts in asked:
        end_until(now + pause)
        reservation = account.reserve("m")
        try:
            reservation.admit(prompt, most, True)
        except RequestFailed:
            continue
        answer = record(prompt, most // 2)
        running.append(
            (
                now + lasts,
                now,
                prompt + most // 2,
                lambda one=reservation, answer=answer: one.end(answer),  # type: ignore[misc]
            )
        )
    end_until(now + 200)
    assert account.tokens.taken() == 0
    for last in spent:
        within = [
            one for one in spent if one.ended > last.ended - WINDOW_S and one.began <= last.ended
        ]
        older = [one for one in within if one.began > last.ended]
        assert not older and sum(one.tokens for one in within if one.began <= last.began) <= limit


def test_a_limit_is_exact() -> None:
    """The last token fits, one more does not; what ended counts for a minute, and no longer."""
    now = 0.0
    account = KeyAccounts(lambda: now).of(ApiKey("k", tokens_per_minute=100, requests_per_minute=2))
    first, second, third = (account.reserve("m") for _ in range(3))
    assert first.admit(40, 30, True) == 30 and second.admit(10, 20, True) == 20
    with pytest.raises(RequestFailed, match="try again in 1 s"):
        third.admit(1, 0, True)
    now = 10.0
    first.end(record(40, 10))
    assert account.tokens.taken() == 80 and third.admit(1, 19, True) == 19
    with pytest.raises(RequestFailed, match="try again in 60 s"):
        account.reserve("m").admit(1, 0, True)
    now = 69.9
    assert account.tokens.taken() == 100
    now = 70.0
    assert account.tokens.taken() == 50
    account.begin()
    account.begin()
    with pytest.raises(RequestFailed, match=r"requests_per_minute.* try again in 60 s"):
        account.begin()
    now = 130.0
    account.begin()
    account.ask("m")
    assert account.usage["m"].requests == 1


def test_what_a_key_without_limits_has_used_is_forgotten() -> None:
    """Else every request of a server without keys would leave some bytes for ever."""
    clock = FastClock()
    account = KeyAccounts(clock).of(ApiKey("sk-free"))
    for _ in range(100):
        account.begin()
        account.ask("fake")
        reserved = account.reserve("fake")
        reserved.admit(10, 5, named=True)
        reserved.end(record(10, 5))
        clock.now += WINDOW_S / 2
    assert len(account.requests._past) <= 2 and len(account.tokens._past) <= 2
    assert account.usage["fake"].requests == 100


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "abc"}),
        ("/detokenize", {"tokens": [97]}),
        ("/v1/messages/count_tokens", {"messages": CHAT["messages"]}),
        ("/v1/responses/input_tokens", {"input": "abc"}),
    ],
)
async def test_requests_that_only_count_tokens_ask_a_model_too(
    path: str, body: dict[str, Any], tmp_path: Path
) -> None:
    """They cost none of a key's tokens. Found by review: they had no limit at all."""
    file = key_file(tmp_path, "sk-a name=alice requests_per_minute=2 tokens_per_minute=10\n")
    async with serving(FakeEngine(), api_key_file=file, clock=FastClock()) as served:
        for remaining in ("1", "0"):
            status, headers, data = await exchange(served, post(path, body, bearer("sk-a")))
            assert status == 200, data
            assert headers["x-ratelimit-remaining-requests"] == remaining
            assert headers["x-ratelimit-remaining-tokens"] == "10"
        status, headers, data = await exchange(served, post(path, body, bearer("sk-a")))
        assert status == 429 and "requests_per_minute" in data.decode()
        assert int(headers["retry-after"]) == WINDOW_S
        assert (await used(served, "sk-a"))["alice"]["requests"] == 2
