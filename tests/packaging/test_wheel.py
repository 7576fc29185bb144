"""The wheel, without downloads: what it holds, and that it serves from where it was installed.

`just test-wheel` does the same by plain pip, with all dependencies, on each Python.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import trouper
from tests.families import save
from tests.packaging.installed import REPOSITORY, Built, Installed, build, chat

pytestmark = pytest.mark.skipif(not shutil.which("uv"), reason="uv builds the wheel")
PACKAGE = Path(trouper.__file__).parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def wheel(built: Built) -> Path:
    return built.wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Beside the dependencies of this environment, and found before the checkout."""
    target, folder = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("empty")
    command = [
        "uv",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--python",
        sys.executable,
        "--target",
        str(target),
    ]
    subprocess.run([*command, str(wheel)], check=True)
    return Installed(
        (sys.executable, "-c", "from trouper.cli import main; main()"),
        folder,
        {"PYTHONPATH": str(target)},
    )


def read_metadata(wheel: zipfile.ZipFile) -> Message:
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    """Every file that git knows of - pages and their scripts, too."""
    listed = subprocess.run(
        ["git", "ls-files", "trouper"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    known = set(listed.stdout.split()) or {
        str(path.relative_to(PACKAGE.parent)) for path in PACKAGE.rglob("*.py")
    }
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert known <= held
    assert all(name.startswith("trouper/") for name in held)
    assert "trouper/py.typed" in held


def test_what_it_says_of_itself(wheel: Path) -> None:
    """One version, the licences of all that is in it, the README."""
    archive = zipfile.ZipFile(wheel)
    said = read_metadata(archive)
    assert said["Version"] == trouper.__version__
    assert said["License-Expression"] == "MIT"
    assert said.get_payload() == (REPOSITORY / "README.md").read_text()
    held = {held.split("/licenses/", 1)[1] for held in archive.namelist() if "/licenses/" in held}
    assert held == {"LICENSE"} == set(said.get_all("License-File") or ())


def test_the_laboratory_is_a_wheel_of_its_own(built: Built) -> None:
    """Of the same version as the server, which it needs and which brings it as an extra."""
    archive, server = zipfile.ZipFile(built.lab), zipfile.ZipFile(built.wheel)
    files = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert all(name.startswith("trouper_lab/") for name in files)
    assert files >= {"trouper_lab/py.typed", "trouper_lab/engine_programs/__main__.py"}
    lab, served = (read_metadata(each) for each in (archive, server))
    assert lab["Version"] == trouper.__version__
    assert lab.get_all("Requires-Dist") == [f"trouper=={trouper.__version__}"]
    assert "trouper-lab; extra == 'lab'" in served.get_all("Requires-Dist", [])
    [entries] = [name for name in archive.namelist() if name.endswith("/entry_points.txt")]
    assert "[trouper.commands]" in archive.read(entries).decode()


@pytest.mark.long
def test_it_serves_from_an_empty_folder(installed: Installed, tmp_path: Path) -> None:
    model = str(save("llama", tmp_path / "tiny"))
    where = subprocess.run(
        [sys.executable, "-c", "import trouper; print(trouper.__file__)"],
        cwd=installed.folder,
        env=installed.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.startswith(installed.more["PYTHONPATH"])
    said = installed.run("doctor", "--port", "0", "--model", model)
    assert "fail" not in said
    with installed.serving("--model", model) as url:
        assert chat(url, "Hello!")
