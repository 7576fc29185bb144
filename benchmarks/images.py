"""`just bench-images [stall|encoder|memory]`: images beside streams, the encoder beside mlx-vlm's,
and memory.

stall: streams decode while an image of `--tokens` tokens is decoded, encoded and prefilled; their
longest gaps in that time, and in as long a time without an image.
encoder: seconds of one image in Qwen3-VL's encoder with random weights, whole and in slices of one
layer, beside mlx-vlm's encoder on the same pixels; in turns.
memory: resident memory of a server and of its decoder in MB at rest, at its peak while photos of 64
megapixels and `--requests` at a time with 64 photos of 12 megapixels are answered, and afterwards.
Linux only.
"""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import time
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import trio
from PIL import Image

from benchmarks import load, servers
from tests.image_files import encoded, picture
from tests.pictures import data_url, screenshot
from trouper.protocol.media import ImageFormat
from trouper_lab.load import Stream

SETTLE_S = 2.0


# -- streams beside an image ---------------------------------------------------------------------


def ask_about_image(port: int, seed: int, tokens: int) -> tuple[float, int]:
    """Seconds and prompt tokens of a question about a new square image of so many tokens."""
    side = 32 * int(tokens**0.5)
    body = question([data_url(screenshot(seed, side, side))])
    began = time.perf_counter()
    prompt_tokens = ask(port, body)
    if prompt_tokens < tokens:
        raise RuntimeError("the server saw no image: its log says why")
    return time.perf_counter() - began, prompt_tokens


def question(urls: Iterable[str], detail: str = "auto") -> bytes:
    """The body of a question about images."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url, "detail": detail}} for url in urls
    ]
    parts.append({"type": "text", "text": "What is it?"})
    return json.dumps({"messages": [{"role": "user", "content": parts}], "max_tokens": 1}).encode()


def ask(port: int, body: bytes) -> int:
    """Tokens of the prompt."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:  # noqa: S310 - the server of this benchmark
        return int(json.load(answer)["usage"]["prompt_tokens"])


def longest_gap(streams: list[Stream], begin: float, end: float) -> float:
    gaps = [
        later - earlier
        for one in streams
        for earlier, later in zip(one.times, one.times[1:], strict=False)
        if later > begin and earlier < end
    ]
    return max(gaps, default=0.0)


async def stall(port: int, count: int, tokens: int, seed: int) -> dict[str, float]:
    streams = [Stream() for _ in range(count)]
    async with trio.open_nursery() as nursery:
        for index, one in enumerate(streams):
            words = load.prompt(100 * seed + index, 8)
            nursery.start_soon(
                partial(load.stream, port, words, 8000, one, ignore_eos=True, speculation="off")
            )
        # The streams of load.py have no event to wait for.
        while not all(len(one.times) > 3 for one in streams):  # noqa: ASYNC110
            await trio.sleep(0.05)
        await trio.sleep(SETTLE_S)
        began = time.perf_counter()
        took_s, prompt_tokens = await trio.to_thread.run_sync(ask_about_image, port, seed, tokens)
        ended = time.perf_counter()
        await trio.sleep(took_s + SETTLE_S)
        nursery.cancel_scope.cancel()
    return {
        "prompt_tokens": prompt_tokens,
        "answer_s": took_s,
        "longest_gap_s": longest_gap(streams, began, ended),
        "without_image_s": longest_gap(streams, ended + SETTLE_S, ended + SETTLE_S + took_s),
    }


def play_stall(flags: argparse.Namespace) -> list[dict[str, float]]:
    options = ("--decode-stall-ms", str(flags.stall_ms), "--max-image-tokens", str(flags.tokens))
    made = []
    model = servers.random_vision_model(flags.text, flags.shape) if flags.text else flags.model
    with servers.trouper(Path(model), *options) as server:
        for seed in range(flags.rounds):
            run = partial(stall, server.port, flags.streams, flags.tokens, seed)
            made.append(trio.run(run))
            print({name: round(value, 3) for name, value in made[-1].items()}, flush=True)
    return made


# -- the encoder beside mlx-vlm's ----------------------------------------------------------------


def play_encoder(flags: argparse.Namespace) -> list[dict[str, float]]:
    from benchmarks import models  # First: it takes OpenBLAS before MLX.

    # isort: split
    import mlx.core as mx
    import numpy as np
    from mlx_vlm.models.qwen3_vl.config import VisionConfig
    from mlx_vlm.models.qwen3_vl.vision import VisionModel

    from trouper.engine.vision.encoder import Encoding
    from trouper.engine.vision.patch_rules import PatchRules
    from trouper.engine.vision.patches import patches_of
    from trouper.engine.vision.qwen_tower import QwenTower
    from trouper.protocol.media import Pixels

    config = models.vision_config(flags.shape, 4096)
    rules = PatchRules(
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
        rescale=1 / 255,
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
    )
    ours = QwenTower({"model_type": "qwen3_vl", "vision_config": config}, rules)
    theirs = VisionModel(VisionConfig.from_dict(config))
    dtype = getattr(mx, flags.dtype)
    for tower in (ours, theirs):
        tower.set_dtype(dtype)
        mx.eval(tower.parameters())
    side = 32 * int(flags.tokens**0.5)
    rgb = np.random.RandomState(0).randint(0, 256, (side, side, 3)).astype(np.uint8)
    pixels = Pixels(side, side, rgb.tobytes())
    frames = mx.repeat(patches_of(pixels, rules).reshape(-1, 3, 1, 16 * 16), 2, axis=2)
    patches = frames.reshape(len(frames), -1).astype(dtype)
    mx.eval(patches)
    grid = mx.array([(1, side // 16, side // 16)])

    def whole() -> None:
        assert Encoding(ours, pixels).advance(10**6) is not None

    def sliced() -> None:
        encoding = Encoding(ours, pixels)
        while encoding.advance(1) is None:
            pass

    def upstream() -> None:
        mx.eval(theirs(patches, grid))

    ways = {"whole": whole, "slices": sliced, "mlx_vlm": upstream}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, float] = {}
    for _ in range(flags.rounds + 1):
        for name, way in ways.items():
            mx.reset_peak_memory()
            began = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - began)
            peaks[name] = mx.get_peak_memory() / 1e6
    tokens = (side // 32) ** 2
    made: dict[str, float] = {"tokens": tokens}
    for name, times in seconds.items():
        made[f"{name}_ms_per_1000"] = statistics.median(times[1:]) * 1e6 / tokens
        made[f"{name}_peak_mb"] = peaks[name]
    print({name: round(value, 2) for name, value in made.items()})
    return [made]


# -- memory --------------------------------------------------------------------------------------

BIG, MANY = (8192, 8192), (4000, 3000)
PER_REQUEST = 64


def photo(size: tuple[int, int], format: ImageFormat, **options: Any) -> bytes:
    """A file of at most 20 MiB."""
    small = picture(size[0] // 8, size[1] // 8)
    return encoded(small.resize(size, Image.Resampling.NEAREST), format, **options)


def url_of(data: bytes, format: str) -> str:
    return f"data:image/{format};base64,{base64.b64encode(data).decode()}"


def many_photos(request: int) -> bytes:
    """Photos of the same pixels, which bytes behind their ends make different files."""
    data = photo(MANY, "jpeg", quality=94)
    files = (data + bytes([request, number]) for number in range(PER_REQUEST))
    return question((url_of(file, "jpeg") for file in files), detail="low")


def processes(server: psutil.Process) -> dict[str, psutil.Process]:
    script = "decoding_script.py"
    [decoder] = [child for child in server.children() if script in " ".join(child.cmdline())]
    return {"server": server, "decoder": decoder}


def resident_mb(process: psutil.Process, line: str) -> float:
    """`line`: VmRSS, or VmHWM, the peak since the last `forget_peak`."""
    status = Path(f"/proc/{process.pid}/status").read_text().split(f"{line}:")[1]
    return int(status.split()[0]) * 1024 / 1e6


def forget_peak(process: psutil.Process) -> None:
    Path(f"/proc/{process.pid}/clear_refs").write_text("5")


def play_memory(flags: argparse.Namespace) -> list[dict[str, float]]:
    model = servers.random_vision_model(flags.text, flags.shape) if flags.text else flags.model
    made = []
    with servers.trouper(Path(model), "--max-image-tokens", str(flags.tokens)) as server:
        ask(server.port, question([data_url(screenshot(0, 128, 128))]))  # Starts the decoder.

        def play(name: str, *bodies: bytes) -> None:
            time.sleep(SETTLE_S)
            watched = processes(server.process)
            row: dict[str, Any] = {"name": name, "sent_mb": sum(map(len, bodies)) / 1e6}
            for who, process in watched.items():
                row[f"{who}_before"] = resident_mb(process, "VmRSS")
                forget_peak(process)
            with ThreadPoolExecutor(max(1, len(bodies))) as threads:
                row["tokens"] = sum(threads.map(partial(ask, server.port), bodies))
            row |= {f"{who}_peak": resident_mb(each, "VmHWM") for who, each in watched.items()}
            time.sleep(SETTLE_S)
            row |= {f"{who}_after": resident_mb(each, "VmRSS") for who, each in watched.items()}
            made.append(row)
            print({key: each if key == "name" else round(each) for key, each in row.items()})

        play("at rest")
        for kind in ("jpeg", "png", "webp"):
            play(f"{kind}, 64 megapixels", question([url_of(photo(BIG, kind), kind)]))
        for count in flags.requests:
            play(f"{count} with {PER_REQUEST} photos", *map(many_photos, range(count)))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(prog="just bench-images", description=__doc__)
    parser.add_argument("part", choices=("stall", "encoder", "memory"), nargs="?", default="stall")
    parser.add_argument("--model", default="examples/shapes")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096, help="of the image")
    parser.add_argument("--requests", type=int, nargs="*", default=(1,), help="memory: at a time")
    parser.add_argument("--stall-ms", type=float, default=300.0)
    parser.add_argument(
        "--shape", choices=("tiny", "wide", "2b", "8b"), default="tiny", help="of the encoder"
    )
    parser.add_argument("--text", help="stall: random weights of this shape of models.py")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    play = {"stall": play_stall, "encoder": play_encoder, "memory": play_memory}[flags.part]
    made = play(flags)
    if flags.json:
        flags.json.write_text(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
