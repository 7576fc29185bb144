"""Prefill: runs a plan's chunks.

Most prompts only fill KV and share padded passes. Embedded prompts (hidden states) and scored
prompts (logits of all tokens) run alone; an encoder's whole prompts share padded passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import mlx.core as mx
import numpy as np

from trouper.engine.embeddings.embedding_modules import EmbeddingModules, EncoderInput
from trouper.engine.kv.rows import Rows
from trouper.engine.sampling.logprobs import PendingLogprobs, logprobs_of
from trouper.engine.sampling.row_state import RowState
from trouper.protocol.plans import Chunk, RowId

SCORE_TOKENS = 128
"""Tokens with logits at a time: a token's logits take 1 MB for a large vocabulary."""


@attrs.frozen(eq=False)
class Prefilled:
    ready: mx.array | None
    """Ready when the shared passes are done; None without such passes."""
    complete: list[RowId]
    """Rows whose prompt ends; the last token is decoded."""
    alone: dict[RowId, list[int]]
    """Last tokens of those rows that run in a pass of their own."""
    scores: list[PendingLogprobs]
    embedded: list[tuple[RowId, mx.array]]
    """Vectors (dim,) float32 of completed prompts."""


def run_chunks(
    rows: Rows,
    states: Mapping[RowId, RowState],
    chunks: Sequence[Chunk],
    modules: EmbeddingModules,
    lone_tokens: int = 0,
) -> Prefilled:
    """Run the chunks and advance `prefilled`. The decode pass runs a prompt's last token, unless
    prompt logprobs are requested.

    A lone row leaves up to `lone_tokens` tokens to `Prefilled.alone` (`Shapes.lone_tokens`).
    """
    embedded = _embed(rows, states, chunks, modules)
    lone = len(chunks) == 1 and not rows.decoding
    shared: dict[RowId, Sequence[int]] = {}
    complete: list[RowId] = []
    alone: dict[RowId, list[int]] = {}
    scores: list[PendingLogprobs] = []
    for chunk in chunks:
        state = states[chunk.row]
        if state.pool is not None:
            continue
        end = state.prefilled + chunk.tokens
        assert end <= len(state.prompt), "a plan prefills more than the prompt"
        if end == len(state.prompt):
            complete.append(chunk.row)
        tokens = state.prompt[state.prefilled : min(end, len(state.prompt) - 1)]
        if len(tokens) and state.prompt_logprobs is not None:
            scores += _score(rows, chunk.row, state, end)
        elif lone and end == len(state.prompt) and len(tokens) < lone_tokens:
            alone[chunk.row] = state.prompt[state.prefilled : end].tolist()
        elif len(tokens):
            shared[chunk.row] = tokens.tolist()
        state.prefilled = end
    ready = rows.prefill(shared)
    for row in complete:
        if row not in alone and not rows.decodes_from_nothing(row):
            alone[row] = [int(states[row].prompt[-1])]
    return Prefilled(ready, complete, alone, scores, embedded)


def _embed(
    rows: Rows, states: Mapping[RowId, RowState], chunks: Sequence[Chunk], modules: EmbeddingModules
) -> list[tuple[RowId, mx.array]]:
    ended = dict[RowId, RowState]()
    for chunk in chunks:
        state = states[chunk.row]
        if state.pool is None:
            continue
        end = state.prefilled + chunk.tokens
        if modules.encode is None:
            state.pool.add(rows.hidden(chunk.row, state.prompt[state.prefilled : end].tolist()))
            mx.async_eval(state.pool.kept)
        state.prefilled = end
        if end == len(state.prompt):
            ended[chunk.row] = state
    if modules.encode is not None and ended:
        inputs = [EncoderInput(each.prompt.tolist(), each.second_at) for each in ended.values()]
        for state, hidden in zip(ended.values(), modules.encode(inputs), strict=True):
            assert state.pool is not None
            state.pool.add(hidden)
    done = [(row, state.pool.vector(modules)) for row, state in ended.items() if state.pool]
    mx.async_eval([vector for _, vector in done])
    return done


def _score(rows: Rows, row: RowId, state: RowState, end: int) -> list[PendingLogprobs]:
    """Compute the logprob of the token after each of a chunk's tokens."""
    scores = []
    assert state.prompt_logprobs is not None
    last = min(end, len(state.prompt) - 1)
    for start in range(state.prefilled, last, SCORE_TOKENS):
        stop = min(start + SCORE_TOKENS, last)
        logits = rows.score(row, state.prompt[start:stop].tolist())
        following = mx.array(state.prompt[start + 1 : stop + 1].astype(np.uint32))
        requests = [(index, row, state.prompt_logprobs) for index in range(stop - start)]
        pending = logprobs_of(logits, following, requests)
        assert pending is not None
        mx.async_eval(pending.arrays())
        scores.append(pending)
    return scores
