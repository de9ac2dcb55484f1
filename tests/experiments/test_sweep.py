"""A sweep file: what it asks for, and what is said before anything runs."""

import re
from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="sweeps are YAML files; of the extra 'benchmarks'")

from sgp import paper
from sgp.experiments.config import configure
from sgp.experiments.summary import read_outcome
from sgp.experiments.sweep import Sweep, read_sweep


def swept(path: Path, text: str) -> Sweep:
    file = path / "grid.yaml"
    file.write_text(text, encoding="utf-8")
    return read_sweep(str(file))


def test_every_combination_is_one_run_in_the_order_of_the_file(tmp_path: Path) -> None:
    sweep = swept(tmp_path, "benchmark: digits\nmethod: [sgp, trgp]\nseed: [0, 7]\nlr: [0.5, 1e-2]\nepochs: 3\n")
    assert [point.name for point in sweep.points] == [
        f"digits-{method}-paper-seed{seed}-lr{lr}"
        for method in ("sgp", "trgp")
        for seed in (0, 7)
        for lr in (0.5, 0.01)
    ]
    assert sweep.points[3].config == configure("digits", "sgp", seed=7, lr=0.01, epochs=3)
    assert sweep.points[3].varied == {"method": "sgp", "seed": 7, "lr": 0.01}
    assert sweep.notes == []


def test_what_a_method_does_not_have_is_left_out_there_and_said(tmp_path: Path) -> None:
    sweep = swept(tmp_path, "benchmark: digits\nmethod: [gpm, sgp]\nseed: [0, 1]\nalpha: [1, 3.5, .inf]\n")
    names = [point.name for point in sweep.points]
    assert names == [
        *("digits-gpm-paper-seed0", "digits-gpm-paper-seed1"),
        *(f"digits-sgp-paper-seed{seed}-alpha{alpha}" for seed in (0, 1) for alpha in ("1", "3.5", "inf")),
    ]
    assert sweep.notes == ["alpha does not apply to gpm, and is left out there"]
    assert sweep.points[0].varied == {"method": "gpm", "seed": 0}


def test_what_a_benchmark_does_not_have_is_left_out_there_and_said(tmp_path: Path) -> None:
    text = "benchmark: [split-cifar100, cifar100-superclass]\nmethod: [gpm, ewc]\norder: [0, 1]\n"
    sweep = swept(tmp_path, text)
    assert [point.name for point in sweep.points] == [
        "split-cifar100-gpm-paper-seed0",
        "split-cifar100-ewc-paper-seed0",
        "cifar100-superclass-gpm-paper-seed0",
        "cifar100-superclass-gpm-paper-order1-seed0",
        "cifar100-superclass-ewc-paper-seed0",
        "cifar100-superclass-ewc-paper-order1-seed0",
    ]
    assert sweep.notes == ["order does not apply to split-cifar100, and is left out there"]
    sweep = swept(tmp_path, "benchmark: digits\nmethod: [gpm, finetune, ewc]\nthreshold: 0.9\n")
    assert sweep.notes == ["threshold does not apply to finetune, ewc, and is left out there"]


def test_several_grids_in_one_file_are_run_once_where_they_meet(tmp_path: Path) -> None:
    grids = (
        "- {benchmark: digits, method: sgp, seed: [0, 1]}\n- {benchmark: digits, method: [gpm, sgp], seed: [1, 1, 2]}"
    )
    names = [point.name for point in swept(tmp_path, grids).points]
    assert names == [f"digits-{run}" for run in ("sgp-paper-seed0", "sgp-paper-seed1")] + [
        f"digits-{run}" for run in ("gpm-paper-seed1", "gpm-paper-seed2", "sgp-paper-seed2")
    ]


def test_two_runs_of_one_name_are_refused_and_a_list_of_one_value_is_the_way_out(tmp_path: Path) -> None:
    grid = "- {{benchmark: digits, method: sgp, epochs: {}}}\n- {{benchmark: digits, method: sgp, epochs: {}}}\n"
    with pytest.raises(
        ValueError, match=r"called digits-sgp-paper-seed0 \(epochs: 2, not 1\): write what differs as a"
    ):
        swept(tmp_path, grid.format(1, 2))
    names = [point.name for point in swept(tmp_path, grid.format([1], [2])).points]
    assert names == ["digits-sgp-paper-seed0-epochs1", "digits-sgp-paper-seed0-epochs2"]


def test_any_value_makes_a_safe_name(tmp_path: Path) -> None:
    text = "benchmark: digits\nmethod: gpm\nthreshold: [0.9, {hidden.*: 0.5, '*': 0.75}]\nsamples: [null, 50]\n"
    points = swept(tmp_path, text).points
    assert all(re.fullmatch(r"[\w.-]+", point.name) for point in points)
    assert points[0].name == "digits-gpm-paper-seed0-threshold0.9-samplesNone"
    assert points[3].name == "digits-gpm-paper-seed0-thresholdhidden.__0.5___0.75-samples50"
    many = ", ".join(f"layer{number}: 0.5" for number in range(40))
    with pytest.raises(ValueError, match="too long for a folder's name"):
        swept(tmp_path, f"benchmark: digits\nmethod: gpm\nthreshold: [{{{many}, '*': 0.5}}]\n")


@pytest.mark.parametrize(
    ("text", "clue"),
    [
        ("benchmark: digits\nmethods: [sgp]\n", "does not say which method"),
        ("benchmark: digits\nmethod: [sgp]\nseeds: [1]\n", "no setting 'seeds': did you mean seed"),
        ("benchmark: digits\nmethod: [sgp, smg]\n", "no method 'smg': did you mean"),
        ("benchmark: [digits, digts]\nmethod: sgp\n", "no benchmark 'digts': did you mean digits?"),
        (
            "benchmark: digits\nmethod: gpm\nalpha: [1]\n",
            "no run has the setting alpha; it is one of the methods",
        ),
        (
            "benchmark: digits\nmethod: sgp\npreset: [paper, refrence]\n",
            "no preset 'refrence': did you mean reference?",
        ),
        ("benchmark: digits\nmethod: sgp\nkind: [split, splt]\n", "no kind 'splt': did you mean split?"),
        (
            "benchmark: digits\nmethod: sgp\nseed: [0, -1]\n",
            "sgp on digits with seed -1: seed must be from 0 to 4294967295, got -1",
        ),
        ("benchmark: digits\nmethod: sgp\nseed: [0, one]\n", "seed must be a whole number, got 'one'"),
        ("benchmark: digits\nmethod: sgp\nseed: [[0]]\n", r"seed must be a whole number, got \[0\]"),
        ("benchmark: digits\nmethod: sgp\nseed: []\n", "seed is an empty list"),
        ("benchmark: digits\nmethod: [[sgp]]\n", r"method must be a name or a list of names, got \[\['sgp'\]\]"),
        ("benchmark: digits\nmethod: {sgp: 1}\n", "method must be a name or a list of names"),
        (
            "benchmark: digits\nmethod: sgp\nalpha: [1]\nepochs: 0\n",
            "sgp on digits with alpha 1: epochs must be at least 1",
        ),
        ("[]", "must have names and values"),
        ("- digits\n", "must have names and values"),
        ("1: 2\n", "must have names and values"),
        ("", "must have names and values"),
        ("benchmark: [", "is not YAML"),
        ("benchmark: !!python/object/apply:os.getcwd []\nmethod: sgp\n", "is not YAML"),
    ],
)
def test_a_mistake_is_told_with_the_file_and_what_would_be_right(tmp_path: Path, text: str, clue: str) -> None:
    with pytest.raises(ValueError, match=rf"grid\.yaml.*{clue}"):
        swept(tmp_path, text)


@pytest.mark.parametrize(
    ("target", "clue"),
    [
        ("missing.yaml", "there is no file 'missing.yaml'"),
        ("some/alpha", "there is no file 'some/alpha'"),
        ("alpa", "no sweep of the paper 'alpa': did you mean alpha?"),
    ],
)
def test_a_file_that_is_not_there_is_told(target: str, clue: str) -> None:
    with pytest.raises(ValueError, match=re.escape(clue)):
        read_sweep(target)


def test_every_sweep_of_the_paper_can_be_read() -> None:
    assert "alpha" in paper.sweeps()
    assert all(read_sweep(name).points for name in paper.sweeps())


def test_the_study_of_alpha_is_the_papers() -> None:
    sweep = read_sweep("alpha")
    runs = {(point.config.benchmark, point.config.method): set() for point in sweep.points}
    for point in sweep.points:
        flat = point.config.flat()
        assert point.config.flat() | {"alpha": 0} == (
            configure(
                point.config.benchmark,
                point.config.method,
                **{name: flat[name] for name in ("seed", "order", "alpha") if name in flat},
            ).flat()
            | {"alpha": 0}
        )
        runs[point.config.benchmark, point.config.method].add((flat.get("order"), flat["seed"], flat.get("alpha")))
    alphas = (1, 3, 5, 10, 15, 25)
    of_seeds = {(None, seed, alpha) for seed in range(5) for alpha in alphas}
    assert runs["split-cifar100", "sgp"] == runs["split-miniimagenet", "sgp"] == of_seeds
    assert runs["cifar100-superclass", "sgp"] == {(order, 0, alpha) for order in range(5) for alpha in alphas}
    assert runs["split-cifar100", "gpm"] == runs["split-miniimagenet", "gpm"] == {(None, s, None) for s in range(5)}
    assert runs["cifar100-superclass", "gpm"] == {(order, 0, None) for order in range(5)}
    assert len(sweep.points) == 3 * 5 * 7


def test_the_sweep_of_games_is_the_published_code_and_its_failing_variant_has_torchs_own_adam() -> None:
    configs = [point.config for point in read_sweep("atari").points]
    plain = [config for config in configs if config.flat()["optimizer"] == "adam-gp"]
    methods = ("finetune", "ewc", "blip", "gpm", "sgp")
    assert plain == [configure("atari", name, "reference", seed=seed) for name in methods for seed in (1, 2, 3)]
    failing = {"optimizer": "adam-on-projected", "adam_counter": "step"}
    assert [config for config in configs if config not in plain] == [
        configure("atari", "sgp", "reference", seed=seed, **failing) for seed in (1, 2, 3)
    ]


def test_only_a_finished_run_has_an_outcome(tmp_path: Path) -> None:
    assert read_outcome(tmp_path / "none") is None
    metrics = tmp_path / "metrics.jsonl"
    for content in ("", '{"event": "task"}\n', '{"event": "end", "acc": 1}', '{"event": "end"\n'):
        metrics.write_text(content)
        assert read_outcome(tmp_path) is None, content
    metrics.write_text('{"event": "epoch"}\n{"event": "end", "acc": 1}\n')
    assert read_outcome(tmp_path) == {"event": "end", "acc": 1}
