"""Trains the model of examples/shapes from nothing: some minutes on a GPU.

`python -m tests.vision_model.train --steps 12000 --out OUTDIR` needs numpy, attrs, jinja2,
safetensors, tokenizers, torch and transformers, and writes OUTDIR/model.safetensors. The weights
are transformers' Qwen3-VL by name. Its modules are called from here, since its encoder takes the
images of a batch one after the other; here those of a batch have the same sizes.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer
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
from tests.vision_model.questions import WHATS, Scene, conversation

Ints = NDArray[np.int64]
Batch = dict[str, Any]
SIDES = (128, 160, 192)
TOKEN = VISION["patch_size"] * VISION["spatial_merge_size"]
"""Side of a token in pixels."""
THINGS = 4
CANVAS = 160
"""Side of the largest drawn thing, in pixels."""
SPECIAL = re.compile(r"(<\|\w+\|>)")
"""Texts between special tokens are encoded one by one, and most come again."""
COLOR_NAMES = tuple(COLORS)


def positions_of(ids: Sequence[int], grids: Sequence[tuple[int, int]]) -> Ints:
    """M-RoPE's (3, tokens): text counts on, an image's tokens have its rows and columns."""
    found = np.zeros((3, len(ids)), np.int64)
    at = position = image = 0
    while at < len(ids):
        if ids[at] != IMAGE_PAD:
            found[:, at] = position
            at, position = at + 1, position + 1
            continue
        rows, columns = grids[image]
        row, column = np.divmod(np.arange(rows * columns), columns)
        span = slice(at, at + rows * columns)
        found[0, span], found[1, span], found[2, span] = position, position + row, position + column
        at, position, image = at + rows * columns, position + max(rows, columns), image + 1
    return found


def learnt(ids: Sequence[int], opening: Sequence[int], call: int) -> NDArray[np.bool_]:
    """Whether a token belongs to an answer; calls of tools are not learnt."""
    mask = np.zeros(len(ids), np.bool_)
    inside = False
    for at, token in enumerate(ids):
        if inside:
            mask[at] = True
            inside = token != END_OF_MESSAGE
        elif list(ids[at - len(opening) : at]) == list(opening) and token != call:
            mask[at] = inside = True
    return mask


class Batches(torch.utils.data.IterableDataset):  # type: ignore[misc]
    """Batch number n is the same in each run, whatever the number of workers."""

    def __init__(self, first: int, count: int, size: int) -> None:
        self._range = range(first, first + count)
        self._size = size

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        maker = BatchMaker(self._size)
        for number in self._range[worker.id :: worker.num_workers]:
            yield maker.make(number)


class BatchMaker:
    def __init__(self, size: int) -> None:
        self._size = size
        self._renderer = Renderer()
        tokenizer = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
        self._encode = lru_cache(2**16)(lambda text: tokenizer.encode(text).ids)
        self._opening = [START_OF_MESSAGE, *self._encode("assistant\n")]
        self._call = self._encode("<tool_call>")[0]

    def make(self, number: int) -> Batch:
        drawn = Random(number)
        [images] = drawn.choices(range(4), (4, 40, 40, 16))
        sizes = [(drawn.choice(SIDES), drawn.choice(SIDES)) for _ in range(images)]
        samples = [self._sample(drawn, sizes) for _ in range(self._size)]
        length = max(len(ids) for ids, *_ in samples)
        ids = np.full((self._size, length), END_OF_TEXT, np.int64)
        positions = np.zeros((3, self._size, length), np.int64)
        targets = np.full((self._size, length), -100, np.int64)
        for row, (tokens, places, mask, _) in enumerate(samples):
            ids[row, : len(tokens)] = tokens
            positions[:, row, : len(tokens)] = places
            following = np.where(mask, tokens, -100)[1:]
            targets[row, : len(following)] = following
        scenes = [scenes for *_, scenes in samples]
        things = np.array([[_numbers(scene) for scene in row] for row in scenes], np.int64)
        shades = np.array([[scene.shade for scene in row] for row in scenes], np.float32)
        return {
            "ids": ids,
            "positions": positions,
            "targets": targets,
            "things": things,
            "shades": shades,
            "sizes": sizes,
        }

    def _sample(
        self, drawn: Random, sizes: Sequence[tuple[int, int]]
    ) -> tuple[list[int], Ints, NDArray[np.bool_], list[Scene]]:
        messages, scenes = conversation(drawn, sizes)
        grids = [(height // TOKEN, width // TOKEN) for width, height in sizes]
        counts = iter([rows * columns for rows, columns in grids])
        ids: list[int] = []
        for text in SPECIAL.split(self._renderer.render(messages)):
            tokens = self._encode(text)
            ids += tokens * next(counts) if tokens == [IMAGE_PAD] else tokens
        return ids, positions_of(ids, grids), learnt(ids, self._opening, self._call), scenes


def _numbers(scene: Scene) -> list[list[int]]:
    """(things, 5): what, colour, center, size; size 0: nothing."""
    rows = [
        [WHATS.index(thing.what), COLOR_NAMES.index(thing.color), *thing.center, thing.size]
        for thing in scene.things
    ]
    return rows + [[0] * 5] * (THINGS - len(rows))


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
        """things (batch, THINGS, 5), shades (batch, 3); the pictures (batch, height, width, 3)."""
        y = torch.arange(height, device=things.device)[None, :, None]
        x = torch.arange(width, device=things.device)[None, None, :]
        pictures = shades[:, None, None, :].expand(-1, height, width, -1)
        for thing in things.unbind(1):
            what, color, left, top, size = thing.unbind(-1)
            down = y - top[:, None, None] + CANVAS // 2
            along = x - left[:, None, None] + CANVAS // 2
            inside = (down >= 0) & (down < CANVAS) & (along >= 0) & (along < CANVAS)
            places = (down.clamp(0, CANVAS - 1), along.clamp(0, CANVAS - 1))
            mask = self._masks[what[:, None, None], size[:, None, None], *places] & inside
            pictures = torch.where(mask[..., None], self._colors[color][:, None, None], pictures)
        return pictures


def rotated(values: Any, angles: Any) -> Any:
    """Rope with rotated halves. `angles`: (..., tokens, half a head), for (..., heads, tokens,
    head)."""
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
        self._frequencies_of_text = self._frequencies(TEXT["rope_theta"], TEXT["head_dim"])
        sections = TEXT["rope_scaling"]["mrope_section"]
        axis = torch.zeros(TEXT["head_dim"] // 2, dtype=torch.long)
        for which in (
            1,
            2,
        ):  # Interleaved: frequencies 1, 4, 7, ... are of rows, 2, 5, ... of columns.
            axis[which : 3 * sections[which] : 3] = which
        self._axis = axis.to(device)

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
        split = split.permute(0, 1, 4, 2, 5, 7, 3, 6)[:, :, :, :, :, :, None]
        patches = split.expand(*split.shape[:6], 2, patch, patch).flatten(5).flatten(1, 4)
        embed = self._visual.patch_embed.proj
        hidden = F.linear(patches, embed.weight.flatten(1), embed.bias)
        row, column = self._places(rows * merge, columns * merge)
        hidden = hidden + self._position_vectors(row, column, rows * merge, columns * merge)
        places = torch.stack([row, column], 1).float()
        angles = (places[:, :, None] * self._vision_frequencies).flatten(1)
        deep = []
        for index, block in enumerate(self._visual.blocks):
            hidden = hidden + self._attend(block.attn, block.norm1(hidden), angles)
            hidden = hidden + block.mlp(block.norm2(hidden))
            if index in VISION["deepstack_visual_indexes"]:
                merger = self._visual.deepstack_merger_list[len(deep)]
                deep.append(merger(hidden.flatten(0, 1)).unflatten(0, (batch, -1)))
        merged = self._visual.merger(hidden.flatten(0, 1)).unflatten(0, (batch, -1))
        return merged, deep

    def _places(self, rows: int, columns: int) -> tuple[Any, Any]:
        """Row and column of each patch, the four of a token behind each other."""
        row, column = torch.meshgrid(
            torch.arange(rows, device=self._device),
            torch.arange(columns, device=self._device),
            indexing="ij",
        )
        ordered = [
            each.reshape(rows // 2, 2, columns // 2, 2).transpose(1, 2).flatten()
            for each in (row, column)
        ]
        return ordered[0], ordered[1]

    def _position_vectors(self, row: Any, column: Any, rows: int, columns: int) -> Any:
        """Bilinear between the four nearest of the table's square."""
        side = round(VISION["num_position_embeddings"] ** 0.5)
        table = self._visual.pos_embed.weight
        y = row.float() * (side - 1) / (rows - 1)
        x = column.float() * (side - 1) / (columns - 1)
        top, left = y.floor().long(), x.floor().long()
        below, right = (top + 1).clamp(max=side - 1), (left + 1).clamp(max=side - 1)
        down, along = (y - top)[:, None], (x - left)[:, None]
        upper = table[top * side + left] * (1 - along) + table[top * side + right] * along
        lower = table[below * side + left] * (1 - along) + table[below * side + right] * along
        return upper * (1 - down) + lower * down

    def _attend(self, attention: Any, hidden: Any, angles: Any) -> Any:
        heads = VISION["num_heads"]
        split = attention.qkv(hidden).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        queries, keys, values = split
        queries, keys = rotated(queries, angles), rotated(keys, angles)
        out = F.scaled_dot_product_attention(queries, keys, values)
        return attention.proj(out.transpose(1, 2).flatten(2))

    def logits(self, ids: Any, positions: Any, images: Sequence[Any]) -> Any:
        """Logits (batch, tokens, vocabulary). `images`: pictures of all rows, one by one."""
        hidden = self._text.embed_tokens(ids)
        is_image = ids == IMAGE_PAD
        encoded = [self.encode(pictures) for pictures in images]
        if encoded:
            vectors = torch.cat([vectors for vectors, _ in encoded], 1).flatten(0, 1)
            hidden = hidden.masked_scatter(is_image[..., None], vectors)
        angles = positions[self._axis].permute(1, 2, 0).float() * self._frequencies_of_text
        for index, layer in enumerate(self._text.layers):
            hidden = hidden + self._attend_text(
                layer.self_attn, layer.input_layernorm(hidden), angles[:, None]
            )
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            if encoded and index < len(encoded[0][1]):
                deep = torch.cat([deep[index] for _, deep in encoded], 1).flatten(0, 1)
                zeros = torch.zeros_like(hidden)
                hidden = hidden + zeros.masked_scatter(is_image[..., None], deep)
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


def train(steps: int, size: int, workers: int, out: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**CONFIG)).float().to(device)
    seeing, painter = Seeing(model, device), Painter(device)
    print(f"{sum(each.numel() for each in model.parameters()):,} parameters on {device}")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=2e-3, weight_decay=0.02, betas=(0.9, 0.98), fused=device == "cuda"
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=0.05)
    loader = torch.utils.data.DataLoader(
        Batches(0, steps, size), batch_size=None, num_workers=workers, prefetch_factor=8
    )
    noise = torch.Generator(device).manual_seed(1)
    began, tally = time.monotonic(), torch.zeros(3, device=device)
    for step, batch in enumerate(loader, 1):
        images = painted(painter, batch, device, noise)
        ids, positions, targets = (
            batch[name].to(device, non_blocking=True) for name in ("ids", "positions", "targets")
        )
        logits = seeing.logits(ids, positions, images)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            wrong = ((logits.argmax(-1) != targets) & (targets != -100)).any(-1)
            tally += torch.stack([loss, wrong.sum().float(), torch.ones_like(loss)])
        if step % 200 == 0 or step == steps:
            total, mistakes, count = tally.tolist()
            seconds = time.monotonic() - began
            right = 100 - 100 * mistakes / (count * size)
            figures = f"loss {total / count:.4f}, {right:.2f} % of conversations right"
            print(f"{step} steps, {seconds:.0f} s: {figures}", flush=True)
            tally.zero_()
            if step % 2000 == 0 or step == steps:
                save(model, out)


def painted(painter: Painter, batch: Batch, device: str, noise: Any) -> list[Any]:
    """The pictures of each place in the prompt, (batch, height, width, 3), a little noisy."""
    images = []
    for index, (width, height) in enumerate(batch["sizes"]):
        things = batch["things"][:, index].to(device, non_blocking=True)
        shades = batch["shades"][:, index].to(device, non_blocking=True)
        pictures = painter.paint(things, shades, width, height)
        grain = torch.randn(pictures.shape, generator=noise, device=device)
        strength = torch.rand(len(things), 1, 1, 1, generator=noise, device=device) * 6
        images.append((pictures + strength * grain).clamp(0, 255))
    return images


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
    parser.add_argument("--steps", type=int, default=12000)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    train(options.steps, options.size, options.workers, options.out)
