"""A few kills of a server that runs a batch; as many as one likes: `just batch-kill N`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.batch_kill import Campaign, campaign, requests_of
from tests.web.batch_server import DEADLY
from tests.web.batching import request

SEED = 8
"""Of its four kills one comes before the server is ready."""


@pytest.mark.long
def test_each_request_has_one_answer_however_often_the_server_is_killed(tmp_path: Path) -> None:
    tally = campaign(4, 120, SEED, tmp_path)
    assert tally.good, tally
    assert (tally.kills, tally.answers) == (4, 120)
    assert 0 < tally.early < 4
    assert any(0 < answers < 120 for answers in tally.at_kills), "no kill came in the middle"


def test_a_request_that_kills_the_process_gets_an_error_and_the_others_their_answers(
    tmp_path: Path,
) -> None:
    deadly = request("deadly", {"prompt": DEADLY, "max_tokens": 2}, "/v1/completions")
    loop = Campaign(tmp_path, [*requests_of(20), deadly, *requests_of(40)[20:]], 8, real=False)
    server = loop.server()
    loop.begin(server)
    for _ in range(3):
        server.died()
        server = loop.server()
    loop.end(server)
    assert loop.tally.good, loop.tally
    assert loop.tally.errors == {"request_crashes_server": 1}
