"""ImageDecoder alone, with its real process: pixels as the processors of transformers make them,
and files that are damaged, too large, or crash a decoder."""

from __future__ import annotations

import importlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from PIL import Image, ImageOps
from trio.testing import wait_all_tasks_blocked

from tests.image_files import FORMATS, bomb, encoded, mutated, picture, png_chunk, turned
from tests.long_tests import PLAYED
from trouper.actors.image_decoder import decode_images, refuse_images
from trouper.actors.runtime.decoding_process import SCRIPT, DecodingProcess
from trouper.actors.runtime.decoding_script import (
    ANSWER,
    CPU_S,
    MEMORY_BYTES,
    NO_PILLOW,
    _allow_one_processor,
)
from trouper.protocol.installing import command_for
from trouper.protocol.media import (
    BILINEAR,
    DecodeImage,
    ImageDecoded,
    ImageFormat,
    ImageShape,
    ImageSource,
    ItemId,
    Pixels,
)

MUTANTS = 10_000 if PLAYED else 500


def order(data: bytes, height: int = 30, width: int = 40, item: int = 0) -> DecodeImage:
    source = ImageSource(data, "messages.0.content.0")
    return DecodeImage(ItemId(item), source, ImageShape((height, width), (1, 1, 1)))


@attrs.define(eq=False)
class Bench:
    orders: trio.MemorySendChannel[DecodeImage]
    heard: trio.MemoryReceiveChannel[ImageDecoded]
    process: DecodingProcess

    async def tell(self, order: DecodeImage) -> ImageDecoded:
        await self.orders.send(order)
        answer = await self.heard.receive()
        assert answer.item == order.item
        return answer

    async def pixels(self, data: bytes, height: int = 30, width: int = 40) -> np.ndarray[Any, Any]:
        return array_of((await self.tell(order(data, height, width))).pixels)

    @property
    def pid(self) -> int:
        assert self.process._process is not None
        return self.process._process.pid


@asynccontextmanager
async def decoding(process: DecodingProcess | None = None) -> AsyncIterator[Bench]:
    process = process or DecodingProcess()
    orders, taken = trio.open_memory_channel[DecodeImage](100)
    news, heard = trio.open_memory_channel[ImageDecoded](100)
    with heard:
        async with trio.open_nursery() as nursery:
            with orders:
                nursery.start_soon(decode_images, taken, news, process)
                yield Bench(orders, heard, process)
    assert process._process is None


def array_of(pixels: Pixels | None) -> np.ndarray[Any, Any]:
    assert pixels is not None
    return np.frombuffer(pixels.rgb, np.uint8).reshape(pixels.height, pixels.width, 3)


def expected(image: Image.Image, height: int = 30, width: int = 40) -> np.ndarray[Any, Any]:
    return np.array(image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC))


def opened(data: bytes) -> Image.Image:
    image: Image.Image = Image.open(io.BytesIO(data))
    image.load()
    return image


# -- pixels --------------------------------------------------------------------------------------


async def test_black_fills_an_image_up_and_an_overview_follows() -> None:
    image = picture(101, 67)
    shape = ImageShape((60, 80), (1, 1, 1), (3, 4), scaled=(50, 80), overview=(20, 30), resample=2)
    data = encoded(image, "png")
    async with decoding() as bench:
        answer = await bench.tell(attrs.evolve(order(data), shape=shape))
    pixels = array_of(answer.pixels)
    resized = opened(data).convert("RGB").resize((80, 50), Image.Resampling.BILINEAR)
    assert (pixels[:50] == np.array(resized)).all()
    assert pixels.shape == (60, 80, 3)
    assert not pixels[50:].any()
    assert answer.pixels is not None
    smaller = opened(data).convert("RGB").resize((30, 20), Image.Resampling.BILINEAR)
    assert (array_of(answer.pixels.overview) == np.array(smaller)).all()


@pytest.mark.parametrize("format", FORMATS)
async def test_an_image_is_decoded_and_resized(format: ImageFormat) -> None:
    data = encoded(picture(101, 67), format)
    async with decoding() as bench:
        answer = await bench.tell(order(data, 56, 84, item=7))
    assert answer.item == 7
    assert answer.fault == ""
    assert answer.seconds > 0
    assert (array_of(answer.pixels) == expected(opened(data), 56, 84)).all()


async def test_pixels_are_those_of_gemma_3s_processor_of_transformers() -> None:
    module = importlib.import_module("transformers.models.gemma3.image_processing_pil_gemma3")
    size = {"height": 56, "width": 56}
    processor = module.Gemma3ImageProcessorPil(size=size, do_normalize=False, do_rescale=False)
    image = picture(211, 133)
    theirs = processor(images=image, return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)
    shape = ImageShape((56, 56), (1, 1, 1), resample=BILINEAR)
    async with decoding() as bench:
        ordered = order(encoded(image, "png"), 56, 56)
        answer = await bench.tell(attrs.evolve(ordered, shape=shape))
    assert (array_of(answer.pixels) == theirs).all()


async def test_pixels_are_those_of_qwens_processor_of_transformers() -> None:
    module = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    processor = module.Qwen2VLImageProcessorPil(patch_size=16, do_normalize=False, do_rescale=False)
    image = picture(211, 133)
    decoded = processor(images=image, return_tensors="np")
    _, rows, columns = decoded["image_grid_thw"][0].tolist()
    patches = decoded["pixel_values"].reshape(rows // 2, columns // 2, 2, 2, 3, 2, 16, 16)[
        ..., 0, :, :
    ]
    theirs = patches.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * 16, columns * 16, 3)
    async with decoding() as bench:
        ours = await bench.pixels(encoded(image, "png"), rows * 16, columns * 16)
    assert (ours == theirs).all()


async def test_pixels_are_those_of_pixtrals_processor_of_transformers() -> None:
    module = importlib.import_module("transformers.models.pixtral.image_processing_pil_pixtral")
    processor = module.PixtralImageProcessorPil(do_normalize=False, do_rescale=False)
    image = picture(211, 133)
    theirs = processor(images=image, return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)
    async with decoding() as bench:
        ours = await bench.pixels(encoded(image, "png"), *theirs.shape[:2])
    assert (ours == theirs).all()


@pytest.mark.parametrize("format", ["png", "jpeg", "webp", "avif"])
async def test_every_orientation_is_applied(format: ImageFormat) -> None:
    async with decoding() as bench:
        for orientation in range(1, 9):
            data = encoded(picture(40, 30), format, exif=turned(orientation))
            upright = ImageOps.exif_transpose(opened(data))
            height, width = upright.height, upright.width
            decoded = await bench.pixels(data, height, width)
            assert (decoded == expected(upright, height, width)).all(), orientation


async def test_an_orientation_behind_the_pixels_is_not_applied() -> None:
    plain = encoded(picture(40, 30), "png")
    late = plain[:-12] + png_chunk(b"eXIf", turned(6).removeprefix(b"Exif\0\0")) + plain[-12:]
    async with decoding() as bench:
        assert (await bench.pixels(late) == expected(picture(40, 30))).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
async def test_what_is_transparent_is_white(mode: str) -> None:
    image = Image.new("RGBA", (40, 30), (255, 0, 0, 0))
    image.paste((0, 0, 255, 255), (0, 0, 20, 30))
    of_mode = image.quantize() if mode == "P" else image.convert(mode)
    async with decoding() as bench:
        decoded = await bench.pixels(encoded(of_mode, "png"))
    assert (decoded[:, 35] == 255).all()
    assert (decoded[:, 5] < 255).any()


async def test_half_transparent_is_half_white() -> None:
    async with decoding() as bench:
        decoded = await bench.pixels(encoded(Image.new("RGBA", (40, 30), (0, 0, 0, 127)), "png"))
    assert (decoded == 128).all()


async def test_the_transparent_color_of_a_palette_is_white() -> None:
    image = Image.new("P", (40, 30), 1)
    image.putpalette([0, 0, 0, 255, 0, 0])
    async with decoding() as bench:
        assert (await bench.pixels(encoded(image, "gif", transparency=1)) == 255).all()
        assert (await bench.pixels(encoded(image, "gif")) == (255, 0, 0)).all()


async def test_cmyk_becomes_rgb() -> None:
    data = encoded(Image.new("CMYK", (40, 30), (0, 255, 255, 0)), "jpeg", quality=95)
    async with decoding() as bench:
        decoded = await bench.pixels(data)
    assert np.abs(decoded.astype(int) - (255, 0, 0)).max() < 8


@pytest.mark.parametrize("value", [0, 255, 256, 0x8000, 0xFFFF])
async def test_grey_of_16_bits_keeps_its_high_byte(value: int) -> None:
    grey = Image.fromarray(np.full((30, 40), value, np.uint16))
    async with decoding() as bench:
        assert (await bench.pixels(encoded(grey, "png")) == value >> 8).all()


@pytest.mark.parametrize("format", ["png", "gif", "webp", "avif"])
async def test_the_first_frame_of_an_animation_is_shown(format: ImageFormat) -> None:
    frames = [Image.new("RGB", (40, 30), color) for color in ("red", "blue", "lime")]
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:])
    async with decoding() as bench:
        decoded = await bench.pixels(data)
    assert np.abs(decoded.astype(int) - (255, 0, 0)).max() < 8


@pytest.mark.parametrize("format", FORMATS)
async def test_one_pixel_is_enough(format: ImageFormat) -> None:
    async with decoding() as bench:
        decoded = await bench.pixels(encoded(Image.new("RGB", (1, 1), "red"), format), 32, 32)
    assert np.abs(decoded.astype(int) - (255, 0, 0)).max() < 8


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts threads as memory")
def test_avif_is_opened_for_one_thread_and_processors_come_back() -> None:
    data, allowed = encoded(picture(640, 480), "avif"), os.sched_getaffinity(0)
    if len(allowed) == 1:
        pytest.skip("Pillow starts no threads on one processor")

    def count_threads(opened: AbstractContextManager[None]) -> int:
        with opened:
            image = Image.open(io.BytesIO(data))
        image.load()
        return len(list(Path("/proc/self/task").iterdir()))

    before = count_threads(_allow_one_processor())
    assert count_threads(nullcontext()) > before, "threads are seen"
    assert os.sched_getaffinity(0) == allowed


async def test_the_longest_image_is_decoded() -> None:
    async with decoding() as bench:
        decoded = await bench.pixels(encoded(picture(16_384, 82), "png"), 28, 1540)
    assert decoded.shape == (28, 1540, 3)


# -- refusals ------------------------------------------------------------------------------------


async def test_damaged_images_cost_their_own_request() -> None:
    good = encoded(picture(40, 30), "png")
    async with decoding() as bench:
        await bench.pixels(good)
        pid = bench.pid
        for data in (good[: len(good) // 2], good[:60] + b"\0" * 50 + good[110:]):
            answer = await bench.tell(order(data))
            assert (answer.pixels, answer.code) == (None, "image_damaged")
            assert answer.fault == "the image is damaged: it cannot be decoded"
            assert answer.seconds > 0
        assert (await bench.pixels(good)).shape == (30, 40, 3)
        assert bench.pid == pid


async def test_an_image_of_another_size_than_its_header_says_is_damaged() -> None:
    data = bytearray(encoded(picture(40, 30), "gif"))
    data[6:10] = b"\x0a\0\x0a\0"
    async with decoding() as bench:
        answer = await bench.tell(order(bytes(data)))
    assert (answer.pixels, answer.code) == (None, "image_damaged")


async def test_bombs_are_refused_by_their_header() -> None:
    data = bomb(20_000, 20_000)
    assert len(data) < 100_000
    async with decoding() as bench:
        answer = await bench.tell(order(data))
        assert answer.code == "image_too_large"
        assert bench.process._process is None, "no process was needed"


async def test_the_largest_image_fits_and_is_resized() -> None:
    async with decoding() as bench:
        answer = await bench.tell(order(bomb(8192, 8192), 32, 32))
    assert (array_of(answer.pixels) == 0).all()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc has the peak")
async def test_a_photo_is_decoded_without_a_copy() -> None:
    """Pillow takes 4 bytes for a pixel."""
    side = 4096
    async with decoding() as bench:
        await bench.pixels(encoded(picture(40, 30), "png"))
        before = peak_bytes(bench.pid)
        pixels = await bench.pixels(encoded(Image.new("RGB", (side, side), "red"), "png"), 32, 32)
        assert (pixels == (255, 0, 0)).all()
        assert peak_bytes(bench.pid) - before < 1.5 * 4 * side**2


def peak_bytes(pid: int) -> int:
    """Of resident memory."""
    line = Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1]
    return int(line.split()[0]) * 1024


async def test_a_decoder_without_memory_refuses_the_image(tmp_path: Path) -> None:
    script = SCRIPT.read_text().replace("MEMORY_BYTES = 2 * 2**30", "MEMORY_BYTES = 128 * 2**20")
    (tmp_path / "script.py").write_text(script)
    async with decoding(DecodingProcess(tmp_path / "script.py")) as bench:
        answer = await bench.tell(order(encoded(picture(40, 30), "png")))
        assert answer.fault == ""
        answer = await bench.tell(order(bomb(8192, 8192), 32, 32))
        assert answer.code == "image_too_large"
        assert (await bench.pixels(encoded(picture(40, 30), "png"))).shape == (30, 40, 3)


# -- crashes -------------------------------------------------------------------------------------

FAULTY = f"""
import os, signal, sys, time
sys.path.insert(0, {str(SCRIPT.parent)!r})
import decoding_script as script
real = script._decode

def _decode(data, format, size):
    if size == (13, 13):
        {{fault}}
    return real(data, format, size)

script._decode = _decode
script.main()
"""
FAULTS = {
    "segfault": "os.kill(os.getpid(), signal.SIGSEGV)",
    "abort": "os.abort()",
    "hang": "time.sleep(1000)",
    "loop": "while True: pass",
    "exit": "os._exit(0)",
    "other pixels": "os.write(1, script.ANSWER.pack(script.DECODED, 2**32 - 1))",
    "no answer": "os.write(1, script.ANSWER.pack(99, 0))",
}


def faulty(tmp_path: Path, fault: str, wait_s: float = 60) -> DecodingProcess:
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY.format(fault=FAULTS[fault]))
    return DecodingProcess(script, wait_s)


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "loop"])
async def test_a_crash_costs_one_request(tmp_path: Path, fault: str) -> None:
    good, bad = encoded(picture(40, 30), "png"), encoded(picture(13, 13), "png")
    process = faulty(tmp_path, fault, wait_s=2 if fault == "hang" else 60)
    async with decoding(process) as bench:
        await bench.pixels(good)
        pid = bench.pid
        for sent in (order(good, item=1), order(bad, item=2), order(good, item=3)):
            await bench.orders.send(sent)
        answers = [await bench.heard.receive() for _ in range(3)]
        assert bench.pid != pid
    assert [answer.item for answer in answers] == [1, 2, 3]
    assert [answer.code for answer in answers if answer.pixels is None] == ["image_crashes_decoder"]
    assert answers[1].fault == (
        "the image crashes its decoder, or takes more than 10 s to decode; convert it to another "
        "format"
    )


@pytest.mark.long
async def test_the_system_ends_an_endless_decode(tmp_path: Path) -> None:
    async with decoding(faulty(tmp_path, "loop")) as bench:
        answer = await bench.tell(order(encoded(picture(13, 13), "png")))
    assert answer.code == "image_crashes_decoder"


async def test_a_process_ended_from_outside_is_no_fault_of_the_image() -> None:
    good = encoded(picture(40, 30), "png")
    async with decoding() as bench, trio.open_nursery() as nursery:
        await bench.pixels(good)
        os.kill(bench.pid, signal.SIGSTOP)

        async def ask() -> None:
            answer = await bench.tell(order(good))
            assert answer.code == "image_decoder_unavailable"
            assert "ended from outside; send it again" in answer.fault
            assert (await bench.pixels(good)).shape == (30, 40, 3)

        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        os.kill(bench.pid, signal.SIGKILL)


async def test_a_process_ended_between_two_images_costs_no_request() -> None:
    """Found by chaos (seed 19)."""
    good = encoded(picture(40, 30), "png")
    async with decoding() as bench:
        await bench.pixels(good)
        os.kill(bench.pid, signal.SIGKILL)
        await trio.to_thread.run_sync(os.waitid, os.P_PID, bench.pid, os.WEXITED | os.WNOWAIT)
        assert (await bench.pixels(good)).shape == (30, 40, 3)


async def test_without_pillow_one_line_says_what_to_install(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys; sys.stdout.buffer.write({ANSWER.pack(NO_PILLOW, 0)!r})")
    async with decoding(DecodingProcess(script)) as bench:
        answer = await bench.tell(order(encoded(picture(40, 30), "png")))
    assert answer.code == "image_decoder_unavailable"
    assert answer.fault == (
        f"the server needs Pillow for images, which is not installed: `{command_for('images')}`"
    )


def test_the_script_says_that_pillow_is_missing() -> None:
    without = [sys.executable, "-S", str(SCRIPT)]
    output = subprocess.run(without, input=b"", capture_output=True, check=True).stdout
    assert ANSWER.unpack(output) == (NO_PILLOW, 0)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            BlockingIOError(11, "no more processes"),
            "cannot be started for the moment; send it again",
        ),
        (RuntimeError("can't start new thread"), "cannot be started for the moment; send it again"),
        (PermissionError(13, "not allowed"), "cannot be started"),
    ],
    ids=str,
)
async def test_a_process_that_does_not_start_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    async def refuse(*arguments: object, **options: object) -> None:
        raise error

    good = encoded(picture(40, 30), "png")
    async with decoding() as bench:
        with monkeypatch.context() as patched:
            patched.setattr(trio.lowlevel, "open_process", refuse)
            answer = await bench.tell(order(good))
        assert answer.code == "image_decoder_unavailable"
        assert answer.fault == f"the process that decodes images {reason}"
        assert (await bench.pixels(good)).shape == (30, 40, 3)


async def test_a_script_that_ends_at_once_is_no_decoder(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    async with decoding(DecodingProcess(tmp_path / "script.py")) as bench:
        answer = await bench.tell(order(encoded(picture(40, 30), "png")))
    assert answer.code == "image_decoder_unavailable"


async def test_no_process_runs_before_the_first_image_and_after_the_actor() -> None:
    async with decoding() as bench:
        await trio.testing.wait_all_tasks_blocked()
        assert bench.process._process is None
        await bench.pixels(encoded(picture(40, 30), "png"))
        pid = bench.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_cancelled_actor_leaves_no_process() -> None:
    process = DecodingProcess()
    orders, taken = trio.open_memory_channel[DecodeImage](1)
    news, heard = trio.open_memory_channel[ImageDecoded](1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(decode_images, taken, news, process)
        await orders.send(order(encoded(picture(40, 30), "png")))
        await heard.receive()
        assert process._process is not None
        pid = process._process.pid
        nursery.cancel_scope.cancel()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_an_order_is_answered_also_when_the_actor_crashes() -> None:
    class Broken(DecodingProcess):
        async def decode(self, order: DecodeImage) -> Pixels:
            await trio.lowlevel.checkpoint()
            raise AssertionError("a bug")

    orders, taken = trio.open_memory_channel[DecodeImage](1)
    news, heard = trio.open_memory_channel[ImageDecoded](1)
    await orders.send(order(b"", item=5))
    with pytest.raises(AssertionError, match="a bug"):
        await decode_images(taken, news, Broken())
    answer = heard.receive_nowait()
    assert (answer.item, answer.pixels, answer.code) == (5, None, "image_decoder_unavailable")


async def test_orders_without_an_actor_are_refused() -> None:
    orders, taken = trio.open_memory_channel[DecodeImage](2)
    news, heard = trio.open_memory_channel[ImageDecoded](2)
    with orders:
        for item in (1, 2):
            await orders.send(order(b"", item=item))
    await refuse_images(taken, news)
    answers = [heard.receive_nowait() for _ in range(2)]
    assert [answer.item for answer in answers] == [1, 2]
    assert {answer.code for answer in answers} == {"image_decoder_unavailable"}


async def test_others_get_turns_while_an_image_is_decoded() -> None:
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with decoding() as bench, trio.open_nursery() as nursery:
        nursery.start_soon(take_turns)
        await bench.pixels(encoded(picture(2000, 1500), "png"), 1024, 1536)
        nursery.cancel_scope.cancel()
    assert turns > 100


# -- abuse ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
async def test_mutated_files_are_decoded_or_refused(format: ImageFormat) -> None:
    """None ends the process or the actor."""
    options = {} if format in ("gif", "bmp") else {"exif": turned(3)}
    data = encoded(picture(40, 30), format, **options)
    codes = set[str]()
    async with decoding() as bench:
        await bench.pixels(data)
        pid = bench.pid
        for mutant in mutated(data, MUTANTS, seed=2):
            answer = await bench.tell(order(mutant))
            codes.add("" if answer.pixels else answer.code)
        assert bench.pid == pid
    assert codes <= {"", "image_damaged", "image_format", "image_too_large"}
    assert {"", "image_damaged"} <= codes


def test_limits_of_the_script_hold() -> None:
    """The process dumps no core, and has less memory and time than the server."""
    program = f"""
import io, resource, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import decoding_script
decoding_script.serve = lambda inbox, outbox: decoding_script._limit_cpu()
decoding_script.main()
for kind in (resource.RLIMIT_CORE, resource.RLIMIT_CPU, resource.RLIMIT_AS):
    print(resource.getrlimit(kind)[0])
"""
    command = [sys.executable, "-c", program]
    output = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    core, cpu_s, memory = map(int, output.split())
    assert core == 0
    assert CPU_S <= cpu_s <= CPU_S + 3
    assert sys.platform != "linux" or memory == MEMORY_BYTES
