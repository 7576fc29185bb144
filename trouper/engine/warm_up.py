"""Warm-up steps, which compile kernels before the first request, and what idle moments prepare."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import mlx.core as mx
import numpy as np

from trouper.engine.kv.attention_seam import AttentionCall, plain, recording
from trouper.engine.passes.pass_shapes import CHUNK_STEP, LONE_WIDTHS, Shapes
from trouper.engine.platform.error_text import first_line_of, lacks_memory
from trouper.engine.step import StepEngine
from trouper.protocol.media import ImageLayout, ImageSize, ItemId, Pixels
from trouper.protocol.plans import Admit, Chunk, Encode, Plan, RowId
from trouper.protocol.sampling import Sampling

log = logging.getLogger(__name__)
PROMPTS = (40, 17, 90)  # Prompt lengths in tokens, unequal for masks.
DRAWN = Sampling(temperature=0.7, top_p=0.9, top_k=40, min_p=0.01, seed=1)
GROWING_STEPS = 70  # Decode steps until a row's buffers grow and the row changes banks.
MAX_PLANNED = 2**18
IMAGE = ImageSize(512, 512, "png")

# Longest prompt with prepared chunks: 32 of 2,048 tokens and 112 of 512, 40 ms each.
MAX_PLANNED_PREFILL = 2**16


class IdleWork:
    """Pieces of at most some tenths of a second, for moments in which the engine has no rows."""

    def __init__(self, pieces: Iterable[Callable[[], None]] = ()) -> None:
        self._pieces = deque(pieces)

    def run_next(self) -> bool:
        """False: nothing was left."""
        if not self._pieces:
            return False
        piece = self._pieces.popleft()
        try:
            piece()
        except (RuntimeError, MemoryError) as error:
            _require_shortage(error)
            self._pieces.clear()
        if not self._pieces:
            mx.clear_cache()
        return True


def warm_up(
    engine: StepEngine,
    vocabulary: int,
    context: int = 0,
    chunk: int = 0,
    step: int = CHUNK_STEP,
    *,
    images: ImageLayout | None = None,
    compiled: bool = False,
) -> IdleWork:
    """Run prefill, decoding, sampling, drafts, growth and lone prompts, up to `context` tokens, in
    chunks of `chunk` tokens, and of `step` tokens beside streams; and an image. Drops all rows. For
    lack of memory the rest is left to requests, and the engine is unusable. Returns attention at
    each length, which ranks, too, run each by itself.

    compiled: whether an earlier start compiled the kernels, which MLX and the driver keep on disk.
    Then growth, lone prompts and chunks beside streams are left to requests.
    """
    try:
        if images is not None:
            _run_image(engine, images)
        return IdleWork(_run_all(engine, vocabulary, context, chunk, step, compiled=compiled))
    except (RuntimeError, MemoryError) as error:
        _require_shortage(error)
        return IdleWork()


def _require_shortage(error: Exception) -> None:
    """Raises `error` unless memory is short."""
    if not lacks_memory(error):
        raise error
    log.warning(
        "the device has too little memory for the longest passes (%s): does another process use "
        "it? What was not prepared is when a request needs it",
        first_line_of(error),
    )


def _run_all(
    engine: StepEngine, vocabulary: int, context: int, chunk: int, step: int, *, compiled: bool
) -> list[Callable[[], None]]:
    rows = [RowId(index) for index in range(len(PROMPTS))]
    samplings = (Sampling(temperature=0.0), DRAWN, DRAWN)
    admits = [
        _admit(row, size, sampling, vocabulary)
        for row, size, sampling in zip(rows, PROMPTS, samplings, strict=True)
    ]
    first, second, late = rows
    plans = [
        Plan(0, admit=tuple(admits[:2]), prefill=(Chunk(first, 16), Chunk(second, 16))),
        Plan(1, prefill=(Chunk(first, PROMPTS[0] - 16), Chunk(second, PROMPTS[1] - 16))),
        Plan(2, decode=(first, second)),
        Plan(3, admit=(admits[2],), decode=(first, second), prefill=(Chunk(late, PROMPTS[2]),)),
        Plan(4, decode=(first, second, late)),
        Plan(5, drop=(second,), decode=(first, late)),
    ]
    for plan in plans:
        _run(engine, plan)
    if not context or engine.shapes.bank_tokens(0) + GROWING_STEPS <= context:
        # Positions may be learned: a table ends.
        _verify(engine, (first, late))
        if not compiled:
            _grow(engine, (first, late), vocabulary)
    with recording() as calls:  # A first pass is not compiled, and has arrays.
        _run(engine, Plan(6, drop=(first,), decode=(late,)))
    _run(engine, Plan(7, decode=(late,)))
    _run(engine, Plan(8, decode=(late,)))
    _run(engine, Plan(9, drop=(late,)))
    if not compiled:
        _lone_prompts(engine, vocabulary, context)
    if not context:
        return []
    later = list[Callable[[], None]]()
    for call in calls[-1:]:
        later += _decode_attention(call, engine.shapes, min(context, MAX_PLANNED))
    for width in (chunk,) if compiled else dict.fromkeys((chunk, min(chunk, step))):
        later += _prefill_attention(engine, vocabulary, min(context, MAX_PLANNED_PREFILL), width)
    return later


def _run_image(engine: StepEngine, layout: ImageLayout) -> None:
    # On an H200 the kernels of Qwen3-VL's first image took 10 s, in which streams stood still.
    shape = layout.shape(IMAGE, "low", max_tokens=256)
    span = layout.span(1, shape, digest=bytes(32))
    pixels = Pixels.of(shape, bytes(shape.num_bytes))
    order = Encode(ItemId(0), span, layout.num_pieces(shape), pixels)
    _run(engine, Plan(0, encode=(order,)))
    row, prompt = RowId(0), np.array([1, *span.tokens, 1, 1], "<i4")
    admit = Admit(row, prompt.tobytes(), Sampling(temperature=0.0), media=(span,))
    chunk = Chunk(row, len(prompt), items=(order.item,))
    _run(engine, Plan(0, admit=(admit,), prefill=(chunk,)))
    _run(engine, Plan(0, decode=(row,)))
    _run(engine, Plan(0, drop=(row,), forget=(order.item,)))


def _run(engine: StepEngine, plan: Plan) -> None:
    engine.collect(engine.launch(plan))


def _admit(row: RowId, size: int, sampling: Sampling, vocabulary: int) -> Admit:
    return Admit(row, (np.arange(1, size + 1) % vocabulary).astype("<i4").tobytes(), sampling)


def _verify(engine: StepEngine, rows: tuple[RowId, ...]) -> None:
    if not engine.capabilities.allows("drafts"):
        return
    tokens = 1
    while tokens <= engine.proposals.max_tokens:
        engine.proposals.given = dict.fromkeys(rows, [1] * tokens)
        _run(engine, Plan(0, decode=rows, drafts=(tokens,) * len(rows)))
        tokens *= 2
    engine.proposals.given = {}
    for name in engine.proposals.with_passes:
        for tokens in range(1, min(2, engine.proposals.max_tokens) + 1):
            _run(
                engine,
                Plan(0, decode=rows, drafts=(tokens,) * len(rows), proposers=(name,) * len(rows)),
            )


def _grow(engine: StepEngine, others: tuple[RowId, ...], vocabulary: int) -> None:
    """One row moves to the other's bank, whose buffers grow."""
    bound = engine.shapes.bank_tokens(0)
    sizes = {RowId(len(PROMPTS)): max(bound - GROWING_STEPS, 1), RowId(len(PROMPTS) + 1): bound}
    greedy = Sampling(temperature=0.0)
    _run(
        engine,
        Plan(
            0,
            admit=tuple(_admit(row, size, greedy, vocabulary) for row, size in sizes.items()),
            decode=others,
            prefill=tuple(Chunk(row, size) for row, size in sizes.items()),
        ),
    )
    for _ in range(GROWING_STEPS):
        _run(engine, Plan(0, decode=(*others, *sizes)))
    _run(engine, Plan(0, drop=tuple(sizes), decode=others))


def _lone_prompts(engine: StepEngine, vocabulary: int, context: int) -> None:
    """Run a lone prompt of each width twice: the second is compiled. Skipped without
    `SlotRows.first`."""
    shapes, allows = engine.shapes, engine.capabilities.allows
    if not (shapes.length_kernel and allows("banks") and allows("prefill_together")):
        return
    for tokens in (width for width in LONE_WIDTHS if not context or width <= context):
        for number in range(2):
            row = RowId(number)
            admit = _admit(row, tokens, Sampling(temperature=0.0), vocabulary)
            _run(engine, Plan(0, admit=(admit,), prefill=(Chunk(row, tokens),)))
            _run(engine, Plan(0, drop=(row,)))


def _decode_attention(
    call: AttentionCall, shapes: Shapes, tokens: int
) -> Iterator[Callable[[], None]]:
    """Yield a decoding row's attention at each capacity: cuDNN plans for each (`NO_CUDNN`), and
    MLX's kernel has a second form for longer rows."""
    if shapes.rounded and isinstance(call.keys, mx.array) and call.options["mask"] is None:
        for capacity in shapes.capacities(tokens):
            yield partial(_attend, call, capacity, capacity - 1)


def _prefill_attention(
    engine: StepEngine, vocabulary: int, tokens: int, width: int
) -> Iterator[Callable[[], None]]:
    """Run chunks of `width` tokens up to the first that gets a plan, then yield attention at each
    multiple with a real chunk's queries."""
    # cuDNN plans for lengths and strides.
    shapes, row = engine.shapes, RowId(0)
    start = (
        next(
            (at for at in range(width, tokens, width) if shapes.planned(at + width, width)), tokens
        )
        if width
        else tokens
    )
    if start + width > tokens or not width:
        return
    sizes = [min(width, start - at) for at in range(0, start, width)]
    admit = _admit(row, start + 2 * width, Sampling(temperature=0.0), vocabulary)
    for index, size in enumerate(sizes):
        _run(engine, Plan(0, admit=(admit,) if not index else (), prefill=(Chunk(row, size),)))
    with recording() as calls:
        _run(engine, Plan(0, prefill=(Chunk(row, width),)))
    _run(engine, Plan(0, drop=(row,)))
    for call in calls[-1:]:
        if call.options["mask"] == "causal" and isinstance(call.keys, mx.array):
            for end in range(start + 2 * width, tokens + 1, width):
                yield partial(_attend, call, end, end)


def _attend(call: AttentionCall, capacity: int, length: int) -> None:
    """Attend to `length` keys in buffers of `capacity`."""
    keys, values = (_buffer(part, capacity)[:, :, :length] for part in (call.keys, call.values))
    mx.eval(plain(call.queries, keys, values, None, **call.options))


def _buffer(like: mx.array, capacity: int) -> mx.array:
    buffer = mx.zeros((like.shape[0], like.shape[1], capacity, like.shape[3]), like.dtype)
    mx.eval(buffer)
    return buffer
