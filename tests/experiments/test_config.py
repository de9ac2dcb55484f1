"""Configs: names and values are checked before anything is loaded, and files contain the same."""

import dataclasses
import itertools
import math
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("yaml", reason="configs are YAML files; of the extra 'benchmarks'")

from sgp.benchmarks import BENCHMARKS, Benchmark
from sgp.benchmarks.stream import Stream
from sgp.experiments.config import (
    Config,
    SupervisedSettings,
    as_yaml,
    configure,
    find_differences,
    from_file,
    is_whole,
    read_recorded,
    read_yaml,
)
from sgp.methods import METHODS
from sgp.paper import PRESETS, RECIPES, has_recipe
from sgp.registry import UnknownName
from sgp.rl.settings import PPOSettings
from sgp.settings import convert

SUPERVISED = [name for name in BENCHMARKS if isinstance(BENCHMARKS[name], Benchmark)]
GAMES = [name for name in BENCHMARKS if name not in SUPERVISED]
FOR_GAMES = [name for name in METHODS if not METHODS[name].supervised_only]
BOTH = [*itertools.product(SUPERVISED, METHODS), *itertools.product(GAMES, FOR_GAMES)]


@pytest.mark.parametrize(("benchmark", "method"), BOTH)
def test_no_name_stands_for_two_settings(benchmark: str, method: str) -> None:
    groups = (
        Config,
        PPOSettings if benchmark in GAMES else SupervisedSettings,
        BENCHMARKS[benchmark].settings,
        METHODS[method].Settings,
    )
    names = Counter(entry.name for group in groups for entry in dataclasses.fields(group))
    assert {name for name, count in names.items() if count > 1} == set()


@pytest.mark.parametrize(("benchmark", "method"), BOTH)
def test_a_file_gives_the_same_config_again(benchmark: str, method: str, tmp_path: Path) -> None:
    for preset, recipe in itertools.product(PRESETS, RECIPES):
        if not has_recipe(benchmark, recipe):
            continue
        config = configure(benchmark, method, preset, recipe, seed=3, threads=2)
        (tmp_path / "config.yaml").write_text(as_yaml(config), encoding="utf-8")
        again = from_file(tmp_path / "config.yaml")
        assert again == config
        assert list(find_differences(again, config)) == []


def test_a_file_keeps_infinity_and_small_numbers(tmp_path: Path) -> None:
    config = configure("digits", "sgp", alpha=math.inf, lr_min=1e-7, threshold={"hidden.0": 0.5, "*": 0.25})
    (tmp_path / "config.yaml").write_text(as_yaml(config), encoding="utf-8")
    assert from_file(tmp_path / "config.yaml") == config


def test_a_file_may_say_little_and_overrides_win(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("benchmark: digits\nmethod: gpm\nlr: 1e-2\nepochs: 3\n", encoding="utf-8")
    config = from_file(file, epochs=7)
    assert config.trainer.lr == 0.01  # a string to YAML, which wants 1.0e-2
    assert config.trainer.epochs == 7
    assert config == configure("digits", "gpm", lr=0.01, epochs=7)


@pytest.mark.parametrize(
    ("text", "clue"),
    [
        ("benchmark: digits", "does not say which method"),
        ("lr: 1", "does not say which benchmark and method"),
        ("- a\n- b", "must have names and values"),
        ("", "must have names and values"),
        ("3: 4", "must have names and values"),
        ("a: [", "is not YAML"),
        ("benchmark: digits\nmethod: sgp\nlrr: 1", "did you mean lr"),
        ("benchmark: digits\nlr: 1\nmethod: sgp\nlr: 2", r"mine\.yaml has lr twice"),
        ("benchmark: digits\nmethod: sgp\nthreshold: {a: 1, b: 2, 'a': 3}", r"mine\.yaml has a twice"),
        ("benchmark: !!python/object/apply:os.getcwd []\nmethod: sgp", "is not YAML"),
    ],
)
def test_a_file_that_is_no_config_is_refused(text: str, clue: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=clue) as refused:
        from_file(file)
    assert "mine.yaml" in str(refused.value) or "lrr" in str(refused.value)


def test_a_file_may_refer_to_itself_as_yaml_lets_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("a: &a [*a]\nb: &b {x: 1}\nc: *b\nd: *b\n", encoding="utf-8")
    assert read_yaml(file)["d"] == {"x": 1}


@pytest.mark.parametrize("text", ["a: [1\nb: {", "a: 2026-99-99", "a: !!int x", "[" * 3000], ids=lambda text: text[:12])
def test_a_file_that_is_not_yaml_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"mine\.yaml is not YAML: [^\n]*$"):
        read_yaml(tmp_path / "mine.yaml")


def test_aliases_that_stand_for_billions_of_values_are_refused(tmp_path: Path) -> None:
    levels = "abcdefghijkl"
    lines = [f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]" for before, name in pairwise(levels)]
    (tmp_path / "mine.yaml").write_text("\n".join(["a: &a 1", *lines]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"mine\.yaml has more than 100,000 values once its aliases are written out"):
        read_yaml(tmp_path / "mine.yaml")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"mine\.yaml is not YAML"):
        read_yaml(tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    ("names", "clue"),
    [
        ({"benchmark": "digts"}, "there is no benchmark 'digts': did you mean digits"),
        ({"method": "sgpp"}, "there is no method 'sgpp': did you mean sgp"),
        ({"method": ["sgp", "gpm"]}, r"there is no method \['sgp', 'gpm'\]"),
        ({"benchmark": {"digits": 1}}, r"there is no benchmark \{'digits': 1\}"),
        ({"preset": "papr"}, "there is no preset 'papr': did you mean paper"),
        ({"recipe": "fats"}, "there is no recipe 'fats': did you mean fast"),
        ({"network": "lennet"}, "there is no network 'lennet': did you mean lenet"),
        ({"alhpa": 1}, "sgp on digits has no setting alhpa: did you mean alpha"),
        ({"stream": 1}, "sgp on digits has no setting stream"),
        ({"kind": "splt"}, "there is no kind 'splt': did you mean split"),
        ({"schedule": "cosin"}, "there is no schedule 'cosin': did you mean cosine"),
    ],
    ids=str,
)
def test_an_unknown_name_is_answered_with_the_nearest(names: dict[str, Any], clue: str) -> None:
    with pytest.raises(ValueError, match=clue):
        configure(**({"benchmark": "digits", "method": "sgp"} | names))


def test_a_setting_of_another_method_is_unknown() -> None:
    with pytest.raises(ValueError, match="gpm on digits has no setting alpha; it is a setting of"):
        configure("digits", "gpm", alpha=1)


@pytest.mark.parametrize(
    "bad",
    [
        {"seed": -1},
        {"seed": 2**32},
        {"samples": 1},
        {"threads": -1},
        {"epochs": 0},
        {"batch": 0},
        {"test_batch": 0},
        {"patience": 0},
        {"lr": 0.0},
        {"lr": math.inf},
        {"lr": math.nan},
        {"head_lr": 0.0},
        {"head_lr": math.nan},
        {"lr_min": 0.0},
        {"lr_min": math.nan},
        {"lr_factor": 1.0},
        {"average": 1.0},
        {"average": -0.1},
        {"average": math.nan},
        {"interpolation_weight": 1.0},
        {"interpolation_weight": -0.1},
        {"interpolation_weight": math.nan},
        {"threshold": 2.0},
        {"alpha": -1.0},
        {"tasks": 0},
        {"validation": 1.0},
    ],
    ids=str,
)
def test_a_value_out_of_range_is_refused_by_name(bad: dict[str, Any]) -> None:
    ((name, value),) = bad.items()
    with pytest.raises(ValueError, match=rf"{name} must be .*, got {value}"):
        configure("digits", "sgp", **bad)


def test_settings_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match="average goes with schedule=constant, cosine or linear"):
        configure("digits", "sgp", schedule="patience", average=0.9)
    with pytest.raises(ValueError, match="interpolation_weight needs average"):
        configure("digits", "sgp", interpolation_weight=0.2)
    with pytest.raises(ValueError, match="interpolation_weight needs a method that only acts on steps, but trgp"):
        configure("digits", "trgp", recipe="fast", interpolation_weight=0.2)
    with pytest.raises(ValueError, match="realign needs a method that only acts on steps, but er"):
        configure("digits", "er", kind="split", realign=True)
    with pytest.raises(ValueError, match="realign does not go with blip, which rounds the weights"):
        configure("digits", "blip", kind="split", realign=True)
    with pytest.raises(ValueError, match="patience needs validation examples"):
        configure("digits", "sgp", schedule="patience", validation=0.0)
    assert configure("digits", "sgp", validation=0.0).trainer.schedule == "constant"


def test_a_run_keeps_the_default_of_a_setting_that_its_recipe_got_later(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    now = configure("split-cifar100", "gpm", recipe="fast", seed=4)
    assert now.trainer.average == 0.99
    file.write_text("".join(f"{line}\n" for line in as_yaml(now).splitlines() if not line.startswith("average")))
    then = read_recorded(file)
    assert then.trainer.average == 0.0
    assert {each.partition(":")[0] for each in find_differences(then, now)} == {"average"}
    assert from_file(file) == now


@pytest.mark.parametrize(
    ("value", "wanted", "result"),
    [
        (1, float, 1.0),
        ("1e-5", float, 1e-5),
        ("inf", float, math.inf),
        (2, int, 2),
        ("2", int, 2),
        ("none", float | None, None),
        (True, bool, True),
        ("a", Literal["a", "b"], "a"),
        (True, Literal["true", "scrambled"], "true"),  # as YAML reads the word
        (None, int | None, None),
        (3, int | None, 3),
        (2, float | dict[str, float], 2.0),
        ({"a": 1, "b": "1e-2"}, float | dict[str, float], {"a": 1.0, "b": 0.01}),
        ({"a": 1}, int | dict[str, int], {"a": 1}),
    ],
    ids=str,
)
def test_a_value_is_brought_to_its_type(value: Any, wanted: Any, result: Any) -> None:
    found = convert("name", value, wanted)
    assert found == result
    assert type(found) is type(result)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("x", float),
        (True, float),
        (None, float),
        (1.5, int),
        (True, int),
        (1, bool),
        ("yes", bool),
        ("c", Literal["a", "b"]),
        (True, Literal["a", "b"]),
        ("x", int | None),
        ([1], float | dict[str, float]),
        ({"a": "x"}, float | dict[str, float]),
        ({"a": 1.5}, int | dict[str, int]),
        (1, str),
        (1, dict[str, float]),
    ],
    ids=str,
)
def test_a_value_of_another_type_is_refused_by_name(value: Any, wanted: Any) -> None:
    with pytest.raises(ValueError, match="the_name"):
        convert("the_name", value, wanted)


def test_a_run_is_whole_unless_it_is_cut_down() -> None:
    assert is_whole(configure("digits", "sgp"))
    assert is_whole(configure("digits", "sgp", "reference", alpha=3, seed=5))
    for cut in ({"tasks": 3}, {"epochs": 1}, {"samples": 50}):
        assert not is_whole(configure("digits", "sgp", **cut))
    assert not is_whole(configure("split-cifar100", "sgp", recipe="fast"))


def test_differences_name_what_and_both_values() -> None:
    one, other = configure("digits", "sgp", lr=0.2, seed=1), configure("digits", "sgp", tasks=3)
    assert sorted(find_differences(one, other)) == ["lr: 0.2, not 0.1", "seed: 1, not 0", "tasks: 10, not 3"]
    assert list(find_differences(one, one)) == []
    methods = list(find_differences(configure("digits", "gpm"), configure("digits", "sgp")))
    assert sorted(methods) == ["alpha: nothing, not 1.0", "method: gpm, not sgp"]


@pytest.mark.parametrize(
    ("choices", "name"),
    [
        ({}, "digits-sgp-paper-seed0"),
        ({"preset": "reference", "seed": 4}, "digits-sgp-reference-seed4"),
        ({"recipe": "fast"}, "digits-sgp-paper-fast-seed0"),
    ],
    ids=str,
)
def test_a_run_is_called_by_what_it_is(choices: dict[str, Any], name: str) -> None:
    assert configure("digits", "sgp", **choices).name == name


def test_a_benchmark_of_another_package_has_its_own_network_and_needs_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Settings:
        colour: str = "red"

    def stream(settings: Settings, data: Path | None, seed: int) -> Stream:
        raise NotImplementedError

    theirs = Benchmark(
        name="theirs", description="Theirs.", settings=Settings, stream=stream, network="lenet", datasets=()
    )
    monkeypatch.setitem(BENCHMARKS._known, "theirs", theirs)
    config = configure("theirs", "sgp", colour="blue")
    assert (config.network, config.benchmark_settings) == ("lenet", Settings("blue"))
    assert is_whole(config)
    with pytest.raises(UnknownName):
        configure("theirs", "nothing")


@pytest.mark.parametrize(("benchmark", "method"), list(itertools.product(GAMES, METHODS)))
def test_a_method_that_needs_a_say_in_the_training_is_refused_for_games(benchmark: str, method: str) -> None:
    if method in FOR_GAMES:
        assert configure(benchmark, method).is_game
        return
    with pytest.raises(ValueError, match=f"{method} cannot learn {benchmark}.*finetune, ") as refused:
        configure(benchmark, method)
    assert str(refused.value).endswith(", ".join(FOR_GAMES))


def test_a_setting_of_supervised_training_is_none_of_games() -> None:
    for name in ("samples", "norm_statistics", "network_bias", "schedule"):
        with pytest.raises(ValueError, match=f"sgp on atari has no setting {name}"):
            configure("atari", "sgp", **{name: 5})


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *[(name, 0) for name in ("steps", "envs", "rollout", "epochs", "states", "evaluate_every", "evaluation_games")],
        *[(name, bad) for name in ("lr", "adam_eps", "clip_range", "max_norm") for bad in (0.0, math.nan, math.inf)],
        *[(name, bad) for name in ("gamma", "gae_lambda") for bad in (-0.1, 1.1, math.nan)],
        *[(name, bad) for name in ("value_weight", "entropy_weight") for bad in (-0.1, math.nan, math.inf)],
        *[("batch", bad) for bad in (1, 240)],
        *[("clip_values", 0.0), ("steps", 1999), ("states", 2001), ("sticky", 1.0), ("noops", -1), ("seed", -1)],
        *[("games", bad) for bad in ("", "boxing,", "boxing,krull,boxing")],
        *[("optimizer", "adam"), ("adam_counter", "epoch"), ("patches", "all"), ("advantages", "none")],
    ],
)
def test_a_setting_of_games_that_makes_no_sense_is_refused_by_name(name: str, bad: object) -> None:
    with pytest.raises(ValueError, match=name):
        configure("atari", "sgp", **{name: bad})


def test_updates_are_those_that_the_steps_fill() -> None:
    config = configure("atari", "sgp")
    assert (config.trainer.update_steps, config.trainer.updates) == (2000, 5000)
    # With one at the start of a game these are the published 51 evaluations.
    assert config.trainer.updates // config.trainer.evaluate_every == 50
    assert configure("atari", "sgp", steps=5999).trainer.updates == 2
