"""The sdist and the wheel that is built from it work outside the repository, as an editable install may not show."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import sgp

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[1]


def call(*command: str | Path, cwd: Path) -> str:
    """Return the output of a command that must succeed without the packages of our own environment."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and the wheel from it, with the packages that are installed here; return their folder."""
    target = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", target, REPOSITORY, cwd=target)
    return target


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def sdist(built: Path) -> Path:
    (found,) = built.glob("*.tar.gz")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of commands of a new environment that has the wheel and our dependencies."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, symlinks=True)
    commands = place / ("Scripts" if os.name == "nt" else "bin")
    call(
        *(sys.executable, "-m", "pip", "--python", commands / "python"),
        *("install", "--no-deps", "--no-index", wheel),
        cwd=place,
    )
    # A path named in a .pth file comes after the environment's own packages, and .pth files inside it (such as that of
    # the editable install) are not read: what is imported as sgp is the wheel's.
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(call(commands / "python", "-c", ask, cwd=place).strip())
    ours = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    (packages / "dependencies.pth").write_text("\n".join(ours) + "\n", encoding="utf-8")
    return commands


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "sgp/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"sgp", f"sgp_torch-{sgp.__version__}.dist-info"}
    source = REPOSITORY / "src"
    wanted = {
        str(path.relative_to(source)) for form in ("*.py", "*.yaml", "templates/*") for path in source.rglob(form)
    }
    assert "sgp/paper/rows/split-cifar100.sgp.yaml" in wanted
    assert wanted <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_of_the_sdist_is_that_of_the_repository(wheel: Path, tmp_path: Path) -> None:
    call(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, REPOSITORY, cwd=tmp_path)
    (other,) = tmp_path.glob("*.whl")
    assert other.name == wheel.name
    assert read_wheel(other) == read_wheel(wheel)


def read_wheel(path: Path) -> dict[str, bytes]:
    """Return the files of a wheel by name."""
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


def test_the_sdist_has_what_it_takes_to_build_and_test_and_no_results(sdist: Path) -> None:
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=REPOSITORY, capture_output=True)
    if listed.returncode == 0:
        tracked = set(listed.stdout.decode().splitlines())
        assert names - tracked == {"PKG-INFO"}
        missing = {name for name in tracked - names if not name.startswith((".ci/", ".github/", "results/"))}
        assert missing == set()
    assert {"pyproject.toml", "LICENSE", "README.md", "Makefile", "tests/test_wheel.py", ".gitignore"} <= names
    assert not any(name.startswith("results/") or "__pycache__" in name for name in names)
    assert sdist.stat().st_size < 2**21


def test_the_metadata_are_valid_and_the_same_in_both(wheel: Path, sdist: Path) -> None:
    packaging = pytest.importorskip("packaging.metadata")
    with tarfile.open(sdist) as file:
        member = file.extractfile(f"sgp_torch-{sgp.__version__}/PKG-INFO")
        assert member is not None
        described = member.read()
    assert described == read_wheel(wheel)[f"sgp_torch-{sgp.__version__}.dist-info/METADATA"]
    metadata = packaging.Metadata.from_email(described, validate=True)
    assert (metadata.name, str(metadata.version)) == ("sgp-torch", sgp.__version__)
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert metadata.license_expression == "MIT"
    # The core needs four packages; all others belong to an extra.
    core = {requirement.name for requirement in metadata.requires_dist if requirement.marker is None}
    assert core == {"torch", "numpy", "safetensors", "rich"}


def test_the_command_runs_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    place = call(installed / "python", "-c", "import sgp; print(sgp.__file__)", cwd=tmp_path)
    assert Path(place.strip()).is_relative_to(installed.parent)
    assert call(installed / "sgp", "--version", cwd=tmp_path) == f"sgp {sgp.__version__}\n"
    assert call(installed / "python", "-m", "sgp", "--version", cwd=tmp_path) == f"sgp {sgp.__version__}\n"


def test_the_demo_runs_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    pytest.importorskip("sklearn")
    output = call(*(installed / "sgp", "demo", "--seeds", "1", "--tasks", "2", "--epochs", "1"), cwd=tmp_path)
    assert all(method in output for method in ("finetuning", "GPM", "SGP"))
    assert [path.name for path in tmp_path.iterdir()] == ["sgp-demo"]
    if find_spec("matplotlib") and find_spec("jinja2"):
        # The page's template is data of the package.
        assert (tmp_path / "sgp-demo/report/index.html").stat().st_size > 100_000


def test_a_benchmark_runs_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    for module in ("sklearn", "yaml"):
        pytest.importorskip(module)
    output = call(installed / "sgp", "run", "digits", "--tasks", "2", "--epochs", "1", cwd=tmp_path)
    assert "ACC " in output
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name == "digits-sgp-paper-seed0"
    # The settings of the paper's room, which are data of the package.
    assert "threshold: 0.985\n" in (run / "config.yaml").read_text(encoding="utf-8")
    assert "ACC " in call(installed / "sgp", "show", run, cwd=tmp_path)
