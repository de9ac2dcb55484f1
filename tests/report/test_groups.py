"""What may be averaged, and what may stand beside the paper."""

from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="configs are YAML files; of the extra 'benchmarks'")

from report.written import digits, falling, written

from sgp.experiments.config import configure
from sgp.report.collect import collect
from sgp.report.groups import Group, group, main_scope, plain_ones, reference_of


def groups_of(place: Path) -> list[Group]:
    return group(collect([place]).runs)


def test_seeds_are_averaged_and_settings_are_not(tmp_path: Path) -> None:
    digits(tmp_path, "sgp", 0, start=80)
    digits(tmp_path, "sgp", 1, start=90)
    digits(tmp_path, "sgp", 0, start=50, alpha=25.0)
    plain, other = groups_of(tmp_path)
    assert (plain.repeats, plain.setting, plain.acc) == ("2 seeds", "", pytest.approx(85 - 4.5))
    assert (other.repeats, other.setting) == ("1 seed", "alpha 25")


def test_orders_are_averaged_and_counted_as_orders(tmp_path: Path) -> None:
    for order in range(3):
        config = configure("cifar100-superclass", "gpm", "reference", order=order, threads=1)
        written(tmp_path / str(order), config, falling(20, 50 + order), names=[f"{order}.{task}" for task in range(20)])
    (only,) = groups_of(tmp_path)
    assert only.repeats == "3 orders"
    assert only.names[0] == "task 1"  # which task comes first is not the same in all of them
    assert only.published["acc"] == 57.72


def test_threads_make_no_difference(tmp_path: Path) -> None:
    for seed in range(2):
        written(tmp_path / str(seed), configure("digits", "gpm", seed=seed, threads=seed + 1), falling(10))
    assert len(groups_of(tmp_path)) == 1


@pytest.mark.parametrize(
    ("settings", "partial"),
    [
        ({"epochs": 5}, "5 of 200 epochs"),
        ({"tasks": 3}, "3 of 10 tasks"),
        ({"samples": 100}, "100 examples a task"),
        ({"recipe": "fast"}, "20 of 200 epochs"),
    ],
)
def test_less_than_the_papers_runs_is_partial_and_not_beside_its_numbers(
    tmp_path: Path, settings: dict[str, object], partial: str
) -> None:
    written(tmp_path / "run", configure("split-cifar100", "sgp", threads=1, **settings), falling(3))  # type: ignore[arg-type]
    (only,) = groups_of(tmp_path)
    assert partial in only.partial
    assert f"partial: {partial}" in only.setting
    assert only.published == {}


def test_true_pixels_are_not_beside_the_papers_scrambled_ones(tmp_path: Path) -> None:
    written(tmp_path / "run", configure("cifar100-superclass", "sgp", threads=1), falling(20))
    (only,) = groups_of(tmp_path)
    assert "true pixels" in only.partial
    assert only.published == {}


def test_a_changed_setting_is_not_beside_the_papers_numbers(tmp_path: Path) -> None:
    written(tmp_path / "a", configure("split-cifar100", "sgp", threads=1, alpha=3), falling(10))
    written(tmp_path / "b", configure("split-cifar100", "sgp", threads=1), falling(10))
    published = {each.setting: each.published for each in groups_of(tmp_path)}
    assert published["alpha 3"] == {}
    assert published[""]["acc"] == 76.05


def test_gpm_of_the_same_extent_is_the_reference(tmp_path: Path) -> None:
    digits(tmp_path, "gpm")
    digits(tmp_path, "gpm", tasks=3)
    digits(tmp_path, "sgp")
    digits(tmp_path, "sgp", tasks=4)
    found = groups_of(tmp_path)
    tasks = {len(each.first.names): reference_of(each, found) for each in found if each.method == "sgp"}
    assert tasks[10] is not None
    assert len(tasks[10].first.names) == 10
    assert tasks[4] is None


def test_another_network_is_nothing_to_be_measured_by(tmp_path: Path) -> None:
    digits(tmp_path, "gpm", network="lenet")
    digits(tmp_path, "sgp")
    found = groups_of(tmp_path)
    assert [reference_of(each, found) for each in found if each.method == "sgp"] == [None]


def test_what_is_compared_is_the_most_that_was_learned_without_studies_of_a_setting(tmp_path: Path) -> None:
    digits(tmp_path, "gpm")
    digits(tmp_path, "sgp")
    digits(tmp_path, "sgp", alpha=25.0)
    digits(tmp_path, "sgp", tasks=3)
    compared = plain_ones(main_scope(groups_of(tmp_path)))
    assert [(each.method, each.setting) for each in compared] == [("gpm", ""), ("sgp", "")]
    only_studies = [each for each in groups_of(tmp_path) if each.setting == "alpha 25"]
    assert plain_ones(only_studies) == only_studies


def test_partial_runs_are_compared_where_most_methods_learned_the_same(tmp_path: Path) -> None:
    digits(tmp_path, "sgp", epochs=9)
    for method in ("finetune", "sgp"):
        digits(tmp_path, method, epochs=2)
    assert {each.first.settings["epochs"] for each in main_scope(groups_of(tmp_path))} == {2}
    digits(tmp_path, "sgp")  # one that was learned in full counts for more than any number of others
    assert [each.setting for each in main_scope(groups_of(tmp_path))] == [""]


def test_scrambled_pixels_are_told_where_they_are_not_the_presets(tmp_path: Path) -> None:
    config = configure("cifar100-superclass", "den", threads=1, tasks=5, pixels="scrambled")
    written(tmp_path / "run", config, falling(5))
    (only,) = groups_of(tmp_path)
    assert only.setting == "pixels scrambled; partial: 5 of 20 tasks"
