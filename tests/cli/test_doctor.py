"""`trouper doctor`: each thing that can be wrong is found, says so in a line of its own, and names
a remedy."""

from __future__ import annotations

import errno
import json
import resource
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.families import save
from tests.owners import give_away
from trouper import ServerSettings, Settings, cli
from trouper.cli import doctor_checks
from trouper.cli.address import cannot_listen
from trouper.cli.commands import doctor
from trouper.cli.doctor_checks import CheckedSettings, Finding
from trouper.cli.exits import USAGE_ERROR
from trouper.engine import probe
from trouper.engine.architectures.architecture_lookup import Architecture
from trouper.engine.loading import bundled_model
from trouper.protocol.installing import command_for
from trouper.storage.file_operations import Disk


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(doctor_checks, "PROBE_BYTES", doctor_checks.PIECE_BYTES)
    monkeypatch.setattr(probe, "PRODUCT_SIZE", 64)


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    return str(save("llama", tmp_path / "tiny"))


def plan(**given: Any) -> CheckedSettings:
    names = {name for name in given if hasattr(Settings(), name)}
    of_server = {name: value for name, value in given.items() if name not in names}
    return CheckedSettings(
        [Settings(**{name: given[name] for name in names})], ServerSettings(**of_server)
    )


def one(found: Iterator[Finding]) -> Finding:
    [finding] = found
    assert bool(finding.remedy) == (finding.level != "ok"), (
        "a remedy where there is something to mend"
    )
    return finding


def run(*arguments: str) -> tuple[int, list[dict[str, str]]]:
    outcome = CliRunner().invoke(cli.main, ["doctor", "--json", *arguments])
    return outcome.exit_code, json.loads(outcome.stdout)


def test_a_machine_that_will_do(tiny: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every subject has a line; what is only slow today is no failure."""
    Path("trouper.toml").write_text(f"model = '{tiny}'\nssd-cache-dir = '{tmp_path}/blocks'")
    code, found = run("--config", "trouper.toml", "--port", "0")
    assert code == 0
    assert list(dict.fromkeys(finding["subject"] for finding in found)) == list(
        doctor_checks.CHECKS
    )
    assert "fail" not in {finding["level"] for finding in found}
    assert "of trouper.toml" in {finding["said"] for finding in found}
    assert not (tmp_path / "blocks").exists(), "a doctor changes nothing"


def test_a_port_that_is_taken_fails(tiny: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = str(listening.getsockname()[1])
        outcome = CliRunner().invoke(
            cli.main, ["doctor", "--port", port, "--model", tiny, "--no-ssd"]
        )
    assert outcome.exit_code == doctor.FAILED
    [line] = [line for line in outcome.output.splitlines() if line.startswith("fail")]
    assert "port" in line and "Address already in use" in line
    assert f"-> or see who is there: trouper top --url http://127.0.0.1:{port}" in outcome.output


@pytest.mark.parametrize(
    ("host", "remedy"),
    [
        ("0.0.0.0", "or see who is there: trouper top --url http://127.0.0.1:8000"),
        ("::1", "or see who is there: trouper top --url http://[::1]:8000"),
    ],
)
def test_who_is_there_is_asked_at_an_address(
    host: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(*_: object) -> None:
        raise cannot_listen(host, 8000, OSError(errno.EADDRINUSE, "Address already in use"))

    monkeypatch.setattr(doctor_checks, "require_address", taken)
    assert one(doctor_checks.port(plan(host=host, allow_no_key=True))).remedy == remedy


def test_a_host_that_is_none_has_a_remedy_of_its_own() -> None:
    finding = one(doctor_checks.port(plan(host="nowhere.invalid", allow_no_key=True)))
    assert (finding.level, finding.remedy) == ("fail", "give an address of this machine as --host")


def test_settings_that_cannot_be_are_refused_as_by_serve() -> None:
    outcome = CliRunner().invoke(cli.main, ["doctor", "--kv-bits", "7"])
    assert (outcome.exit_code, outcome.stderr) == (
        USAGE_ERROR,
        "trouper: --kv-bits must be 8, 4 or 0, not 7\n",
    )


@pytest.mark.parametrize("flag", ["--batch-dir", "--ssd-cache-dir"])
def test_an_empty_directory_name_is_refused(flag: str) -> None:
    """Found by use: an unset variable of a script let files and batches go into the current
    directory."""
    outcome = CliRunner().invoke(cli.main, ["doctor", flag, "", "--port", "0"])
    assert outcome.exit_code == USAGE_ERROR
    assert outcome.stderr.startswith(f"trouper: {flag}: it is empty; give a path"), outcome.stderr


def test_a_check_that_breaks_is_a_finding() -> None:
    def broken(_: CheckedSettings) -> Iterator[Finding]:
        yield Finding("ok", "so far")
        raise RuntimeError("no,\n  never")

    checks = {"it": broken, "port": doctor_checks.port}
    found = [
        (subject, finding.level, finding.message)
        for subject, finding in doctor.examined(plan(port=0), checks)
    ]
    assert found == [
        ("it", "ok", "so far"),
        ("it", "fail", "RuntimeError: no, never"),
        ("port", "ok", "any free port of 127.0.0.1"),
    ]


def device(**facts: Any) -> probe.Device:
    known: dict[str, Any] = {"name": "x", "is_cpu": True, "memory_bytes": 10**9, "fast_blas": None}
    return probe.Device(**known | facts)


@pytest.mark.parametrize(
    ("facts", "gflops", "nvidia", "levels", "remedy"),
    [
        ({}, 200.0, False, ["ok", "ok"], ""),
        ({}, 2.0, False, ["ok", "warn"], command_for("cpu")),
        (
            {"fast_blas": Path("lib/openblas.so")},
            2.0,
            False,
            ["ok", "warn"],
            "OPENBLAS_NUM_THREADS",
        ),
        ({}, 200.0, True, ["warn", "ok"], command_for("cuda")),
        ({"is_cpu": False}, 2.0, True, ["ok", "ok"], ""),
    ],
)
def test_the_device(
    *,
    facts: dict[str, Any],
    gflops: float,
    nvidia: bool,
    levels: list[str],
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(probe, "device_stats", lambda: device(**facts))
    monkeypatch.setattr(probe, "product_gflops", lambda: gflops)
    monkeypatch.setattr(doctor_checks, "NVIDIA", tmp_path if nvidia else tmp_path / "none")
    found = list(doctor_checks.device(plan()))
    assert [finding.level for finding in found] == levels
    assert remedy in "".join(finding.remedy for finding in found)


def test_products_are_measured() -> None:
    assert 0.001 < probe.product_gflops() < 1e6


@pytest.mark.parametrize(
    ("free", "level"), [(None, "ok"), (9 * 10**8, "ok"), (10**8, "warn"), (10**12, "ok")]
)
def test_memory(free: int | None, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "device_stats", device)
    monkeypatch.setattr(doctor_checks, "_free_memory", lambda: free)
    finding = one(doctor_checks.memory(plan()))
    assert finding.level == level
    assert "1.0 GB" in finding.message


@pytest.mark.parametrize(
    ("memory_bytes", "level", "said"),
    [
        (10**12, "ok", "are left, for keys and values of"),
        (2 * 10**6, "warn", "are left"),
        (10**5, "fail", "more than"),
    ],
)
def test_whether_the_model_fits(
    tiny: str, memory_bytes: int, level: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "device_stats", lambda: device(memory_bytes=memory_bytes))
    finding = one(doctor_checks.model(plan(model=tiny)))
    assert (finding.level, said in finding.message) == (level, True), finding


def test_what_the_model_weighs_is_what_it_will_weigh(tiny: str) -> None:
    from trouper.engine.loading.model_loading import load

    card = load(Settings(model=tiny, no_ssd=True), lambda _: None).card
    fit = probe.fit(Settings(model=tiny))
    assert (fit.weights_bytes, fit.token_bytes) == (card.weights_bytes, card.kv.token_bytes)


def test_the_self_check_of_a_packages_architecture_is_recalled(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trouper.engine.loading.model_loading import load

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(Architecture, "identity", property(lambda _: "a-package 1.0"))
    settings = Settings(model=tiny, no_ssd=True)
    load(settings, lambda _: None)
    assert probe.checked(settings) is not None


def test_a_model_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    finding = one(doctor_checks.model(plan(model=str(tmp_path / "empty"))))
    assert (finding.level, "has no config.json" in finding.message) == ("fail", True)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("/nope", "no such directory, and not a hub id"),
        ("nope", "no such directory, and not a hub id"),
        ("owner/-name", "not a hub id"),
    ],
)
def test_what_serve_would_refuse_is_no_download(model: str, said: str) -> None:
    finding = one(doctor_checks.model(plan(model=model)))
    assert (finding.level, said in finding.message, "\n" in finding.message) == (
        "fail",
        True,
        False,
    )


def test_weights_that_make_no_model_are_one_line(tiny: str) -> None:
    config = Path(tiny) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 1}))
    finding = one(doctor_checks.model(plan(model=tiny)))
    assert (finding.level, "do not make a model" in finding.message, "\n" in finding.message) == (
        "fail",
        True,
        False,
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"adapter": ("sql=/nope",)}, "--adapter sql=/nope has no adapter"),
        ({"draft_model": "/nope"}, "--draft-model /nope: no such directory, and not a hub id"),
        (
            {"speculation": "mtp"},
            "has no usable MTP head: its checkpoint has none; say --speculation auto",
        ),
    ],
)
def test_what_a_model_is_served_with_is_looked_at(
    tiny: str, given: dict[str, Any], said: str
) -> None:
    """Found by use: all was well, and the start with the same flags was refused."""
    finding = one(doctor_checks.model(plan(model=tiny, **given)))
    assert finding.level == "fail" and said in finding.message


def test_a_draft_model_that_is_here_is_looked_at_and_another_is_to_come(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert one(doctor_checks.model(plan(model=tiny, draft_model=tiny))).level == "ok"
    [ok, coming] = doctor_checks.model(plan(model=tiny, draft_model="owner/not-here"))
    assert (ok.level, coming.level) == ("ok", "warn")
    assert coming.message == "owner/not-here (--draft-model) is not here yet"


def test_a_draft_model_whose_rows_cannot_draft_fails(tiny: str, tmp_path: Path) -> None:
    windowed = str(save("gemma3_text", tmp_path / "windowed"))
    finding = one(doctor_checks.model(plan(model=tiny, draft_model=windowed)))
    assert (
        finding.level == "fail"
        and "cannot draft in the batch: it has sliding windows" in finding.message
    )


@pytest.mark.parametrize(
    ("kv_memory", "said"),
    [(10**6, "for keys and values of 976 tokens"), (1000, "for keys and values of 0 tokens")],
)
def test_a_limit_on_keys_and_values_counts(
    tiny: str, kv_memory: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by use: there was room for 481,996 tokens, and the server with the same flags answered
    no request."""
    monkeypatch.setattr(probe, "device_stats", lambda: device(memory_bytes=10**12))
    assert probe.fit(Settings(model=tiny)).token_bytes == 1024
    finding = one(doctor_checks.model(plan(model=tiny, kv_memory=kv_memory)))
    assert (finding.level, said in finding.message) == ("warn", True), finding
    assert "--kv-memory" in finding.message and "--kv-memory" in finding.remedy


def test_a_model_without_a_tokenizer_fails(tiny: str) -> None:
    for file in Path(tiny).glob("tokenizer*"):
        file.unlink()
    finding = one(doctor_checks.model(plan(model=tiny)))
    assert finding.level == "fail" and "tokenizer" in finding.message


def test_an_adapter_that_is_none(tiny: str, tmp_path: Path) -> None:
    finding = one(doctor_checks.model(plan(model=tiny, adapter_path="/nope")))
    assert (finding.level, finding.message) == ("fail", "--adapter-path /nope: no such directory")
    assert "adapter_config.json" in finding.remedy
    for name in ("adapter_config.json", "adapters.safetensors"):
        (tmp_path / name).touch()
    finding = one(doctor_checks.model(plan(model=tiny, adapter_path=str(tmp_path))))
    assert finding.level == "fail", "files without content are no adapter"
    assert "adapter_config.json" in finding.message


def test_the_embedded_model_needs_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled_model, "PACKAGE", "no_such_package")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert one(doctor_checks.model(plan())).level == "warn"
    (tmp_path / "cache").touch()
    finding = one(doctor_checks.model(plan()))
    assert (finding.level, finding.remedy.split()[:2]) == ("fail", ["set", "XDG_CACHE_HOME"])


def test_a_model_that_is_still_on_the_hub() -> None:
    finding = one(doctor_checks.model(plan(model="nobody/has-this")))
    assert (finding.level, finding.message) == ("warn", "nobody/has-this is not here yet")


def test_several_models_have_a_line_each(tiny: str) -> None:
    both = CheckedSettings(
        [Settings(model=tiny), Settings(model="nobody/has-this")], ServerSettings()
    )
    assert [finding.level for finding in doctor_checks.model(both)] == ["ok", "warn"]


def test_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = plan(ssd_cache_dir=tmp_path / "not" / "yet")
    monkeypatch.setattr(
        doctor_checks, "measure_disk", lambda _: doctor_checks.DiskSpeed(write=1e9, read=2e9)
    )
    free, measured = doctor_checks.disk(here)
    assert (free.level, measured.message) == ("ok", "reads 2.0 GB/s, writes 1.0 GB/s")
    monkeypatch.setattr(Disk, "free_bytes", lambda *_: 10**9)
    monkeypatch.setattr(
        doctor_checks, "measure_disk", lambda _: doctor_checks.DiskSpeed(write=1e9, read=1e8)
    )
    assert [finding.level for finding in doctor_checks.disk(here)] == ["warn", "warn"]
    assert one(doctor_checks.disk(plan(no_ssd=True))).message == "--no-ssd: nothing is kept on disk"


def test_a_disk_that_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> doctor_checks.DiskSpeed:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor_checks, "measure_disk", refuse)
    finding = one(doctor_checks.disk(plan(ssd_cache_dir=tmp_path)))
    assert (finding.level, "Permission denied" in finding.message) == ("warn", True), (
        "serve goes on without it"
    )


def test_a_cache_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    finding = one(doctor_checks.disk(plan(ssd_cache_dir=tmp_path / "file" / "a" / "b")))
    assert (finding.level, "Not a directory" in finding.message) == ("warn", True)


def test_the_directory_of_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by use: with a --batch-dir that takes no file all was well, and every upload was
    refused."""
    here = plan(batch_dir=tmp_path / "not" / "yet")
    finding = one(doctor_checks.batches(here))
    assert (finding.level, finding.message.endswith(f" free for {tmp_path}/not/yet")) == (
        "ok",
        True,
    ), finding
    assert list(tmp_path.iterdir()) == [], "a doctor changes nothing"
    assert one(doctor_checks.batches(plan(no_batches=True))).message.startswith("--no-batches: ")
    (tmp_path / "file").touch()
    read_only = Path("/proc" if Path("/proc").is_dir() else "/System")  # Also for root.
    for directory in (tmp_path / "file", tmp_path / "file" / "below", read_only / "batches"):
        finding = one(doctor_checks.batches(plan(batch_dir=directory)))
        assert (finding.level, str(directory) in finding.message) == ("warn", True)
        assert "uploads" in finding.message and "--batch-dir" in finding.remedy
    monkeypatch.setattr(Disk, "free_bytes", lambda *_: 10**6)
    finding = one(doctor_checks.batches(here))
    assert (finding.level, "--max-file-bytes" in finding.message) == ("warn", True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_under_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115 - the check closes it
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: full)
    finding = one(doctor_checks.batches(plan(batch_dir=tmp_path)))
    assert (finding.level, "No space left on device" in finding.message) == ("warn", True)


def test_measuring_a_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    measured = doctor_checks.measure_disk(tmp_path)
    assert measured.read > 0 and measured.write > 0
    assert list(tmp_path.iterdir()) == []


def test_keys(tmp_path: Path) -> None:
    (tmp_path / "none").touch()
    assert one(doctor_checks.keys(plan())).message == "no key; only this machine is let in"
    assert one(doctor_checks.keys(plan(api_key=("a",)))).message == "clients need a key"
    assert one(doctor_checks.keys(plan(host="0.0.0.0", allow_no_key=True))).level == "warn"
    assert (
        one(doctor_checks.keys(plan(api_key_file=tmp_path / "none"))).remedy
        == "write one key a line into that file"
    )
    assert (
        one(doctor_checks.keys(plan(api_key=("",)))).remedy
        == "give another --api-key, or leave the flag out"
    )


def test_a_key_file_of_somebody_else_is_given_to_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "the keys"
    file.write_text("sk-1\n")
    give_away(file, monkeypatch)
    finding = one(doctor_checks.keys(plan(api_key_file=file)))
    assert f"{file}: it belongs to the user" in finding.message
    assert finding.remedy == f"sudo chown \"$(id -un)\" '{file}'; sudo chmod 600 '{file}'"


def test_web_pages() -> None:
    assert one(doctor_checks.pages(plan())).message == "none but the server's own"
    named = one(doctor_checks.pages(plan(cors_origins="http://a,http://b:1")))
    assert (named.level, named.message) == ("ok", "pages of http://a, http://b:1 may use the model")
    assert one(doctor_checks.pages(plan(cors_origins="*"))).level == "warn"
    assert one(doctor_checks.pages(plan(allowed_hosts="*"))).level == "warn"
    assert len([*doctor_checks.pages(plan(allowed_hosts="*", cors_origins="*"))]) == 2
    assert (
        one(doctor_checks.pages(plan(allowed_hosts="*", cors_origins="*", api_key=("a",)))).level
        == "ok"
    )


def test_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    monkeypatch.setattr(doctor_checks, "other_files", lambda: 100)
    finding = one(doctor_checks.files(plan()))
    assert (finding.level, finding.remedy) == (
        "warn",
        "ulimit -n 1100, or a lower --max-connections",
    )
    assert one(doctor_checks.files(plan(max_connections=100))).level == "ok"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 10**6))
    assert one(doctor_checks.files(plan())).level == "ok", "a server raises the soft limit"


def test_a_variable_that_reaches_nobody(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong flag is an error; a wrong variable would be silence. Others' variables are theirs."""
    for name in (
        "TROUPER_MAX_BATCHSIZE",
        "TROUPER_EXTRA",
        "TROUPER_URL",
        "TROUPER_PORT",
        "MAX_BATCH_SIZE",
    ):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(doctor, "CHECKS", {"settings": doctor_checks.settings})
    code, [_, found] = run("--model", tiny)
    assert code == 0
    assert found["said"] == "TROUPER_MAX_BATCHSIZE is no variable of trouper and has no effect"
    assert found["remedy"] == "use TROUPER_MAX_BATCH_SIZE, or unset it"


def test_a_model_that_reads_images(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = plan(model=tiny)
    assert one(doctor_checks.model(checked)).level == "ok"
    monkeypatch.setattr(probe, "reads_images", lambda _: True)
    assert [*doctor_checks.model(checked)][1] == Finding("ok", "images: yes")
    monkeypatch.setattr(doctor_checks, "find_spec", lambda _: None)
    assert [*doctor_checks.model(checked)][1].remedy == command_for("images")
