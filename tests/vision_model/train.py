r"""Trains the model of examples/shapes, from nothing or from given weights.

It needs numpy, attrs, jinja2, safetensors, tokenizers, torch and transformers, and writes
OUTDIR/model.safetensors. A seed has the same batches in every run; on one thread of a CPU it has
the same weights, too.

`python -m tests.vision_model.train --out OUTDIR` begins with random weights. The first weights
(commit 8d9bb203) came of 12 minutes of an H200; how many steps these were is not known, and the
default is an estimate. 180 steps on a CPU followed (commit 31345278), and 5,411 with the H200
(`--rate 5e-4 --seed 91`). Those of now go on from these, with an H200 in six minutes, beside
another training:

    python -m tests.vision_model.train --start BEFORE/model.safetensors --steps 4500 --rate 5e-4 \
        --seed 93 --workers 6 --out OUTDIR

The weights are transformers' Qwen3-VL by name. Its modules are called from here, since its encoder
takes the images of a batch one after the other; here those of a batch have the same sizes.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import itertools
import math
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import attrs
import numpy as np
import torch  # type: ignore[import-not-found]
import torch.nn.functional as F  # type: ignore[import-not-found]  # noqa: N812
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.optim.swa_utils import (  # type: ignore[import-not-found]
    AveragedModel,
    get_ema_multi_avg_fn,
)
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from tests.pictures import COLORS, blank, put
from tests.vision_model.files import (
    CONFIG,
    DIRECTORY,
    END_OF_MESSAGE,
    END_OF_TEXT,
    IMAGE_PAD,
    START_OF_MESSAGE,
    TEXT,
    VISION,
    Renderer,
)
from tests.vision_model.questions import (
    ALONE,
    AMONG_OTHERS,
    WHATS,
    WIDTHS,
    Scene,
    conversation,
)

Ints = NDArray[np.int64]
Batch = dict[str, Any]
REPORT = 100
"""Steps between two reports, at which the weights are kept, too."""
EMA = 0.9
"""Share of the average that stays at each step."""
FEW_MIXES = (1, 9, 9, 6)
"""Numbers of mixes of sizes, by the number of images, with CUDA: each mix is a graph."""
IMAGES = (2, 20, 28, 50)
"""How often a conversation has no image, one, two or three, in percent."""
ANSWER_TOKENS = 40
"""Places for the tokens of a conversation's answers."""
TEXT_TOKENS = 256
"""No conversation is longer: one that the training leaves out is one that the model answers
wrongly. Under a limit of 104 these were two in five with three images."""
TOKEN = VISION["patch_size"] * VISION["spatial_merge_size"]
"""Side of a token in pixels."""
CANVAS = 160
"""Side of the largest drawn thing, in pixels."""
APART = 100
"""Batches between the first and the second use of one."""
INPUTS = ("ids", "positions", "places", "targets", "things", "shades")
SPECIAL = re.compile(r"(<\|\w+\|>)")
"""Texts between special tokens are encoded one by one, and most come again."""
COLOR_NAMES = tuple(COLORS)


def positions_of(ids: Sequence[int], grids: Sequence[tuple[int, int]]) -> Ints:
    """M-RoPE's (3, tokens): text counts on, an image's tokens have its rows and columns."""
    positions = np.zeros((3, len(ids)), np.int64)
    at = position = image = 0
    while at < len(ids):
        if ids[at] != IMAGE_PAD:
            positions[:, at] = position
            at, position = at + 1, position + 1
            continue
        rows, columns = grids[image]
        row, column = np.divmod(np.arange(rows * columns), columns)
        span = slice(at, at + rows * columns)
        positions[:, span] = position + np.stack([0 * row, row, column])
        at, position, image = at + rows * columns, position + max(rows, columns), image + 1
    return positions


def learnt(ids: Sequence[int], opening: Sequence[int], call: int) -> Ints:
    """Places of the answers' tokens; calls of tools are not learnt."""
    places: list[int] = []
    inside = False
    for at, token in enumerate(ids):
        if inside:
            places.append(at)
            inside = token != END_OF_MESSAGE
        elif list(ids[at - len(opening) : at]) == list(opening) and token != call:
            places.append(at)
            inside = True
    return np.array(places, np.int64)


@attrs.frozen
class Sample:
    """A conversation. `learnt`: places of the answers' tokens in `ids`."""

    ids: list[int]
    positions: Ints
    learnt: Ints
    scenes: list[Scene]


@attrs.frozen
class Batches(torch.utils.data.IterableDataset):  # type: ignore[misc]
    """Batch number n of a seed is the same in each run with any number of workers."""

    seed: int
    size: int
    few_mixes: bool

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        maker = BatchMaker(self.size, self.few_mixes)
        for number in itertools.count(first, step):
            yield maker.make(Random(f"training {self.seed}, batch {number}"))


class BatchMaker:
    """`size`: conversations in a batch. `few_mixes`: see `FEW_MIXES`."""

    def __init__(self, size: int, few_mixes: bool) -> None:
        self._size, self._few_mixes = size, few_mixes
        self._renderer = Renderer()
        tokenizer = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
        self._encode = lru_cache(2**16)(lambda text: tokenizer.encode(text).ids)
        self._opening = [START_OF_MESSAGE, *self._encode("assistant\n")]
        self._call = self._encode("<tool_call>")[0]

    def make(self, drawn: Random) -> Batch:
        """All samples have images of the same sizes."""
        [images] = drawn.choices(range(4), IMAGES)
        mix = drawn
        if self._few_mixes:
            mix = Random(f"{images} images, {drawn.randrange(FEW_MIXES[images])}")
        sizes = [(mix.choice(WIDTHS), mix.choice(WIDTHS)) for _ in range(images)]
        length = TEXT_TOKENS + sum(width * height // TOKEN**2 for width, height in sizes)
        samples = [self._sample(drawn, sizes, length) for _ in range(self._size)]
        if not self._few_mixes:
            length = max(len(sample.ids) for sample in samples)
        ids = np.full((self._size, length), END_OF_TEXT, np.int64)
        positions = np.zeros((self._size, 3, length), np.int64)
        places = np.zeros((self._size, ANSWER_TOKENS), np.int64)
        targets = np.full((self._size, ANSWER_TOKENS), -100, np.int64)
        for row, sample in enumerate(samples):
            ids[row, : len(sample.ids)] = sample.ids
            positions[row, :, : len(sample.ids)] = sample.positions
            places[row, : len(sample.learnt)] = sample.learnt - 1
            targets[row, : len(sample.learnt)] = ids[row, sample.learnt]
        limit = max(ALONE if images == 1 else AMONG_OTHERS)
        things = [[_numbers(scene, limit) for scene in sample.scenes] for sample in samples]
        shades = [[scene.shade for scene in sample.scenes] for sample in samples]
        return {
            "ids": ids,
            "positions": positions,
            "places": places,
            "targets": targets,
            "things": np.array(things, np.int64),
            "shades": np.array(shades, np.float32),
            "sizes": sizes,
        }

    def _sample(self, drawn: Random, sizes: Sequence[tuple[int, int]], length: int) -> Sample:
        messages, scenes = conversation(drawn, sizes)
        grids = [(height // TOKEN, width // TOKEN) for width, height in sizes]
        counts = iter([rows * columns for rows, columns in grids])
        ids: list[int] = []
        for text in SPECIAL.split(self._renderer.render(messages)):
            tokens = self._encode(text)
            ids += tokens * next(counts) if tokens == [IMAGE_PAD] else tokens
        answers = learnt(ids, self._opening, self._call)
        if len(ids) > length or len(answers) > ANSWER_TOKENS:
            return self._sample(drawn, sizes, length)
        return Sample(ids, positions_of(ids, grids), answers, scenes)


def _numbers(scene: Scene, limit: int) -> list[list[int]]:
    """(limit, 5): what, colour, center, size; size 0: nothing."""
    rows = [
        [WHATS.index(thing.what), COLOR_NAMES.index(thing.color), *thing.center, thing.size]
        for thing in scene.things
    ]
    return rows + [[0] * 5] * (limit - len(rows))


class Painter:
    """Draws the scenes of a batch on the GPU with masks from `tests.pictures.put`."""

    def __init__(self, device: str) -> None:
        masks = np.zeros((len(WHATS), CANVAS, CANVAS, CANVAS), np.bool_)
        for index, what in enumerate(WHATS):
            for size in range(8, CANVAS):
                canvas = blank(CANVAS, CANVAS, (1, 1, 1))
                put(canvas, what, "red", (CANVAS // 2, CANVAS // 2), size)
                masks[index, size] = canvas[:, :, 0] != 1
        self._masks = torch.from_numpy(masks).to(device)
        self._colors = torch.tensor(list(COLORS.values()), device=device).float()

    def paint(self, things: Any, shades: Any, width: int, height: int) -> Any:
        """things (batch, limit, 5), shades (batch, 3); pictures (batch, height, width, 3) with
        some noise."""
        y = torch.arange(height, device=things.device)[None, :, None]
        x = torch.arange(width, device=things.device)[None, None, :]
        pictures = shades[:, None, None, :].expand(-1, height, width, -1)
        for thing in things.unbind(1):
            what, color, left, top, size = thing.unbind(-1)
            down = y - top[:, None, None] + CANVAS // 2
            along = x - left[:, None, None] + CANVAS // 2
            # The canvas is empty at its edges.
            places = (down.clamp(0, CANVAS - 1), along.clamp(0, CANVAS - 1))
            mask = self._masks[what[:, None, None], size[:, None, None], *places]
            pictures = torch.where(mask[..., None], self._colors[color][:, None, None], pictures)
        strength = 6 * torch.rand(len(things), 1, 1, 1, device=things.device)
        return (pictures + strength * torch.randn_like(pictures)).clamp(0, 255)


def rotated(values: Any, angles: Any) -> Any:
    """Rope of rotated halves. `values`: (..., heads, tokens, head); `angles`: half a head."""
    first, second = values.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Seeing:
    """Qwen3-VL's encoder and text model (transformers' modules) for a batch of equal sizes."""

    def __init__(self, model: Any, device: str) -> None:
        self._visual = model.model.visual
        self._text = model.model.language_model
        self._device = device
        head = VISION["hidden_size"] // VISION["num_heads"]
        self._vision_frequencies = self._frequencies(10000.0, head // 2)
        self._text_frequencies = self._frequencies(TEXT["rope_theta"], TEXT["head_dim"])
        sections = TEXT["rope_scaling"]["mrope_section"]
        axis = torch.zeros(TEXT["head_dim"] // 2, dtype=torch.long)
        for which in (1, 2):  # Interleaved: 1, 4, 7, ... are of rows, 2, 5, 8, ... of columns.
            axis[which : 3 * sections[which] : 3] = which
        self._axis = axis.to(device)
        self._tables: dict[tuple[int, int], tuple[Any, Any]] = {}

    def _frequencies(self, base: float, width: int) -> Any:
        steps = torch.arange(0, width, 2, device=self._device).float() / width
        return base**-steps

    def encode(self, pictures: Any) -> tuple[Any, list[Any]]:
        """Pictures (batch, height, width, 3) from 0 to 255; vectors (batch, tokens, hidden) of the
        last layer, and of the layers that go into the text model's first ones."""
        batch, height, width, _ = pictures.shape
        patch, merge = VISION["patch_size"], VISION["spatial_merge_size"]
        rows, columns = height // TOKEN, width // TOKEN
        split = (pictures / 127.5 - 1).reshape(batch, rows, merge, patch, columns, merge, patch, 3)
        split = split.permute(0, 1, 4, 2, 5, 7, 3, 6)
        patches = split.flatten(5).flatten(1, 4)
        embed = self._visual.patch_embed.proj
        weight = embed.weight.sum(2).flatten(1)  # Both frames are the same picture.
        hidden = F.linear(patches, weight, embed.bias)
        if (rows, columns) not in self._tables:
            self._tables[rows, columns] = self._tables_of(rows * merge, columns * merge)
        mixing, angles = self._tables[rows, columns]
        hidden = hidden + mixing @ self._visual.pos_embed.weight
        deep: list[Any] = []
        for index, block in enumerate(self._visual.blocks):
            hidden = hidden + self._attend(block.attn, block.norm1(hidden), angles)
            hidden = hidden + block.mlp(block.norm2(hidden))
            if index in VISION["deepstack_visual_indexes"]:
                merger = self._visual.deepstack_merger_list[len(deep)]
                deep.append(merger(hidden.flatten(0, 1)).unflatten(0, (batch, -1)))
        merged = self._visual.merger(hidden.flatten(0, 1)).unflatten(0, (batch, -1))
        return merged, deep

    def _tables_of(self, rows: int, columns: int) -> tuple[Any, Any]:
        """Of each patch, the four of a token behind each other: its shares of the table of learnt
        positions (bilinear), and the angles of its rope."""
        places = np.mgrid[:rows, :columns].reshape(2, rows // 2, 2, columns // 2, 2)
        row, column = places.transpose(0, 1, 3, 2, 4).reshape(2, -1)
        side = round(VISION["num_position_embeddings"] ** 0.5)
        shares = [
            np.maximum(0, 1 - abs(index[:, None] * (side - 1) / (count - 1) - np.arange(side)))
            for index, count in ((row, rows), (column, columns))
        ]
        mixing = (shares[0][:, :, None] * shares[1][:, None, :]).reshape(len(row), -1)
        both = torch.from_numpy(np.stack([row, column], 1)).float().to(self._device)
        angles = (both[:, :, None] * self._vision_frequencies).flatten(1)
        return torch.from_numpy(mixing).float().to(self._device), angles

    def _attend(self, attention: Any, hidden: Any, angles: Any) -> Any:
        heads = VISION["num_heads"]
        split = attention.qkv(hidden).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        queries, keys, values = split
        queries, keys = rotated(queries, angles), rotated(keys, angles)
        out = F.scaled_dot_product_attention(queries, keys, values)
        return attention.proj(out.transpose(1, 2).flatten(2))

    def logits(self, ids: Any, positions: Any, places: Any, images: Sequence[Any]) -> Any:
        """Logits (batch, places, vocabulary) of what follows the tokens at `places`. `positions`:
        (batch, 3, tokens). `images`: pictures of all rows, one by one."""
        hidden = self._text.embed_tokens(ids)
        is_image = ids == IMAGE_PAD
        number = (is_image.cumsum(1) * is_image)[..., None].expand(-1, -1, hidden.shape[-1])

        def at_images(vectors: Sequence[Any]) -> Any:
            """Vectors at the images' tokens, zeros at the texts'."""
            nothing = torch.zeros_like(hidden[:, :1])
            return torch.cat([nothing, *vectors], 1).gather(1, number)

        encoded = [self.encode(pictures) for pictures in images]
        if encoded:
            seen = at_images([vectors for vectors, _ in encoded])
            hidden = torch.where(is_image[..., None], seen, hidden)
        angles = positions[:, self._axis].transpose(1, 2).float() * self._text_frequencies
        for index, layer in enumerate(self._text.layers):
            hidden = hidden + self._attend_text(
                layer.self_attn, layer.input_layernorm(hidden), angles[:, None]
            )
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            if encoded and index < len(encoded[0][1]):
                hidden = hidden + at_images([deep[index] for _, deep in encoded])
        hidden = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
        return F.linear(self._text.norm(hidden), self._text.embed_tokens.weight)

    def _attend_text(self, attention: Any, hidden: Any, angles: Any) -> Any:
        split = (-1, TEXT["head_dim"])
        queries = attention.q_norm(attention.q_proj(hidden).unflatten(-1, split)).transpose(1, 2)
        keys = attention.k_norm(attention.k_proj(hidden).unflatten(-1, split)).transpose(1, 2)
        values = attention.v_proj(hidden).unflatten(-1, split).transpose(1, 2)
        queries, keys = rotated(queries, angles), rotated(keys, angles)
        groups = TEXT["num_attention_heads"] // TEXT["num_key_value_heads"]
        keys, values = (each.repeat_interleave(groups, 1) for each in (keys, values))
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return attention.o_proj(out.transpose(1, 2).flatten(2))


class Step:
    """Gradients of a batch of given sizes, as a CUDA graph: else, launching takes most of the
    time."""

    def __init__(self, trainer: Trainer, first: Batch) -> None:
        self._trainer = trainer
        self._inputs = {name: first[name].to(trainer.device) for name in INPUTS}
        sizes = first["sizes"]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                trainer.compute(self._inputs, sizes)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # The workers' pinning thread calls CUDA, too.
        with torch.cuda.graph(self._graph, trainer.pool, capture_error_mode="thread_local"):
            trainer.compute(self._inputs, sizes)

    def run(self, batch: Batch) -> None:
        for name, value in self._inputs.items():
            value.copy_(batch[name], non_blocking=True)
        self._graph.replay()


class Trainer:
    """`tally`: sum of losses, wrong conversations, number of conversations. `average`: the model
    whose weights are the moving average (EMA) of those of the last steps."""

    def __init__(self, start: Path | None, seed: int) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(seed)
        torch.set_float32_matmul_precision("high")
        self.model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**CONFIG)).float()
        if start is not None:
            weights = {name: value.float() for name, value in load_file(start).items()}
            self.model.load_state_dict(weights, strict=False)  # The head is the embedding.
        self.model.to(self.device)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(EMA))
        self.parameters = list(self.model.parameters())
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.gradients = [parameter.grad for parameter in self.parameters]
        self.seeing, self.painter = Seeing(self.model, self.device), Painter(self.device)
        self.tally = torch.zeros(3, device=self.device)
        self.pool = None if self.device == "cpu" else torch.cuda.graph_pool_handle()
        self._steps: dict[str, Step] = {}
        self._optimizer = torch.optim.AdamW(self.parameters, weight_decay=0.02, betas=(0.9, 0.98))

    def hardest(self, batch: Batch, count: int) -> Batch:
        """The conversations with the largest losses: the others have been learnt long ago."""
        inputs = {name: batch[name].to(self.device) for name in INPUTS}
        by_length = (inputs["ids"] != END_OF_TEXT).sum(1).argsort()
        losses = [
            self._losses(rows_of(inputs, rows), batch["sizes"]) for rows in by_length.split(count)
        ]
        rows = by_length[torch.cat(losses).topk(count).indices]
        return rows_of(inputs, rows) | {"sizes": batch["sizes"]}

    def _losses(self, inputs: Batch, sizes: Sequence[tuple[int, int]]) -> Any:
        with torch.no_grad():
            logits = self._logits(inputs, sizes).transpose(1, 2)
        return F.cross_entropy(logits, inputs["targets"], reduction="none").sum(1)

    def step(self, batch: Batch, rate: float) -> None:
        if self.device == "cpu":
            self.compute(batch, batch["sizes"])
        else:
            key = str(batch["sizes"])
            if key not in self._steps:
                self._steps[key] = Step(self, batch)
            self._steps[key].run(batch)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self.average.update_parameters(self.model)

    def compute(self, inputs: Batch, sizes: Sequence[tuple[int, int]]) -> None:
        """Puts the gradients of a batch into `gradients`."""
        torch._foreach_zero_(self.gradients)
        logits, targets = self._logits(inputs, sizes), inputs["targets"]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        wrong = ((logits.argmax(-1) != targets) & (targets != -100)).any(-1).float()
        count = torch.full_like(loss, len(wrong))
        self.tally += torch.stack([loss.detach() * count, wrong.sum(), count])

    def _logits(self, inputs: Batch, sizes: Sequence[tuple[int, int]]) -> Any:
        images = [
            self.painter.paint(inputs["things"][:, at], inputs["shades"][:, at], width, height)
            for at, (width, height) in enumerate(sizes)
        ]
        return self.seeing.logits(inputs["ids"], inputs["positions"], inputs["places"], images)


def rows_of(inputs: Batch, rows: Any) -> Batch:
    """Conversations of a batch, as long as the longest of them."""
    chosen = {name: value[rows] for name, value in inputs.items()}
    longest = (chosen["ids"] != END_OF_TEXT).sum(1).max()
    chosen["ids"] = chosen["ids"][:, :longest]
    chosen["positions"] = chosen["positions"][:, :, :longest]
    return chosen


def train(options: argparse.Namespace) -> None:
    trainer = Trainer(options.start, options.seed)
    count = sum(parameter.numel() for parameter in trainer.parameters)
    print(f"{count:,} parameters on {trainer.device}")
    on_cpu = trainer.device == "cpu"
    if options.pool > 1 and not on_cpu:
        raise SystemExit("--pool is for a CPU: graphs have batches of one length")
    loader = torch.utils.data.DataLoader(
        Batches(options.seed, options.size * options.pool, few_mixes=not on_cpu),
        batch_size=None,
        num_workers=options.workers,
        prefetch_factor=16 if options.workers else None,
        pin_memory=not on_cpu,
    )
    began = time.monotonic()
    for steps, batch in enumerate(batches_of(loader, twice=not on_cpu), start=1):
        chosen = trainer.hardest(batch, options.size) if options.pool > 1 else batch
        trainer.step(chosen, options.rate * shape_of_rate(steps / options.steps))
        if steps % REPORT == 0 or steps == options.steps:
            report(trainer, steps, time.monotonic() - began)
            save(trainer.average.module, options.out)
        if steps == options.steps:
            break


def batches_of(loader: Iterable[Batch], *, twice: bool) -> Iterator[Batch]:
    """With CUDA, making batches takes longer than learning from them: each comes twice, not at
    once."""
    again: deque[Batch] = deque()
    for batch in loader:
        yield batch
        if twice:
            again.append(batch)
        if len(again) > APART:
            yield again.popleft()


def shape_of_rate(progress: float) -> float:
    """Up within a twentieth of the time, then down as a cosine."""
    return min(20 * progress, 0.5 * (1 + math.cos(math.pi * progress)))


def report(trainer: Trainer, steps: int, seconds: float) -> None:
    total, mistakes, count = trainer.tally.tolist()
    trainer.tally.zero_()
    figures = f"loss {total / count:.4f}, {100 - 100 * mistakes / count:.2f} % right"
    print(f"{steps} steps, {seconds:.0f} s: {figures}", flush=True)


def save(model: Any, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.detach().to("cpu", torch.float16).contiguous()
        for name, value in model.state_dict().items()
        if not name.startswith("lm_head.")
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--size", type=int, default=256, help="conversations in a batch")
    parser.add_argument("--pool", type=int, default=1, help="the hardest of so many are learnt")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=14, help="0: batches are made between steps")
    parser.add_argument("--start", type=Path, help="weights to go on from")
    parser.add_argument("--out", type=Path, required=True)
    train(parser.parse_args())
