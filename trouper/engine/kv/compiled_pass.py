"""Passes whose graph is built once by `mx.compile`, and then only instantiated: over decoding rows,
and over a lone short prompt.

Building the graph of a pass takes 1.4 to 1.8 ms of Python a step (28 layers), a third of a step on
a fast GPU, and holds Python's lock meanwhile. A pass can be compiled if nothing in it depends on
the lengths of rows but arrays: where attention gets whole buffers and lengths
(`decode_attention.py`). Its structure is then the number of rows and the shapes of the buffers. The
first pass over a prompt depends on nothing but its width: the row has no tokens yet, and its
buffers are made in the pass.

- The first pass of a structure is an ordinary one. It shows which arrays of its regions the model
  reads: the compiled function gets these as inputs. The second one soon after is compiled: a
  structure that lasts for one step is not worth that.
- While the function is traced, regions have arrays and nothing else (`TracedRegion`). A model that
  needs more - a window, a ring that takes drafts, a mask - fails there, and runs as before.
- The function gets buffers and returns them. Nobody else may hold the old ones when the pass is
  evaluated, or each write would copy a buffer.

What each pass depends on is in `pass_kinds.py`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from itertools import repeat
from operator import attrgetter, setitem

import mlx.core as mx

from trouper.engine.kv.pass_kinds import Pass
from trouper.engine.kv.region import Name, Region
from trouper.engine.platform.error_text import line_of

MAX_COMPILED = 48
"""Maximum number of compiled structures. Each keeps the traced graph, about 1 MB for 28 layers."""
MAX_SEEN = 4
"""Maximum number of structures that are remembered before one of them recurs."""
MAX_KINDS = 1024
"""Maximum number of kinds of passes that are counted."""
PREPARING = 2
"""Number of passes of a kind, if it is not compiled, that may take longer than those after them. A
kind that is compiled takes longer until it was traced: kernels and plans are prepared in its first
pass, the graph is traced and made into a CUDA graph in the second. On an H100 (4B shape, 8 rows, 4
drafts each): 48, 32, 15, 15, 15 ms."""


BUFFERS = attrgetter("buffers")


Build = Callable[[Sequence[Region], mx.array], mx.array]
"""Builds the model's pass over tokens (n, width) in the slots of these regions; returns logits (n,
width, vocabulary)."""


Traced = Callable[
    [mx.array, list[list[mx.array]], list[list[mx.array]]], tuple[mx.array, list[list[mx.array]]]
]
"""From tokens, the arrays of the regions and the buffers of the caches to logits and the new
buffers."""


class CompiledPasses:
    """The compiled passes of a model, and how often passes of each kind ran.

    preparing: whether the device prepared something in the passes since `begin_step`, so that their
    duration says nothing of later ones.
    """

    def __init__(self, *, counting: bool) -> None:
        """`counting`: whether the device prepares kernels for each kind of pass."""
        self.preparing, self._counting = False, counting
        self._counts: OrderedDict[Hashable, int] = OrderedDict()
        self._compiled: OrderedDict[Hashable, CompiledPass] = OrderedDict()
        """By kind, the least recently used first."""
        self._seen: OrderedDict[Hashable, list[list[Name]]] = OrderedDict()
        """Kinds of the last ordinary passes that may be compiled, the oldest first, and the arrays
        that each read of each region. Passes with drafts and without take turns."""
        self.fault = ""
        """Why the last pass that could not be traced could not."""

    def begin_step(self) -> None:
        """What was prepared before is no matter of the passes that follow."""
        self.preparing = False

    def note(self, ordinary: Pass) -> None:
        """Count a pass that is not compiled, such as one over chunks of prompts, or of a row
        alone."""
        self.preparing |= self._counting and self._count(ordinary.kind) <= PREPARING

    def run(
        self, build: Build, model_pass: Pass, tokens: mx.array, *, may_compile: bool = True
    ) -> mx.array:
        """Run the pass: instantiated if it is compiled, compiled now if a recent pass was of the
        same kind, else built. The caches then have new buffers."""
        if not (may_compile and model_pass.traceable):
            self.note(model_pass)
            return build(model_pass.regions, tokens)
        kind = model_pass.kind
        if (names := self._seen.pop(kind, None)) is not None:
            self._compiled[kind] = CompiledPass(names)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        compiled = self._compiled.get(kind)
        self.preparing |= self._counting and (compiled is None or names is not None)
        if compiled is not None:
            self._compiled.move_to_end(kind)
            if not compiled.fault:
                return compiled(build, model_pass, tokens)
            self.fault = compiled.fault
        logits = build(model_pass.regions, tokens)
        if compiled is None:
            self._seen[kind] = model_pass.inputs()
            if len(self._seen) > MAX_SEEN:
                self._seen.popitem(last=False)
        return logits

    def _count(self, kind: Hashable) -> int:
        """Number of passes of a kind that is not compiled, with this one."""
        self._counts[kind] = count = self._counts.pop(kind, 0) + 1
        if len(self._counts) > MAX_KINDS:
            self._counts.popitem(last=False)
        return count


class CompiledPass:
    """The compiled function of one structure. It is traced at its first call."""

    def __init__(self, names: list[list[Name]]) -> None:
        """`names`: the arrays of each region that are inputs."""
        self._names = names
        self._call: list[tuple[Build, Pass]] = []
        """The call in hand, if any: to keep it would keep all rows' KV."""
        self._function = mx.compile(_traced(names, self._call))
        self.fault = ""
        """Why the pass cannot be traced; "" if it can."""

    def __call__(self, build: Build, model_pass: Pass, tokens: mx.array) -> mx.array:
        """Instantiate the pass, or build it as usual, if it cannot be traced."""
        buffers = list(map(BUFFERS, model_pass.caches))
        arrays = [
            [region.array(name) for name in names]
            for region, names in zip(model_pass.regions, self._names, strict=True)
        ]
        self._call.append((build, model_pass))
        try:
            logits, changed = self._function(tokens, arrays, buffers)
            was_traced = not self._call
        except Exception as error:  # noqa: BLE001 - any architecture's code over arrays without values: it is the answer
            self.fault = line_of(error)
            model_pass.put(buffers)
            return build(model_pass.regions, tokens)
        finally:
            self._call.clear()
        if was_traced or not model_pass.keeps_shapes:
            model_pass.put(changed)
        else:
            replace_items(buffers, changed)
        return logits


def replace_items(lists: Sequence[list[mx.array]], items: Sequence[list[mx.array]]) -> None:
    """Replace all items of each list. In C: there are as many lists as layers, in each step."""
    deque(map(setitem, lists, repeat(slice(None)), items), maxlen=0)


def _traced(names: list[list[Name]], call: list[tuple[Build, Pass]]) -> Traced:
    """The function that is traced. It refers to no object that refers to it: such a cycle would
    keep the model's weights, which are constants of the trace, until a garbage collection."""

    def run(
        tokens: mx.array, arrays: list[list[mx.array]], buffers: list[list[mx.array]]
    ) -> tuple[mx.array, list[list[mx.array]]]:
        build, model_pass = call.pop()
        model_pass.put([list(parts) for parts in buffers])
        regions = model_pass.traced_regions(
            [
                dict(zip(known, values, strict=True))
                for known, values in zip(names, arrays, strict=True)
            ]
        )
        return build(regions, tokens), [leaf.buffers for leaf in model_pass.caches]

    return run
