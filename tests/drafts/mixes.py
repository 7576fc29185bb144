"""Random mixes of requests on a tiny model: the same with drafts as without, whoever joins, leaves
and is cancelled.

Everything may meet in one batch: greedy and seeded rows, penalties, stops, ends and lengths inside
a draft, grammars, thinking limits, log-probabilities, several choices, prefix hits, 8-bit KV; in
one of four memory is short, so that rows are preempted. Drafts are the real ones, and often those
of an oracle that knows what was said without, and is wrong now and then, or on purpose always; in
three of four mixes also those of a draft model, which is the model itself or one that says
something else, and of families that have MTP heads in most also those of a head, which is wrong or
right. In most mixes rows draft whether it pays or not, by each proposer in turn.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import attrs

from tests.drafts.models import FULL, TAPPED, saved, saved_draft
from tests.engine.oracle import Foretelling
from tests.heads import HEADS, Kind
from tests.real.alone import Wishes
from tests.real.serving import Heard, Start, ask, running
from tests.real.test_mixed import Clients, assert_as_alone, watched
from tests.real.test_preemption import fine_capacities
from tests.real.wishes import wishes
from tests.reuse.serving import text
from tests.sim.world import Eager
from tests.tapped import KINDS, saved_drafter
from trouper import Generate, Sampling, TokenPrompt, run_runtime
from trouper.actors import request_intake
from trouper.actors.scheduling import core
from trouper.actors.scheduling.speculation_policy import Speculation
from trouper.engine import host
from trouper.engine.spec_decode.prompt_lookup import Drafting
from trouper.engine.step import Launched, StepEngine
from trouper.protocol.health import SchedulerStats
from trouper.protocol.plans import Plan, RowId, ThinkingLimit

ROWS = 9
LONGEST = 140
"""Tokens of the longest prompt and its answer, nearly: memory that is short holds two such rows."""
MARKER = (60, 47, 62)
"""Tokens that end thinking."""
Draft = Literal["", "itself", "other", "short", "eagle3", "dflash", "dspark"]
"""The draft model: none, the model itself, one that says something else, such a one with a shorter
context and more logits, or a random drafter that reads taps."""
Wrong = Literal["at times", "always", "never asked"]
"""When the oracle is wrong. If it is never asked, n-grams draft."""
Answers = Mapping[tuple[int, ...], tuple[int, ...]]
"""By prompts."""


@attrs.define
class Mix:
    """What a seed makes."""

    name: str
    """The family of its model."""
    seed: str
    dice: random.Random
    settings: dict[str, Any]
    eager: bool
    oracle: Wrong
    tokens: int
    draft: Draft
    head: Kind | None = None
    short: bool = False
    """Whether memory is short, so that rows are preempted."""

    @classmethod
    def of(cls, name: str, seed: int) -> Mix:
        dice = random.Random(f"{name} {seed}")
        settings = {
            "prefill_step_size": dice.choice((16, 32, 2048)),
            "spec_draft_tokens": dice.choice((1, 3, 8, 16)),
            "spec_ngram_min": dice.choice((1, 2, 3)),
            "kv_bits": dice.choice((0, 0, 8)),
            "kv_group_size": 32,
            "cache_memory": dice.choice((0, 10**7, 10**7)),
            "speculation": "ngram",  # Also on a device where drafts rest by default.
        }
        kinds: tuple[Draft, ...] = ("", "itself" if name in FULL else "other", "other", "short")
        draft = random.Random(f"draft of {name} {seed}").choice(kinds)
        tapped = name in TAPPED and seed % 7 in (2, 4)
        if tapped:
            draft = random.Random(f"taps of {name} {seed}").choice(KINDS)
        heads: tuple[Kind | None, ...] = (None, "random", "random", "of embeddings", "of states")
        head = random.Random(f"head of {name} {seed}").choice(heads)
        if tapped or name not in HEADS:
            head = None
        if draft or head:
            settings["speculation"] = "auto"
        eager, asked = dice.random() < 0.8, dice.random() < 0.7
        more = random.Random(f"more of {name} {seed}")
        oracle: Wrong = more.choice(("at times", "at times", "always")) if asked else "never asked"
        short = more.random() < 0.25
        return cls(
            name,
            f"{name} {seed}",
            dice,
            settings,
            eager,
            oracle,
            dice.choice((12, 30)),
            draft,
            head,
            short,
        )

    def drafted_by(self, path: str, directory: Path) -> None:
        """Set the draft model. `path`: the model of the mix."""
        if self.draft in KINDS:
            config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
            drafter = saved_drafter(directory, self.draft, self.name, target=config)
            self.settings["draft_model"] = str(drafter)
        elif self.draft:
            own = (
                path
                if self.draft == "itself"
                else saved_draft(directory, short=self.draft == "short")
            )
            self.settings["draft_model"] = own

    async def limit_memory(self, path: str) -> None:
        """Leave room for two long rows if memory is to be short. `path`: the model of the mix."""
        if self.short:
            with fine_capacities():
                async with running(path, **self.settings) as runtime:
                    kv = runtime.model.kv
            self.settings["kv_memory"] = 2 * (kv.row_bytes(LONGEST) + kv.draft_state_bytes)

    @property
    def kv(self) -> dict[str, Any]:
        return {key: self.settings[key] for key in ("kv_bits", "kv_group_size")}

    def prompts(self) -> list[tuple[int, ...]]:
        """Of which some repeat themselves, and some begin like others."""
        dice, drawn = self.dice, list[tuple[int, ...]]()
        for _ in range(ROWS):
            part = text(dice.choice((1, 3, 17, 40)), dice.randrange(10**6))
            head = dice.choice(drawn)[:32] if drawn and dice.random() < 0.3 else ()
            drawn.append((head + part * dice.choice((1, 2, 4)))[:120])
        return drawn

    def wishes(self, words: Any) -> Wishes:
        every = wishes(words, self.prompts(), self.tokens)
        names = self.dice.sample(sorted(every), ROWS)
        chosen = {name: every[name] for name in names}
        if self.dice.random() < 0.5:  # One that repeats for certain: its bias leaves it few tokens.
            few = tuple((token, 30.0) for token in text(3, self.dice.randrange(10**6)))
            name = self.dice.choice(names)
            sampling = attrs.evolve(chosen[name].sampling, logit_bias=few)
            if chosen[name].grammar is None:
                chosen[name] = attrs.evolve(chosen[name], sampling=sampling)
        return {
            name: self._limited(attrs.evolve(wish, speculation=self._how()))
            for name, wish in chosen.items()
        }

    def _limited(self, wish: Generate) -> Generate:
        """With a thinking limit in one of four, which a grammar excludes; memory that is short has
        two classes of priority."""
        more = random.Random(f"limits of {self.seed} {wish.request_id}")
        limit, priority = (
            more.choice((None, None, None, more.randint(0, 9))),
            more.randint(0, 1) if self.short else 0,
        )
        return attrs.evolve(
            wish, thinking_token_budget=None if wish.grammar else limit, priority=priority
        )

    def _how(self) -> Any:
        how = self.dice.choice((None, None, None, "off"))
        if how is None and (self.draft or self.head):
            named = [
                None,
                "auto",
                "ngram",
                *["draft_model"] * bool(self.draft),
                *["mtp"] * bool(self.head),
            ]
            return self.dice.choice(named)
        return how


@contextmanager
def drafting(mix: Mix, answers: Answers) -> Iterator[None]:
    """With the mix's policy and proposers."""

    def made(least: int, most: int, tokens: int) -> Drafting:
        if mix.oracle == "never asked":
            return Drafting(least, most, tokens)
        dice, always = random.Random(mix.seed), mix.oracle == "always"
        return Foretelling(least, most, tokens, answers=answers, dice=dice, wrong=always)

    policy = Eager if mix.eager else Speculation
    with (
        patch.object(core, "Speculation", policy),
        patch.object(host, "Drafting", made),
        fine_capacities() if mix.short else nullcontext(),
    ):
        yield


@contextmanager
def thinking() -> Iterator[None]:
    """Whoever has a limit on thinking thinks from its prompt on. The tiny models have no markers of
    their own."""

    def limited(request: Generate, *_: object) -> ThinkingLimit | None:
        limit = request.thinking_token_budget
        return None if limit is None else ThinkingLimit(limit, (), MARKER, begun=True)

    with patch.object(request_intake, "thinking_limit", limited):
        yield


@attrs.define
class Held:
    """What the engine had when it launched its last plan."""

    rows: int = 0
    stored: int = 0


def checked(clients: Clients, held: Held) -> type[StepEngine]:
    """Clients come and go at its steps. After each a row's KV is as long as what it was told and
    has said."""
    resumed: dict[RowId, int] = {}

    class Checked(watched(clients.moments)):  # type: ignore[misc]
        def launch(self, plan: Plan) -> Launched:
            launched: Launched = super().launch(plan)
            lengths = self.lengths()
            resumed.update({admit.row: admit.num_output_tokens for admit in plan.admit})
            held.rows, held.stored = len(lengths), len(self._blocks._stored) if self._blocks else 0
            if launched.spans is None:  # Else it is known when its tokens are.
                drawn = dict(
                    zip(self._sampling.members, self._sampling.drawn.tolist(), strict=True)
                )
                for row in self._rows.decoding:
                    known = len(self._state[row].prompt) + drawn[row] - resumed[row]
                    assert lengths[row] == known - 1, "KV and tokens differ"
            return launched

    return Checked


@attrs.frozen
class Wanted:
    """What the clients of a mix ask for, and what each is answered alone, without drafts."""

    asked: dict[str, Generate]
    later: dict[str, Generate]
    """These go on where others ended."""
    alone: dict[str, Heard]

    @property
    def answers(self) -> Answers:
        return {heard.prompt: heard.tokens for heard in self.alone.values()}


@attrs.frozen
class Played:
    wanted: Wanted
    heard: list[tuple[str, Heard]]
    facts: SchedulerStats
    held: Held


async def alone(path: str, mix: Mix) -> Wanted:
    async with running(path, cache_memory=0, speculation="off", **mix.kv) as runtime:
        asked = dict(mix.wishes(runtime.tokenizer))
        heard = {
            key: (await ask(runtime, attrs.evolve(wish, speculation=None)))[0]
            for key, wish in asked.items()
        }
        later = {f"after {key}": after(heard[key]) for key in mix.dice.sample(sorted(asked), 3)}
        heard |= {key: (await ask(runtime, wish))[0] for key, wish in later.items()}
        assert runtime.health().scheduler.speculation.drafts == 0
    return Wanted(asked, later, heard)


async def together(path: str, mix: Mix, wanted: Wanted, start: Start = run_runtime) -> Played:
    """With drafts; then some once more, and those that go on."""
    asked, held = wanted.asked, Held()
    clients = Clients(asked, mix.dice, 2 * mix.tokens)
    with drafting(mix, wanted.answers):
        async with running(path, checked(clients, held), start, **mix.settings) as runtime:
            await clients.play(runtime)
            some = dict.fromkeys(mix.dice.sample(sorted(asked), 3))
            again = {key: asked[key] for key in some} | wanted.later
            repeated = dict(zip(again, await ask(runtime, *again.values()), strict=True))
        facts = runtime.health().scheduler
    return Played(wanted, [*clients.heard.items(), *repeated.items()], facts, held)


async def assert_the_same(path: str, mix: Mix, wanted: Wanted, played: Played) -> None:
    for key, mine in played.heard:
        wish = attrs.evolve((wanted.asked | wanted.later)[key], speculation="off")
        await assert_as_alone(path, wish, mine, wanted.alone[key], **mix.kv)
    facts, held = played.facts, played.held
    assert facts.recovery.crashes == 0, "whoever goes on after a crash says the same, too"
    assert (facts.active_sequences, facts.queued_requests, held.rows) == (0, 0, 0)
    assert held.stored == facts.cache.blocks + facts.cache.snapshots


async def play(directory: Path, mix: Mix) -> Played:
    """Raises where anything differs from the same without drafts, alone. Models are saved in the
    directory."""
    path = saved(mix.name, directory, mix.settings["kv_bits"], mix.head)
    mix.drafted_by(path, directory)
    await mix.limit_memory(path)
    with thinking():
        wanted = await alone(path, mix)
        played = await together(path, mix, wanted)
        await assert_the_same(path, mix, wanted, played)
    return played


def after(heard: Heard) -> Generate:
    """Goes on where an answer ended: it finds what the answer's row has left."""
    prompt = TokenPrompt(heard.prompt + heard.tokens)
    return Generate(
        request_id="after",
        prompt=prompt,
        sampling=Sampling(temperature=0),
        max_tokens=6,
        ignore_eos=True,
    )
