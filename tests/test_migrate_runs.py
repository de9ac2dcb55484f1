"""Config files of runs of earlier versions get the settings that there are now."""

import importlib.util
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="of the extra 'benchmarks'")

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("migrate_runs", ROOT / "tools" / "migrate_runs.py")
assert spec is not None
assert spec.loader is not None
migrate_runs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(migrate_runs)

OLD = {"benchmark": "digits", "statistics": "stored", "old_share": 0.2, "processes": 1, "project_again": 0.2}
NEW = {"benchmark": "digits", "norm_statistics": "stored", "interpolation_weight": 0.2, "project_again": 0.2}


def test_settings_are_renamed_and_inactive_ones_dropped_in_place() -> None:
    assert list(migrate_runs.migrate_config(OLD).items()) == list(NEW.items())


def test_only_the_config_of_a_folder_is_written_and_only_once(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(OLD))
    (tmp_path / "accuracy.csv").write_text("statistics\n")
    assert migrate_runs.migrate_folder(tmp_path)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == NEW
    assert (tmp_path / "accuracy.csv").read_text() == "statistics\n"
    assert not migrate_runs.migrate_folder(tmp_path)


def test_the_committed_runs_are_migrated() -> None:
    folders = sorted((ROOT / "results" / "runs").iterdir())
    for folder in folders:
        values = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        assert migrate_runs.migrate_config(values) == values, folder.name
    assert folders
