"""Who is suspected, tried, convicted and set apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from hypothesis import given
from hypothesis import strategies as st

from tests.actors.bench import generate
from trouper import Sampling, Settings, TokenPrompt
from trouper.actors.runtime.submission import Submission, open_submission
from trouper.actors.scheduling.crash_attribution import (
    APART_S,
    MAX_APART_S,
    QUARANTINE_S,
    SUSPICION_S,
    Blame,
    Cause,
    Content,
    Contents,
    Involved,
    Standing,
    Verdict,
    cause_of,
    digests,
)
from trouper.actors.scheduling.tree_node import token_bytes
from trouper.actors.scheduling.waiting_queue import LONE_PATIENCE_S, may_enter

HERE, ELSEWHERE = Cause("ValueError", "rope.py:7"), Cause("ValueError", "mask.py:9")


def admitted(*tokens: int, seed: int = 0, **sampling: Any) -> Submission:
    wish = generate(prompt=TokenPrompt(tokens), sampling=Sampling(seed=seed, **sampling))
    submission, answer = open_submission(wish, Settings())
    answer.close()
    submission.close()
    return attrs.evolve(submission, prompt=tokens, max_tokens=10)


def digests_of(wish: Submission) -> tuple[Content, bytes]:
    return digests(wish, token_bytes(wish.prompt))


def standing(name: str) -> Standing:
    return Standing(Content(name.encode()), b"")


def rows(*standings: Standing, fresh: Sequence[Standing] = (), tokens: int = 5) -> list[Involved]:
    return [Involved(one, one in fresh, tokens, tokens + 2) for one in standings]


def tried(blame: Blame, guilty: set[Standing], now: float = 0.0) -> list[Verdict]:
    """Each suspect alone, in the order of trials, until none is left."""
    verdicts = []
    suspects = list(blame._trial.suspects if blame._trial else ())
    while left := blame.trial_order(suspects):
        if left[0] in guilty:
            verdicts.append(blame.crashed(HERE, rows(left[0]), now))
            suspects.remove(left[0])
        else:
            blame.passed(left[0], now)
    return verdicts


# -- contents ------------------------------------------------------------------------------------


def test_a_request_that_is_sent_again_has_the_same_content_whatever_seed_is_drawn() -> None:
    content, draws = digests_of(admitted(1, 2, 3, seed=1))
    again, others = digests_of(admitted(1, 2, 3, seed=2))
    assert content == again
    assert draws != others
    assert len({content, *(digests_of(one)[0] for one in (admitted(1, 2), admitted(1, 2, 4)))}) == 3


def test_what_makes_other_code_run_is_another_content() -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.1},
        {"presence_penalty": 1.0},
    ]
    assert len({digests_of(admitted(1, 2, 3, **kind))[0] for kind in kinds}) == len(kinds)
    assert (
        digests_of(admitted(1, temperature=0.5))[0] == digests_of(admitted(1, temperature=0.6))[0]
    )


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30))), st.integers(1, 4))
def test_contents_are_bounded_in_number_and_time(
    additions: list[tuple[int, int]], most: int
) -> None:
    contents, added, now = Contents(ttl_s=20, max_size=most), dict[Content, float](), 0.0
    for name, later in additions:
        now += later
        content = Content(bytes([name]))
        contents.add(content, now)
        added.pop(content, None)
        added[content] = now
        newest = [*added][-most:]
        held = {one for one in added if contents.has(one, now)}
        assert held == {one for one in newest if now - added[one] < 20}
        assert contents.count(now) == len(held)
        assert contents.left_s(content, now) == 20


# -- trials --------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(0, 7), st.sets(st.integers(0, 7)))
def test_one_guilty_row_among_others_is_the_only_one_that_is_convicted(
    count: int, guilty: int, fresh: set[int]
) -> None:
    blame, all_of = Blame(), [standing(str(n)) for n in range(count)]
    culprit = all_of[guilty % count]
    first = blame.crashed(HERE, rows(*all_of, fresh=[all_of[n] for n in fresh if n < count]), 0)
    assert first.counts
    assert all(one.suspect for one in all_of)
    [verdict] = tried(blame, {culprit})
    assert verdict == Verdict(counts=False, convicted=culprit.content)
    assert verdict.convicted in first.suspects, "so the first crash does not count any more"
    assert [one for one in all_of if blame.refuses(one, 1)] == [culprit]
    assert not any(one.suspect for one in all_of), "the others are cleared, tried or not"
    assert blame.refuses(culprit, QUARANTINE_S - 1)
    assert not blame.refuses(culprit, QUARANTINE_S)


def test_new_work_is_tried_first() -> None:
    blame, old, new = Blame(), standing("old"), standing("new")
    blame.crashed(HERE, rows(old, new, fresh=[new]), 0)
    later = blame.standing(admitted(1), b"1", 0)
    later.suspect = True
    assert blame.trial_order([later, old, new]) == [new, old, later]


def test_a_suspect_passes_beyond_the_place_of_the_crash() -> None:
    one, new = standing("one"), standing("new")
    Blame().crashed(HERE, [Involved(one, False, 5, 9), Involved(new, True, 0, 0)], 0)
    assert one.passes_at == 9
    assert new.passes_at == 1, "its first token"


def test_whoever_crashes_alone_is_given_one_more_chance() -> None:
    """The first crash may have been the machine's."""
    blame, one = Blame(), standing("one")
    assert blame.crashed(HERE, rows(one), 0).counts
    assert not blame.refuses(one, 0)
    blame.passed(one, 0)
    assert blame.crashed(HERE, rows(one), 1).counts, "acquitted, it begins anew"
    assert blame.crashed(HERE, rows(one), 2).convicted == one.content


def test_nobody_is_blamed_when_nobody_was_there() -> None:
    blame = Blame()
    assert blame.crashed(HERE, [], 0) == Verdict()


def test_a_content_that_was_in_a_crash_is_tried_when_it_comes_again() -> None:
    blame, wish = Blame(), admitted(1, 2, 3)
    blame.crashed(HERE, rows(blame.standing(wish, b"wish", 0), standing("other")), 0)
    assert blame.standing(wish, b"wish", SUSPICION_S - 1).suspect
    assert not blame.standing(wish, b"wish", SUSPICION_S).suspect


def test_an_answer_of_the_same_content_that_is_beyond_the_place_goes_on() -> None:
    blame, guilty = Blame(), standing("guilty")
    blame.crashed(HERE, rows(guilty, tokens=5), 0)
    blame.crashed(HERE, rows(guilty, tokens=5), 0)
    twin, other_draws = standing("guilty"), attrs.evolve(standing("guilty"), draws=b"other")
    assert blame.condemns(twin, 0, 1) and blame.condemns(other_draws, 0, 1), (
        "nothing of them was said yet"
    )
    assert blame.condemns(twin, 7, 1)
    assert not blame.condemns(twin, 8, 1)
    assert not blame.condemns(other_draws, 3, 1)


# -- in company ----------------------------------------------------------------------------------


def in_company(
    blame: Blame, now: float, *standings: Standing, fresh: Sequence[Standing] = ()
) -> Verdict:
    verdict = blame.crashed(HERE, rows(*standings, fresh=fresh), now)
    assert tried(blame, set(), now) == []
    return verdict


def test_a_crash_that_comes_again_only_in_company_sets_the_new_work_of_both_apart() -> None:
    blame = Blame()
    old, other, odd = standing("old"), standing("other"), standing("odd")
    assert in_company(blame, 0, old, other, odd, fresh=[odd]).counts
    assert not in_company(blame, 1, old, other, odd, fresh=[old, odd]).counts
    assert (old.alone, other.alone, odd.alone) == (False, False, True)
    assert not blame.apart(1)
    assert not in_company(blame, 2, old, other, fresh=[old]).counts
    assert blame.apart(2), "that did not help"
    assert blame.apart(2 + APART_S - 1)
    assert not blame.apart(2 + APART_S)


def test_rows_are_apart_longer_each_time_and_another_cause_begins_anew() -> None:
    blame, one, other = Blame(), standing("one"), standing("other")
    in_company(blame, 0, one, other)
    now, lasted = 1.0, []
    for _ in range(10):
        in_company(blame, now, one, other)
        end = blame._apart_until
        lasted.append(end - now)
        now = end + 1
    assert lasted == [min(APART_S * 2**n, MAX_APART_S) for n in range(10)]
    assert blame.crashed(ELSEWHERE, rows(one, other), now).counts
    forgotten = Blame()
    in_company(forgotten, 0, one, other)
    assert in_company(forgotten, SUSPICION_S, one, other).counts, (
        "so long ago that it may be chance"
    )


@given(st.lists(st.integers(0, 3), min_size=2, max_size=4, unique=True), st.integers(0, 30))
def test_a_fault_of_companies_is_answered_by_isolation_and_never_by_blame(
    members: list[int], repeats: int
) -> None:
    """However often it comes, at most its first crash counts."""
    blame, all_of = Blame(), [standing(str(n)) for n in members]
    counted = 0
    for turn in range(repeats):
        together = [one for one in all_of if not one.alone]
        if blame.apart(turn) or len(together) < 2:
            break
        counted += in_company(blame, turn, *together, fresh=together).counts
    assert counted == min(1, repeats)
    assert not any(blame.refuses(one, 0) for one in all_of)


# -- who may enter -------------------------------------------------------------------------------


@attrs.frozen
class Queued:
    standing: Standing
    since: float = 0.0


def enter(waiting: Sequence[Queued], present: Sequence[Standing] = (), **more: bool) -> list[str]:
    flags = {"idle": True, "apart": False} | more
    trials = [one.standing for one in waiting if one.standing.suspect]
    chosen = may_enter(waiting, present, trials, now=5.0, **flags)
    return [one.standing.content.decode() for one in chosen]


def a(name: str, *, suspect: bool = False, alone: bool = False) -> Standing:
    return attrs.evolve(standing(name), suspect=suspect, alone=alone)


def test_without_suspects_all_may_enter() -> None:
    waiting = [Queued(a("x")), Queued(a("y"))]
    assert enter(waiting) == enter(waiting, [a("z")], idle=False) == ["x", "y"]


def test_a_suspect_enters_alone_when_nothing_is_in_flight() -> None:
    waiting = [Queued(a("x")), Queued(a("s", suspect=True)), Queued(a("t", suspect=True))]
    assert enter(waiting) == ["s"]
    assert enter(waiting, idle=False) == enter(waiting, [a("z")]) == []
    assert enter([Queued(a("x"))], [a("s", suspect=True)]) == [], "and nobody enters beside it"


def test_apart_all_run_alone() -> None:
    waiting = [Queued(a("x")), Queued(a("y"))]
    assert enter(waiting, apart=True) == ["x"]
    assert enter(waiting, [a("z")], apart=True) == enter(waiting, apart=True, idle=False) == []


def test_a_lone_request_lets_others_overtake_it_for_a_while() -> None:
    lone = Queued(a("l", alone=True))
    assert enter([lone, Queued(a("x"))]) == ["l"]
    assert enter([lone, Queued(a("x"))], [a("z")], idle=False) == ["x"]
    old = attrs.evolve(lone, since=5.0 - LONE_PATIENCE_S - 1)
    assert enter([Queued(a("w")), old, Queued(a("x"))], [a("z")], idle=False) == ["w"]
    assert enter([old, Queued(a("x"))], [a("z")], idle=False) == []


def test_a_cause_is_a_type_and_a_place_without_the_message() -> None:
    causes = set()
    for secret in ("one prompt", "another"):
        try:
            raise ValueError(secret)
        except ValueError as error:
            causes.add(cause_of(error))
    [cause] = causes
    assert str(cause).startswith("ValueError at test_crash_attribution.py:")
    assert cause_of(ValueError()).location == "an unknown place"
