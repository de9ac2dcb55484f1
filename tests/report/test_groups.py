"""Groups of runs that are averaged, and comparisons of groups with each other and with the paper."""

from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="configs are YAML files; of the extra 'benchmarks'")

from report.run_folders import make_rows, write_digits_run, write_run

from sgp import paper
from sgp.experiments.config import configure
from sgp.report.collect import collect_runs
from sgp.report.groups import Comparison, Group, find_comparisons, find_reference, group_runs


def find_groups(place: Path) -> list[Group]:
    return group_runs(collect_runs([place]).runs)


def test_seeds_are_averaged_and_settings_are_not(tmp_path: Path) -> None:
    write_digits_run(tmp_path, "sgp", 0, start=80)
    write_digits_run(tmp_path, "sgp", 1, start=90)
    write_digits_run(tmp_path, "sgp", 0, start=50, alpha=25.0)
    plain, other = find_groups(tmp_path)
    assert (plain.repeats, plain.setting, plain.acc) == ("2 seeds", "", pytest.approx(85 - 4.5))
    assert (other.repeats, other.setting) == ("1 seed", "alpha 25")


def test_orders_are_averaged_and_counted_as_orders(tmp_path: Path) -> None:
    for order in range(3):
        config = configure("cifar100-superclass", "gpm", "reference", order=order, threads=1)
        write_run(
            tmp_path / str(order),
            config,
            make_rows(20, 50 + order),
            names=[f"{order}.{task}" for task in range(20)],
        )
    (only,) = find_groups(tmp_path)
    assert only.repeats == "3 orders"
    assert only.names[0] == "task 1"  # which task comes first is not the same in all of them
    assert only.published["acc"] == 57.72


def test_threads_do_not_separate_groups(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path / str(seed), configure("digits", "gpm", seed=seed, threads=seed + 1), make_rows(10))
    assert len(find_groups(tmp_path)) == 1


@pytest.mark.parametrize(
    ("settings", "partial"),
    [
        ({"epochs": 5}, "5 of 200 epochs"),
        ({"tasks": 3}, "3 of 10 tasks"),
        ({"samples": 100}, "100 examples per task"),
        ({"recipe": "fast"}, "20 of 200 epochs"),
    ],
)
def test_less_training_than_the_papers_is_partial_and_not_compared(
    tmp_path: Path, settings: dict[str, object], partial: str
) -> None:
    write_run(tmp_path / "run", configure("split-cifar100", "sgp", threads=1, **settings), make_rows(3))  # type: ignore[arg-type]
    (only,) = find_groups(tmp_path)
    assert partial in only.partial
    assert f"partial: {partial}" in only.setting
    assert only.published == {}


def test_true_pixels_are_not_compared_with_the_papers_scrambled_ones(tmp_path: Path) -> None:
    write_run(tmp_path / "run", configure("cifar100-superclass", "sgp", threads=1), make_rows(20))
    (only,) = find_groups(tmp_path)
    assert "true pixels" in only.partial
    assert only.published == {}


def test_a_changed_setting_is_not_compared_with_the_paper(tmp_path: Path) -> None:
    write_run(tmp_path / "a", configure("split-cifar100", "sgp", threads=1, alpha=3), make_rows(10))
    write_run(tmp_path / "b", configure("split-cifar100", "sgp", threads=1), make_rows(10))
    published = {each.setting: each.published for each in find_groups(tmp_path)}
    assert published["alpha 3"] == {}
    assert published[""]["acc"] == 76.05


def test_gpm_of_the_same_protocol_is_the_reference(tmp_path: Path) -> None:
    write_digits_run(tmp_path, "gpm")
    write_digits_run(tmp_path, "gpm", tasks=3)
    write_digits_run(tmp_path, "sgp")
    write_digits_run(tmp_path, "sgp", tasks=4)
    found = find_groups(tmp_path)
    tasks = {len(each.first.names): find_reference(each, found) for each in found if each.method == "sgp"}
    assert tasks[10] is not None
    assert len(tasks[10].first.names) == 10
    assert tasks[4] is None


def test_gpm_with_another_network_is_not_the_reference(tmp_path: Path) -> None:
    for method, network in (("gpm", "lenet"), ("sgp", "alexnet")):
        config = configure("split-cifar100", method, network=network, tasks=3, threads=1)
        write_run(tmp_path / method, config, make_rows(3))
    found = find_groups(tmp_path)
    assert [find_reference(each, found) for each in found if each.method == "sgp"] == [None]


def describe(comparisons: list[Comparison]) -> list[list[str]]:
    return [[each.title for each in comparison.methods] for comparison in comparisons]


def test_methods_of_one_protocol_are_compared_without_studies_of_a_setting(tmp_path: Path) -> None:
    write_digits_run(tmp_path, "gpm")
    write_digits_run(tmp_path, "sgp")
    write_digits_run(tmp_path, "sgp", alpha=25.0)
    write_digits_run(tmp_path, "sgp", tasks=3)
    (comparison,) = find_comparisons(find_groups(tmp_path))
    assert [each.title for each in comparison.groups] == ["GPM", "SGP", "SGP (alpha 25)"]
    assert [each.title for each in comparison.methods] == ["GPM", "SGP"]
    study = Comparison(comparison.groups[2:])
    assert study.methods == study.groups


def test_one_longer_run_beside_a_sweep_does_not_empty_the_comparison(tmp_path: Path) -> None:
    for method in ("finetune", "sgp"):
        write_digits_run(tmp_path, method, epochs=2)
    write_digits_run(tmp_path, "sgp", epochs=9)
    write_digits_run(tmp_path, "sgp")
    (comparison,) = find_comparisons(find_groups(tmp_path))
    assert {each.first.settings["epochs"] for each in comparison.groups} == {2}
    assert [each.method for each in comparison.methods] == ["finetune", "sgp"]


def test_several_whole_runs_come_before_a_larger_sweep_of_partial_ones(tmp_path: Path) -> None:
    for method in ("finetune", "gpm", "sgp"):
        write_digits_run(tmp_path, method, tasks=3)
    for method in ("gpm", "sgp"):
        write_digits_run(tmp_path, method)
    partial = "partial: 3 of 10 tasks"
    assert describe(find_comparisons(find_groups(tmp_path))) == [
        ["GPM", "SGP"],
        [f"Finetuning ({partial})", f"GPM ({partial})", f"SGP ({partial})"],
    ]


def test_without_a_common_protocol_the_longest_run_stands_alone(tmp_path: Path) -> None:
    write_digits_run(tmp_path, "sgp", tasks=3)
    write_digits_run(tmp_path, "gpm", tasks=4)
    assert describe(find_comparisons(find_groups(tmp_path))) == [["GPM (partial: 4 of 10 tasks)"]]


def write_paper_run(place: Path, method: str, **changes: object) -> None:
    how = paper.comparison("cifar100-superclass", method)
    settings = {"preset": how.preset, "threads": 1, **how.settings, **changes}
    config = configure("cifar100-superclass", method, **settings)  # type: ignore[arg-type]
    write_run(place / "-".join([method, *map(str, changes)]), config, make_rows(config.flat()["tasks"]))


def test_rows_of_the_papers_table_are_compared_whatever_their_preset(tmp_path: Path) -> None:
    for method in ("gpm", "stl", "finetune"):
        write_paper_run(tmp_path, method)
        write_paper_run(tmp_path, method, tasks=3)
    first, *others = find_comparisons(find_groups(tmp_path))
    assert first.follows_paper
    assert first.title == "20 tasks, as in the paper"
    assert {(each.method, each.first.config.preset) for each in first.methods} == {
        ("gpm", "reference"),
        ("stl", "paper"),
        ("finetune", "paper"),
    }
    # Cut down, they have no protocol of the paper in common, and gpm's preset is another one.
    assert [{each.method for each in comparison.methods} for comparison in others] == [{"stl", "finetune"}]


def test_a_single_run_of_the_papers_protocol_has_figures_beside_a_sweep(tmp_path: Path) -> None:
    write_paper_run(tmp_path, "gpm")
    for method in ("stl", "finetune"):
        write_paper_run(tmp_path, method, tasks=3)
    sweep, single = find_comparisons(find_groups(tmp_path))
    assert [each.method for each in sweep.methods] == ["finetune", "stl"]
    assert [each.method for each in single.methods] == ["gpm"]
    assert single.follows_paper


def test_scrambled_pixels_are_named_where_they_are_not_the_presets(tmp_path: Path) -> None:
    config = configure("cifar100-superclass", "den", threads=1, tasks=5, pixels="scrambled")
    write_run(tmp_path / "run", config, make_rows(5))
    (only,) = find_groups(tmp_path)
    assert only.setting == "pixels scrambled; partial: 5 of 20 tasks"
