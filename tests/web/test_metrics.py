"""/metrics, through real sockets: parsed by Prometheus' own parser, and true."""

from __future__ import annotations

import math
from functools import partial

import attrs
import trio

from tests.actors.test_model_manager import manager_of, tokens_from
from tests.fakes import EOS, FakeEngine, deadly
from tests.web.scraping import Scraped, read_text, scrape
from tests.web.serving import (
    PATIENCE_S,
    STREAM,
    Served,
    ask,
    eventually,
    exchange,
    get,
    pace,
    post,
    receive_all,
    serving,
)
from trouper.actors.runtime.served_models import OneModel
from trouper.protocol.health import RanksStats, RankStats
from trouper.protocol.histogram import Histogram
from trouper.protocol.record import RequestRecord
from trouper.web.metrics.collector import ALL, Metrics
from trouper.web.metrics.model_metrics import RANKS, ModelScrape
from trouper.web.metrics.request_metrics import EXPECTED

MODEL = "fake"
LEAVING = 200
GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "trouper_rows_prefilling",
    "trouper_channel_depth",
    "trouper_channel_senders_waiting",
)


async def complete(served: Served, **more: object) -> None:
    status, _ = await ask(served, {"prompt": "hello", "max_tokens": 5, "ignore_eos": True} | more)
    assert status == 200


async def test_what_was_answered_is_counted() -> None:
    async with serving(FakeEngine(token_at=lambda _, place: EOS if place == 3 else 97)) as served:
        await complete(served)
        await complete(served, ignore_eos=False)
        assert (await ask(served, {"prompt": [], "max_tokens": 5}))[0] == 400
        assert (await ask(served, {"prompt": "x" * 5000, "max_tokens": 5}))[0] == 400
        seen = await scrape(served)
    assert (
        seen.value(
            "vllm:request_success_total", finished_reason="length", model_name=MODEL, engine="0"
        )
        == 1
    )
    assert seen.value("vllm:request_success_total", finished_reason="stop") == 1
    assert seen.value("vllm:request_success_total", finished_reason="abort") == 0
    assert (
        seen.value(
            "trouper_request_problems_total", reason="refused", code="context_length_exceeded"
        )
        == 1
    )
    assert seen.value("vllm:prompt_tokens_total") == 10
    assert seen.value("vllm:generation_tokens_total") == 9
    assert seen.value("vllm:request_generation_tokens_sum") == 9
    assert seen.value("vllm:request_generation_tokens_count") == 2
    assert seen.value("vllm:request_generation_tokens_bucket", le="2.0") == 0
    assert seen.value("vllm:request_generation_tokens_bucket", le="5.0") == 2
    assert seen.value("vllm:inter_token_latency_seconds_count") == 4 + 3, (
        "between five tokens, and between four"
    )
    assert seen.value("vllm:inter_token_latency_seconds_sum") > 0
    for name in (
        "time_to_first_token",
        "e2e_request_latency",
        "request_queue_time",
        "request_prefill_time",
    ):
        assert seen.value(f"vllm:{name}_seconds_count") == 2
    assert seen.value("vllm:prefix_cache_queries_total") == 10
    assert seen.value("vllm:prefix_cache_hits_total") == 4, (
        "all of the second prompt but the token that is always computed"
    )
    assert seen.value("trouper_http_responses_total", path="/v1/completions", status="200") == 2
    assert seen.value("trouper_http_responses_total", path="/v1/completions", status="400") == 2


async def test_names_are_the_same_whatever_format_is_asked_for() -> None:
    """A scraper that prefers OpenMetrics must not find `vllm_num_requests_running`."""
    async with serving() as served:
        for accept in (
            "application/openmetrics-text; version=1.0.0",
            "text/plain;version=1.0.0;q=0.4, */*",
            "text/html",
        ):
            seen = await scrape(served, f"Accept: {accept}\r\n")
            assert seen.value("vllm:num_requests_running", model_name=MODEL) == 0


async def test_gauges_are_zero_again_after_clients_left_in_every_phase() -> None:
    """Queued, prefilling, decoding, before anything; streamed and not: whoever leaves takes
    everything along."""
    leaving = trio.Event()
    async with serving(settings={"max_queue_size": LEAVING}) as served:
        async with trio.open_nursery() as nursery:
            for number in range(LEAVING):
                nursery.start_soon(leave, served, number, leaving)
            await eventually(lambda: served.busy > LEAVING / 2)
            busy = await scrape(served)
            running = busy.value("vllm:num_requests_running")
            assert 0 < running <= 32
            assert busy.value("vllm:kv_cache_usage_perc") == running / 32
            assert busy.value("vllm:num_requests_waiting") > 0
            leaving.set()
        await eventually(lambda: served.busy + served.connections == 0)
        seen = await scrape(served)
    for name in GAUGES:
        assert set(seen.values(name)) == {0.0}, name
    aborted = seen.value("vllm:request_success_total", finished_reason="abort")
    assert LEAVING / 2 < aborted <= LEAVING, "some left before they were read"
    assert aborted == sum(seen.values("vllm:request_success_total"))
    assert seen.value("vllm:e2e_request_latency_seconds_count") == 0, "half an answer is no answer"


async def leave(served: Served, number: int, leaving: trio.Event) -> None:
    body = STREAM | {"stream": number % 2 == 0, "prompt": f"{number}"}
    async with await served.connect() as stream, trio.open_nursery() as nursery:
        await stream.send_all(post("/v1/completions", body))
        nursery.start_soon(receive_all, stream)
        if number % 8:
            await leaving.wait()
        nursery.cancel_scope.cancel()


async def test_a_limit_counts_by_its_code() -> None:
    async with serving(settings={"request_timeout_s": 0.5}) as served:
        status, _ = await ask(served, STREAM | {"stream": False})
        assert status == 504
        seen = await scrape(served)
    assert seen.value("vllm:request_success_total", finished_reason="error") == 1
    assert seen.value("trouper_request_problems_total", reason="error", code="request_timeout") == 1


async def test_a_stalled_engine_and_a_restart_show() -> None:
    go_on = trio.Event()

    async def stall(_: object) -> None:
        await go_on.wait()

    async with serving(FakeEngine(dies=deadly)) as served:
        assert (await ask(served, {"prompt": "hello"}))[0] == 422
        assert (await ask(served, {"prompt": "hello"}))[0] == 422
        seen = await scrape(served)
        assert (
            seen.value("trouper_actor_restarts_total", actor="Scheduler+RankMirror+ModelStepper")
            == 2
        )
        assert seen.value("trouper_engine_crashes_total") == 2
        assert seen.value("trouper_requests_resumed_total") == 1
        assert (
            seen.value("trouper_contents_convicted_total")
            == seen.value("trouper_contents_quarantined")
            == 1
        )
        assert seen.value("trouper_requests_quarantined_total") == 2
        assert seen.value("trouper_rows_apart") == 0
        assert seen.value("trouper_allocation_failures_total") == 0
        assert seen.value("trouper_allocation_bound_bytes") == 0
        assert seen.value("trouper_actor_restarts_total", actor="RequestIntake") == 0
    async with (
        serving(FakeEngine(before_step=stall), {"stall_timeout_s": 0.5}) as served,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(partial(complete, served))
        await eventually(lambda: not served.runtime.health().ready)
        seen = await scrape(served)
        assert (seen.value("trouper_stalls_total"), seen.value("trouper_ready")) == (1, 0)
        assert seen.value("trouper_stalled_seconds") > 0
        go_on.set()
        await eventually(lambda: served.runtime.health().ready)
        assert (await scrape(served)).value("trouper_stalled_seconds") == 0


async def test_channels_tell_how_full_they_were() -> None:
    async with serving() as served:
        async with trio.open_nursery() as nursery:
            for _ in range(30):
                nursery.start_soon(complete, served)
        seen = await scrape(served)
    assert 0 <= seen.value("trouper_channel_depth_peak", channel="requests") <= 16
    assert seen.value("trouper_channel_depth_peak", channel="plans") <= seen.value(
        "trouper_channel_capacity", channel="plans"
    )
    assert seen.value("trouper_channel_capacity", channel="orders") == 64


async def test_it_needs_no_key_and_tells_nobody_anything() -> None:
    secret = "the text of a prompt"
    async with serving(api_key=("k",)) as served:
        body = {"prompt": secret, "max_tokens": 2, "user": "somebody"}
        status, _ = await ask(
            served, body, headers="Authorization: Bearer k\r\nX-Request-Id: abc123\r\n"
        )
        assert status == 200
        seen = await scrape(served)
        assert (await exchange(served, get("/v1/models")))[0] == 401
    assert seen.value("vllm:request_success_total", finished_reason="length") == 1
    for word in (secret, "abc123", "somebody"):
        assert word not in seen.text


async def test_paths_that_nobody_serves_are_one_label() -> None:
    async with serving() as served:
        for name in ("/nothing", "/else/1", "/v1/models/fake", "/v1/models/wrong"):
            await exchange(served, get(name))
        seen = await scrape(served)
    assert seen.value("trouper_http_responses_total", path="", status="404") == 2
    assert (
        seen.value("trouper_http_responses_total", path="/v1/models/<path:model>", status="404")
        == 1
    )


async def test_scrapes_while_streams_run_cost_them_nothing() -> None:
    async with serving() as served, await served.connect() as stream:
        await stream.send_all(post("/v1/completions", STREAM | {"max_tokens": 50}))
        said = b""
        with trio.fail_after(PATIENCE_S):
            while b"[DONE]" not in said:
                said += await stream.receive_some()
                assert all(map(math.isfinite, (await scrape(served)).samples.values()))


ASKED_BY_VLLMS_DASHBOARD = (
    "e2e_request_latency_seconds",
    "generation_tokens_total",
    "kv_cache_usage_perc",
    "num_requests_running",
    "num_requests_waiting",
    "prompt_tokens_total",
    "request_decode_time_seconds",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_prefill_time_seconds",
    "request_prompt_tokens",
    "request_queue_time_seconds",
    "request_success_total",
    "time_per_output_token_seconds",
    "time_to_first_token_seconds",
)


def test_what_vllms_own_dashboard_asks_for_is_there() -> None:
    assert {f"vllm:{name}" for name in ASKED_BY_VLLMS_DASHBOARD} <= {one.name for one in ALL}


async def exposed(metrics: Metrics) -> Scraped:
    return read_text((await metrics.exposed()).decode())


async def test_each_model_is_one_value_of_the_label(autojump_clock: object) -> None:
    """And one that is not loaded tells that, and of its requests; they are counted on when it is
    back."""
    async with manager_of("small", "large", "middle", aliases=("first=small",)) as (manager, _):
        metrics = Metrics(manager.entries)
        for name, tokens in (("small", 2), ("large", 3)):
            lease = await manager.lease(name)
            await tokens_from(lease.runtime, tokens)
            lease.release()
            metrics.requests.observe(a_record(lease.name))
        seen = await exposed(metrics)
        assert seen.value("vllm:generation_tokens_total", model_name="first") == 2
        assert seen.value("vllm:generation_tokens_total", model_name="large") == 3
        assert loaded(seen) == {"first": 1, "large": 1, "middle": 0}
        for name in ("middle", "small"):
            (await manager.lease(name)).release()
        seen = await exposed(metrics)
        assert loaded(seen) == {"first": 1, "large": 0, "middle": 1}
        assert not seen.values("vllm:num_requests_running", model_name="large")
        assert (
            seen.value("vllm:request_success_total", model_name="large", finished_reason="stop")
            == 1
        )
        (await manager.lease("large")).release()
        seen = await exposed(metrics)
        assert (
            seen.value("vllm:request_success_total", model_name="large", finished_reason="stop")
            == 1
        )
        assert seen.value("vllm:generation_tokens_total", model_name="large") == 0, "a new graph"


async def test_streams_go_on_while_a_scrape_is_written() -> None:
    """Others have a turn after each metric, as far as the event loop is fair."""
    turns = 0

    async def another() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with serving() as served, trio.open_nursery() as nursery:
        nursery.start_soon(another)
        await Metrics(OneModel(served.runtime).entries).exposed()
        nursery.cancel_scope.cancel()
    assert turns >= len(ALL)


def loaded(seen: Scraped) -> dict[str, float]:
    return {
        dict(labels)["model_name"]: value
        for (name, labels), value in seen.samples.items()
        if name == "trouper_model_loaded"
    }


def a_record(model: str) -> RequestRecord:
    return RequestRecord(request_id="a", model=model, reason="stop", arrived_at=0, ended_at=1)


async def test_ranks_tell_who_takes_part_and_who_is_behind() -> None:
    ranks = RanksStats(
        ranks=(
            RankStats(rank=0, state="ready", step=9),
            RankStats(rank=1, state="lost", step=7, heard_at=trio.current_time() - 60),
        )
    )
    async with serving() as served:
        health = attrs.evolve(served.runtime.health(), ranks=ranks)
        seen = ModelScrape(served.runtime, health, served.runtime.channels())
        told = {
            one.name: [value for _, value in one.values(seen) if not isinstance(value, Histogram)]
            for one in RANKS
        }
        alone = (await scrape(served)).values("trouper_rank_ready")
    silent = told.pop("trouper_rank_silent_seconds")
    assert told == {"trouper_rank_ready": [1, 0], "trouper_rank_steps_behind": [0, 2]}
    assert silent[0] == 0
    assert silent[1] >= 60
    assert alone == []


async def test_an_embedding_is_prefilled_and_done_with_that() -> None:
    async with serving(FakeEngine(before_step=pace)) as served:
        status, _ = await ask(served, {"input": ["one", "two"]}, path="/v1/embeddings")
        assert status == 200
        seen = await scrape(served)
    for name in (
        "e2e_request_latency",
        "request_prefill_time",
        "request_inference_time",
        "request_queue_time",
    ):
        assert seen.value(f"vllm:{name}_seconds_count", model_name=MODEL) == 2, name
    assert seen.value("vllm:e2e_request_latency_seconds_sum", model_name=MODEL) > 0
    assert seen.value("vllm:time_to_first_token_seconds_count", model_name=MODEL) == 0


async def test_problems_that_are_expected_are_counted_from_the_start() -> None:
    """`increase()` of a series that begins with its first problem does not see it."""
    async with serving() as served:
        seen = await scrape(served)
    for reason, code in EXPECTED:
        assert seen.value("trouper_request_problems_total", reason=reason, code=code) == 0
