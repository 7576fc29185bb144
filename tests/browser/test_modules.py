"""What the live page computes in the browser, module by module."""

from __future__ import annotations

import json

import trio

from tests.browser.driver import Browser
from tests.browser.page import Page, shown

MODULE = """
const done = arguments[arguments.length - 1];
const root = document.querySelector("script[type=module]").src.replace(/main\\.js$/, "");
import(root + arguments[0]).then(module => { SCRIPT }).then(done, error => done(String(error)));
"""


async def computed(page: Page, module: str, script: str) -> object:
    code = MODULE.replace("SCRIPT", script)
    return await trio.to_thread.run_sync(
        lambda: page.browser.driver.execute_async_script(code, module)
    )


async def test_lanes_are_taken_by_who_is_first_and_records_are_the_last_word(
    browser: Browser,
) -> None:
    async with shown(browser) as (page, _):
        bars = await computed(
            page,
            "lanes.js",
            """
            const lanes = new module.Lanes();
            const row = (row, since, more = {}) => ({row, request_id: `r${row}`, since, first_token_at: since + 1,
              prompt_tokens: 9, cached_tokens: 3, prefilled_tokens: 9, generated_tokens: 1, max_tokens: 5, ...more});
            const ended = (row, since, end) => ({request_id: `r${row}`, admitted_at: since, first_token_at: since + 1,
              last_token_at: end, ended_at: end, prompt_tokens: 9, cached_tokens: 3, generated_tokens: 5, max_tokens: 5,
              reason: "stop"});
            lanes.update(1, 100, [row(0, 98), row(1, 99)], []);
            lanes.update(1, 101, [row(0, 98), row(1, 99)], [ended(0, 98, 100.5)]);
            lanes.update(1, 102, [row(1, 99), row(2, 101.5)], [ended(7, 101.6, 101.9)]);
            const seen = lanes.bars.map(bar => [bar.id, bar.lane, bar.since, bar.end, bar.generated]);
            lanes.update(1, 131, [], []);
            const later = lanes.bars.map(bar => bar.id);
            lanes.update(2, 5, [], []);
            return [seen, later, lanes.bars.length];
            """,
        )
    assert bars == [
        [
            ["r0", 0, 98, 100.5, 5],
            ["r1", 1, 99, None, 1],
            ["r2", 0, 101.5, None, 1],
            ["r7", 2, 101.6, 101.9, 5],
        ],
        ["r1", "r2", "r7"],
        0,
    ]


async def test_a_record_that_is_told_again_is_no_further_request(browser: Browser) -> None:
    """Found by use: a page that was opened, or missed snapshots, showed what had ended just before
    twice."""
    async with shown(browser) as (page, _):
        counts = await computed(
            page,
            "lanes.js",
            """
            const lanes = new module.Lanes();
            const ended = (arrived_at) => ({request_id: "same", arrived_at, admitted_at: 98, first_token_at: 99,
              last_token_at: 99.5, ended_at: 99.5, prompt_tokens: 9, cached_tokens: 3, generated_tokens: 5, max_tokens: 5});
            lanes.update(1, 100, [], [ended(97), ended(97)]);
            const first = lanes.bars.length;
            lanes.update(1, 101, [], [ended(97)]);
            const again = lanes.bars.length;
            lanes.update(1, 102, [], [ended(97.001)]);
            return [first, again, lanes.bars.length];
            """,
        )
    assert counts == [1, 1, 2]


async def test_a_block_of_the_disk_that_is_not_full_is_none_less_of_memory(
    browser: Browser,
) -> None:
    """Found by use: after a short prompt of an earlier server memory had found -1 blocks."""
    async with shown(browser) as (page, _):
        found = await computed(
            page,
            "tiers.js",
            """
            const place = document.createElement("div"), cache = {bytes: 1, capacity_bytes: 9, blocks: 1, snapshots: 0, hits_block: 0,
              hits_disk: 1, misses: 0, evicted_blocks: 0, evicted_snapshots: 0, waited: 0};
            new module.Tiers(place, document.createElement("p")).show({scheduler: {total_cached_tokens: 31, total_prefill_tokens: 1}, cache,
              directory: {attached: false}, speculation: {drafted: 0}, card: {}});
            return [...place.querySelectorAll("dt")].find(one => one.textContent === "Blocks found").nextSibling.textContent;
            """,
        )
    assert found == "0"


async def test_a_row_that_was_preempted_keeps_its_lane_and_shows_its_pauses(
    browser: Browser,
) -> None:
    """It returns with another number. Another request of the same name has a lane of its own."""
    async with shown(browser) as (page, _):
        bars = await computed(
            page,
            "lanes.js",
            """
            const lanes = new module.Lanes();
            const row = (row, state, more = {}) => ({row, request_id: "same", since: 98, first_token_at: 99, state,
              prompt_tokens: 9, cached_tokens: 3, prefilled_tokens: 9, generated_tokens: 1, max_tokens: 5,
              restored_tokens: 0, tokens_to_restore: 0, ...more});
            const seen = () => structuredClone(lanes.bars.map(bar => [bar.lane, bar.state, bar.restored, bar.end, bar.pauses]));
            lanes.update(1, 100, [row(0, "decoding"), row(1, "decoding")], []);
            lanes.update(1, 101, [row(1, "decoding"), row(0, "preempted")], []);
            lanes.update(1, 102, [row(1, "decoding"), row(0, "preempted", {restored_tokens: 4})], []);
            const paused = seen();
            lanes.update(1, 104, [row(1, "decoding"), row(7, "restoring", {restored_tokens: 6})], []);
            lanes.update(1, 105, [row(1, "decoding"), row(7, "preempted")], []);
            const again = seen();
            lanes.update(1, 107, [row(1, "decoding")], [{request_id: "same", admitted_at: 98, first_token_at: 99,
              last_token_at: 106.5, ended_at: 106.5, prompt_tokens: 9, cached_tokens: 3, generated_tokens: 5, max_tokens: 5}]);
            return [paused, again, seen()];
            """,
        )
    other = [1, "decoding", 0, None, []]
    assert bars == [
        [[0, "preempted", 4, None, [[101, None]]], other],
        [[0, "preempted", 0, None, [[101, 104], [105, None]]], other],
        [[0, "preempted", 0, 106.5, [[101, 104], [105, 106.5]]], other],
    ]


async def test_rates_are_of_the_last_two_seconds_and_break_where_a_server_was_replaced(
    browser: Browser,
) -> None:
    async with shown(browser) as (page, _):
        columns = await computed(
            page,
            "history.js",
            """
            const history = new module.History();
            const model = tokens => ({scheduler: {tokens_generated: tokens, total_prefill_tokens: 0, total_cached_tokens: 0,
              steps: tokens}, batch: {gap_median_s: gap, gap_longest_s: gap, rows: [{first_token_at: first}]}});
            let gap = 0.02, first = 1;
            for (let tick = 0; tick <= 16; tick += 1) history.add(model(tick < 5 ? 0 : 40 + tick * 10), tick / 4, 1000 + tick / 4);
            history.add(model(0), 0, 1010);
            gap = null;
            history.add(model(5), 0.5, 1010.5);
            gap = 0.03;
            history.add(model(5), 1, 1011);
            gap = null;
            history.add(model(5), 1.5, 1011.5);
            first = null;
            history.add(model(5), 2, 1012);
            return [history.columns.generated.slice(-6), history.columns.median.slice(-6), history.last("generated")];
            """,
        )
    assert columns == [[40, None, 10, 5, 10 / 3, 2.5], [20, None, None, 30, 30, None], 2.5]


async def test_ids_are_cut_to_what_tells_them_apart(browser: Browser) -> None:
    drawn = "973851bbf0e94d6c8a5e1b2c3d4e5f60"
    wanted = {
        drawn: "973851bb",
        f"{drawn}-2": "973851bb-2",
        f"{drawn}-12": "973851b-12",
        f"{drawn}-2-1": "973851-2-1",
        f"chatcmpl-{drawn}": "973851bb",
        f"resp_{drawn}": "973851bb",
        f"msg_{drawn}-1": "973851bb-1",
        "cmpl-mine": "mine",
        "row0": "row0",
        "other-row": "other-row",
        "row-07-abcdef": "row-07-a",
        "request-0001": "reque-0001",
        "the-nightly-evaluation-0017": "the-n-0017",
        "the-nightly-evaluation-of-bob": "the-…f-bob",
        "019a8b2c-5a11-7c3e-9d55-0c2f41aa77b3": "019a…a77b3",
    }
    async with shown(browser) as (page, _):
        briefs = await computed(
            page,
            "format.js",
            f"return {json.dumps([*wanted])}.map(id => [module.brief(id), module.brief(id, 9).length])",
        )
    assert isinstance(briefs, list)
    assert [brief for brief, _ in briefs] == [*wanted.values()]
    assert all(length <= 9 for _, length in briefs), "on a phone"


async def test_midnight_is_the_hour_0(browser: Browser) -> None:
    """Not 24, which browsers of before 2024 make of a clock without am and pm, as this one does
    then."""
    older = """
      const real = Date.prototype.toLocaleTimeString;
      Date.prototype.toLocaleTimeString = function (of, how) {
        return how.hour12 === false ? real.call(this, "en-US", how).replace(/^00/, "24") : real.call(this, "en-US", how);
      };
    """
    async with shown(browser) as (page, _):
        await page.run(older)
        assert (
            await computed(
                page,
                "format.js",
                "return module.clock(new Date(2026, 0, 1, 0, 5, 9).getTime() / 1000)",
            )
            == "00:05:09"
        )


async def test_an_error_that_is_not_the_servers_goes_by_its_status(browser: Browser) -> None:
    async with shown(browser) as (page, _):
        said = await computed(
            page,
            "problem.js",
            """
            const bodies = [['{"error": {"message": "no such model"}}', 404], ["<html>Bad Gateway</html>", 502], ["null", 500]];
            return Promise.all(bodies.map(([body, status]) => module.problemOf(new Response(body, {status}))));
            """,
        )
    unknown = "The server, or what is before it, answered {}."
    assert said == ["no such model", unknown.format(502), unknown.format(500)]


async def test_a_key_is_held_where_the_browser_keeps_nothing(browser: Browser) -> None:
    """Where cookies are blocked each look at the storage is an error: the page showed nothing at
    all."""
    async with shown(browser) as (page, _):
        held = await computed(
            page,
            "key.js",
            """
            Object.defineProperty(window, "sessionStorage", {get() { throw new DOMException("no", "SecurityError"); }});
            const seen = [module.get()];
            module.keep("sk-a");
            seen.push(module.get(), module.headers().Authorization);
            module.forget();
            return [...seen, module.get()];
            """,
        )
    assert held == ["", "sk-a", "Bearer sk-a", ""]
