"""What would be uploaded: the sdist and the wheel, and what the wheel does where nothing else is installed."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.processes import PATIENCE_S, clean_environment, serving

from .tools import REPOSITORY

pytestmark = pytest.mark.slow

PACKAGES = {"agent_client", "lighthouse", "lighthouse_protocol", "lighthouse_runtime", "manager"}
SOURCES = {
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "LICENSE",
    "Makefile",
    "mkdocs.yml",
    "PKG-INFO",
}


def run(*command: str | Path, folder: Path, **env: str) -> str:
    """What it prints, with its errors; it must end with 0."""
    options = {"cwd": folder, "env": clean_environment(**env), "timeout": 4 * PATIENCE_S}
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is built from it."""
    for tool in ("build", "twine", "hatchling"):
        pytest.importorskip(tool)
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, REPOSITORY, folder=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    [wheel] = built.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel and what it depends on, from the package index."""
    folder = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", folder / "env", folder=folder, PYTHONPATH="")
    programs = folder / "env" / "bin"
    run(programs / "python", "-m", "pip", "install", "--quiet", wheel, folder=folder, PYTHONPATH="")
    return programs


def test_a_package_index_would_take_both(built: Path) -> None:
    files = sorted(built.iterdir())
    assert [file.suffix for file in files] == [".whl", ".gz"]
    assert run(sys.executable, "-m", "twine", "check", "--strict", *files, folder=built).count("PASSED") == 2


def test_the_wheel_has_our_packages_and_no_more(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {name for name in tops if not name.endswith(".dist-info")} == PACKAGES
    assert [name for name in names if re.search(r"(^|/)(tests?|benchmarks|examples|__pycache__)/|\.pyc$", name)] == []
    assert set(names) >= {f"{package}/py.typed" for package in PACKAGES}
    assert {"lighthouse/dashboard/page.html", "lighthouse/dashboard/page.css"} <= set(names)


def test_the_wheel_has_the_code_of_every_proto_file_with_its_types(wheel: Path) -> None:
    protos = {path.relative_to(REPOSITORY / "protos") for path in (REPOSITORY / "protos").rglob("*.proto")}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert len(protos) > 5
    for proto in protos:
        generated = f"lighthouse_protocol/pb/{proto.with_suffix('')}_pb2"
        assert {f"{generated}.py", f"{generated}.pyi", f"{generated}_grpc.py"} <= names


def test_the_sdist_can_be_worked_with(built: Path) -> None:
    """Sources of the generated code, tests and docs are in it; what this checkout has made is not."""
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tops = {name.partition("/")[0] for name in names}
    assert tops >= PACKAGES | SOURCES | {"protos", "tests", "docs", "deploy", "examples", "benchmarks"}
    assert tops & {".git", ".venv", ".ci", "build", "dist", "__pycache__"} == set()
    assert "protos/documented/lighthouse.proto" in names


def test_its_programs_run_without_torch(bare: Path, tmp_path: Path) -> None:
    env = {"PYTHONPATH": "", "XDG_STATE_HOME": str(tmp_path)}
    find_torch = "import importlib.util as u; print(u.find_spec('torch'), u.find_spec('numpy'))"
    assert run(bare / "python", "-c", find_torch, folder=tmp_path, **env) == "None None\n"
    version = re.search(r'^version = "(.+)"', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    for program in ("lighthouse", "lighthouse-manager"):
        assert run(bare / program, "--version", folder=tmp_path, **env) == f"{program}, version {version[1]}\n"
    with serving(str(bare / "lighthouse"), "serve", folder=tmp_path, **env) as address:
        said = run(bare / "lighthouse", "status", "--lighthouse", address, folder=tmp_path, **env)
    assert f"lighthouse {version[1]} at {address}" in said
    assert "no job" in said.lower()


def test_the_library_is_imported_without_torch(bare: Path, tmp_path: Path) -> None:
    code = "import agent_client as a; print(a.AgentError.__name__, a.LighthouseClient.__name__)"
    assert run(bare / "python", "-c", code, folder=tmp_path, PYTHONPATH="") == "AgentError LighthouseClient\n"
