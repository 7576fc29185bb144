"""The fake engine with a real tokenizer: it knows which conversation a prompt's tokens are, and
says what the script says."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import trio

from tests.fakes import FakeEngine, Tokens, card
from tests.scripted.conversation import Conversation, Script
from tests.scripted.families import Family
from trouper.engine.loading.tokenizer import HubTokenizer
from trouper.protocol.grammar import Grammar
from trouper.protocol.media import MediaSpan, Pixels
from trouper.protocol.model import LoadedModel, MemoryStats
from trouper.protocol.plans import Admit, Plan

made: dict[Family, HubTokenizer] = {}
CACHE_BYTES = 2**30
"""Cached blocks have 100 bytes a token here, so nothing is evicted."""


@attrs.frozen(eq=False, slots=False)
class NotingTokenizer(HubTokenizer):
    """Remembers which conversation was rendered to which tokens."""

    rendered: dict[str, Mapping[str, Any]] = attrs.field(factory=dict)
    conversations: dict[bytes, Mapping[str, Any]] = attrs.field(factory=dict)

    @classmethod
    def of(cls, tokenizer: HubTokenizer) -> NotingTokenizer:
        return cls(
            **{
                str(field.alias): getattr(tokenizer, field.name)
                for field in attrs.fields(HubTokenizer)
                if field.init
            }
        )

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]
    ) -> str | None:
        text = super().render_chat(messages, kwargs)
        assert text is not None
        options = {name: value for name, value in kwargs.items() if name != "tools"}
        self.rendered[text] = {
            "messages": messages,
            "tools": kwargs.get("tools") or (),
            "options": options,
        }
        return text

    def encode(self, text: str, *, special: bool = True) -> Tokens:
        tokens = super().encode(text, special=special)
        if (found := self.rendered.pop(text, None)) is not None:
            self.conversations[as_bytes(tokens)] = found
        return tokens

    def conversation(self, tokens: Tokens) -> Mapping[str, Any]:
        """The conversation of a chat; of another prompt, one message."""
        found = self.conversations.get(as_bytes(tokens))
        return found or {
            "messages": [{"role": "user", "content": "".join(map(self.token_text, tokens))}]
        }


def as_bytes(tokens: Tokens) -> bytes:
    return np.asarray(tokens, "<i4").tobytes()


@attrs.define(eq=False, kw_only=True)
class ScriptedEngine(FakeEngine):
    """`step_s`: what a step takes. `prefill_rate`: prompt tokens a second; 0: they take no time.
    `follows_grammars`: an answer that its grammar refuses becomes one that says so."""

    script: Script
    family: Family
    words: NotingTokenizer
    context_length: int = 131_072
    step_s: float = 0.0
    prefill_rate: float = 0.0
    follows_grammars: bool = False
    look: Callable[[Pixels], None] = lambda pixels: None
    """Called with each image that comes to be encoded."""
    answers: list[Tokens] = attrs.field(factory=list)
    known: dict[tuple[Tokens, Grammar | None], int] = attrs.field(factory=dict)
    """The number of the answer to each prompt: a row that resumes goes on with its own."""

    @classmethod
    def of(cls, script: Script, family: Family, directory: Path, **options: Any) -> ScriptedEngine:
        """With a tokenizer that is made once for each family: in `directory` if that is now."""
        tokenizer = made.get(family) or made.setdefault(family, family.tokenizer(directory))
        words = NotingTokenizer.of(tokenizer.with_grammars(len(tokenizer._bytes)))
        engine = cls(
            script=script,
            family=family,
            words=words,
            stats=MemoryStats(active_bytes=0, spare_bytes=0, limit_bytes=2**40),
            **options,
        )
        engine.before_step, engine.token_at = engine.pause, engine.scripted
        return engine

    async def load(self) -> LoadedModel:
        layout = self.family.layout(self.words)
        roles = self.words.template.roles_with(layout.marker) if layout else ()
        model = attrs.evolve(
            card(self.context_length, self.kv),
            id=f"scripted-{self.family.name}",
            vocab_size=len(self.words._bytes),
            cache_bytes=CACHE_BYTES,
            images=layout,
            image_roles=tuple(sorted(roles)),
        )
        return LoadedModel(model, self.words)

    async def pause(self, plan: Plan) -> None:
        for order in plan.encode:
            if order.pixels is not None:
                self.look(order.pixels)
        prefilled = sum(chunk.tokens for chunk in plan.prefill)
        await trio.sleep(self.step_s + (prefilled / self.prefill_rate if self.prefill_rate else 0))

    def key_of(self, admit: Admit, prompt: Tokens) -> int:
        if (prompt, admit.grammar) not in self.known:
            self.known[prompt, admit.grammar] = len(self.answers)
            text = self._text(self._written(prompt, admit.media), admit.grammar)
            answer = self.words.encode(text, special=False)
            if self.follows_grammars and admit.grammar is not None:
                answer = self._following(admit.grammar, answer)
            self.answers.append(answer)
        return self.known[prompt, admit.grammar]

    def _written(self, prompt: Tokens, media: Sequence[MediaSpan]) -> Tokens:
        """The prompt as its template wrote it, with one marker for each image."""
        layout = self.family.layout(self.words)
        for span in reversed(media):
            assert layout is not None
            marker = self.words.encode(layout.marker, special=False)
            prompt = (*prompt[: span.start], *marker, *prompt[span.end :])
        return prompt

    def _following(self, grammar: Grammar, answer: Tokens) -> Tokens:
        assert self.words.grammars is not None
        constraint = self.words.grammars.constraint(grammar)
        for index, token in enumerate([*answer, min(self.words.eos_token_ids)]):
            allowed = constraint.allowed(index)[token // 8] >> token % 8 & 1
            if not allowed or constraint.accept(token):
                text = "".join(map(self.words.token_text, answer[: index + 1]))
                return self.words.encode(f"no grammar of this goes on so: {text}", special=False)
        return answer

    def _text(self, prompt: Tokens, grammar: Grammar | None) -> str:
        forced, may_call = grammar is not None, bool(grammar and grammar.calls)
        conversation = self.words.conversation(prompt)
        try:
            return self.script(
                Conversation(family=self.family, forced=forced, may_call=may_call, **conversation)
            )
        except Exception:  # noqa: BLE001 - any script's code: the engine must not end of it, and who wrote the script wants to see it
            traceback.print_exc()
            return f"the script failed: {traceback.format_exc(limit=1)}"

    def scripted(self, key: int, position: int) -> int:
        answer = self.answers[key]
        return answer[position] if position < len(answer) else min(self.words.eos_token_ids)
