"""The command: its version, its subcommands, its imports, Ctrl-C, and the errors for mistakes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import sgp
from sgp.cli import COMMANDS, main


def run_without(modules: list[str], arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the command where some modules cannot be imported, as if they were not installed."""
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({modules!r}));"
        f"from sgp.cli import main; sys.exit(main({arguments!r}))"
    )
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


def test_version_needs_nothing_but_the_core() -> None:
    done = run_without(["sklearn", "yaml"], ["--version"])
    assert (done.returncode, done.stdout, done.stderr) == (0, f"sgp {sgp.__version__}\n", "")


@pytest.mark.parametrize(
    ("modules", "named"),
    [
        (["sklearn"], ["scikit-learn"]),
        (["yaml"], ["PyYAML"]),
        (["sklearn", "yaml"], ["scikit-learn", "PyYAML"]),
    ],
    ids=str,
)
def test_a_missing_extra_is_reported_in_one_line(modules: list[str], named: list[str]) -> None:
    for module in {"sklearn", "yaml"} - set(modules):
        pytest.importorskip(module)
    done = run_without(modules, ["run", "digits"])
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line == f'sgp needs {" and ".join(named)}: pip install "sgp-torch[benchmarks]"'


def test_the_package_is_the_command_too() -> None:
    done = subprocess.run([sys.executable, "-m", "sgp", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"sgp {sgp.__version__}\n", "")


class TestWithBenchmarks:
    """Tests that need the extra."""

    @pytest.fixture(autouse=True)
    def _extra(self) -> None:
        for module in ("sklearn", "yaml"):
            pytest.importorskip(module)

    def test_demo_runs_with_the_settings_given(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["demo", "--seeds", "1", "--tasks", "2", "--epochs", "1", "--threshold", "0.9"]) == 0
        output = capsys.readouterr().out
        assert "2 tasks" in output
        assert "threshold 0.9" in output

    @pytest.mark.parametrize("arguments", [["--help"], ["-h"], []], ids=["help", "h", "nothing"])
    def test_help_names_the_subcommands(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert main(arguments) == 0
        output = capsys.readouterr().out
        for command in COMMANDS:
            assert f"  sgp {command} " in output

    def test_help_of_demo_explains_each_option(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["demo", "--help"]) == 0
        output = capsys.readouterr().out
        for option in ("--seeds", "--tasks", "--epochs", "--alpha", "--threshold"):
            assert option in output

    @pytest.mark.parametrize(
        ("arguments", "clues"),
        [
            (["demo", "--seds", "3"], ["--seds", "--seeds"]),
            (["demo", "--seeds", "many"], ["--seeds", "many"]),
            (["demo", "--threshold", "2"], ["threshold", "(0, 1]", "2.0"]),
        ],
        ids=["option", "type", "value"],
    )
    def test_a_mistake_gets_a_clear_error(
        self, arguments: list[str], clues: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(arguments) == 2
        captured = capsys.readouterr()
        message = captured.out + captured.err
        assert all(clue in message for clue in clues)
        assert "Traceback" not in message

    def test_an_unknown_command_gets_the_nearest(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["dmeo"]) == 2
        assert capsys.readouterr().err == "sgp: there is no command 'dmeo': did you mean demo?\n"

    def test_an_interrupt_ends_with_one_line(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("sgp.demo.comparison.run_demo", interrupted)
        assert main(["demo"]) == 130
        assert capsys.readouterr().err == "sgp: interrupted\n"


WITHOUT_TORCH = [
    ["--help"],
    ["rnu"],
    ["list"],
    ["list", "method"],
    ["run"],
    ["run", "dgits"],
    ["run", "digits", "--help"],
    ["run", "digits", "--method", "gpm", "--alpha", "3"],
    ["run", "digits", "--lr", "-1"],
    ["run", "split-cifar100", "--network", "mpl"],
    ["run", "split-miniimagenet", "--network", "lenet"],
    ["sweep", "alpa"],
    ["sweep", "--help"],
    ["demo", "--seds", "2"],
    ["data", "get", "cifar101"],
    ["report", "--ot", "x"],
]


@pytest.mark.parametrize("arguments", WITHOUT_TORCH, ids=" ".join)
def test_help_lists_and_mistakes_do_not_import_torch(arguments: list[str], tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="of the extra 'benchmarks'")
    pytest.importorskip("yaml", reason="of the extra 'benchmarks'")
    script = f"import sys; from sgp.cli import main; main({arguments!r}); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, cwd=tmp_path)


# Importing torch stops until the process gets a signal, and reports that it does by the file "importing".
IMPORTING = """
import signal
from pathlib import Path

Path("importing").touch()
try:
    signal.pause()
except BaseException:
    raise ImportError("as an extension module may fail") from None
"""


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
def test_an_interrupt_while_torch_is_imported_ends_with_one_line(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="of the extra 'benchmarks'")
    pytest.importorskip("yaml", reason="of the extra 'benchmarks'")
    (tmp_path / "torch.py").write_text(IMPORTING, encoding="utf-8")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, "-m", "sgp", "run", "digits"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        # A process in the background of a script ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while not (tmp_path / "importing").exists():
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    out, error = process.communicate()
    assert (process.returncode, out, error) == (130, "", "sgp: interrupted\n")
