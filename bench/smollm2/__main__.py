"""Fine-tune SmolLM2 on one task after another, and measure what it learns and what it forgets.

    python -m bench.smollm2 sgp --lr 1e-4 --seed 0 --out results/smollm2

Data: ``sgp data get english``, fivetext and clinc150 (``$SGP_DATA``). The converted model, the calibration text and
what methods compute from it alone are kept in ``$SGP_CACHE``. A run whose file is there is skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import sgp
from bench.smollm2.measure import compute_loss, measure_answers, measure_loss
from bench.smollm2.methods import METHODS, Batch, Finetune, Settings
from bench.smollm2.model import load_model, load_tokenizer
from bench.smollm2.tasks import QUESTIONS, TASKS, PromptTask, read_english, read_task, split_batches
from sgp.benchmarks.datasets.cache import get_cache_folder
from sgp.benchmarks.datasets.images import find_data_folder

# Prompts whose inputs a memory takes after a task.
REMEMBERED = 64
WARM_UP = 0.1


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one method, or skip it if its file is there."""
    options = _make_parser().parse_args(arguments)
    path = options.out / f"{_name_options(options)}.json"
    if path.is_file():
        print(f"{path} already exists")
        return
    result = run(options)
    options.out.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)
    print(json.dumps(result))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Fine-tune on the tasks with one method, and return everything that was measured."""
    torch.manual_seed(options.seed)
    tokenizer, model = load_tokenizer(), load_model()
    data = find_data_folder(options.data, "the texts")
    tasks = [read_task(name, data, tokenizer, options.seed) for name in options.tasks]
    calibration = _sample_once(model, tokenizer, "calibration", seed=0, texts=options.calibration)
    held_out = {"self-sampled": _sample_once(model, tokenizer, "held-out", seed=1, texts=12)}
    held_out |= read_english(data, tokenizer)
    base = _measure_base(model, tasks, held_out, options)
    settings = Settings(**{field.name: getattr(options, field.name) for field in fields(Settings)})
    cache = get_cache_folder() / "smollm2" / f"calibration-{options.calibration}"
    started = time.perf_counter()
    method = METHODS[options.method](model, calibration, settings, cache)
    prepared = time.perf_counter() - started
    seconds: list[float] = []
    for index, task in enumerate(tasks):
        method.begin_task()
        if method.parameters:
            seconds += train(method, task, options, seed=1000 * options.seed + index)
        if index + 1 < len(tasks):  # after the last one nothing follows
            method.end_task(list(task.sample_batches(REMEMBERED // options.batch, options.batch, options.seed)))
    method.finish()
    answers, losses = _measure(model, tasks, held_out, options)
    return {
        "command": "python -m bench.smollm2 " + " ".join(sys.argv[1:]),
        "method": options.method,
        "settings": asdict(settings),
        "options": {name: str(value) for name, value in vars(options).items()},
        "tasks": {
            name: {"accuracy": accuracy, "loss": loss, "base_accuracy": base[0][name][0], "base_loss": base[0][name][1]}
            for name, (accuracy, loss) in answers.items()
        },
        "rise": {name: loss - base[1][name] for name, loss in losses.items()},
        "base": base[1],
        "step_seconds": median(seconds) if seconds else 0.0,
        "prepare_seconds": prepared,
        "bytes": method.count_bytes(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
    }


def train(method: Finetune, task: PromptTask, options: argparse.Namespace, seed: int) -> list[float]:
    """Train on one task with a warm-up and a linear decay, and return the seconds of each step."""
    parameters = method.parameters
    optimizer = torch.optim.AdamW(parameters, lr=options.lr, weight_decay=0.0, fused=True)
    warm_up = max(1, round(WARM_UP * options.steps))
    factors = [
        min((step + 1) / warm_up, (options.steps - step) / (options.steps - warm_up)) for step in range(options.steps)
    ]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factors[min(step, options.steps - 1)])
    method.attach(optimizer)
    method.model.train()
    seconds = []
    for batch in method.mix(task.sample_batches(options.steps, options.batch, seed), seed):
        started = time.perf_counter()
        loss = compute_loss(method.model, batch)
        penalty = method.compute_penalty()
        (loss if penalty is None else loss + penalty).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
        if options.verbose:
            print(f"{task.name} step {len(seconds)}: loss {loss.item():.3f}, {seconds[-1]:.1f} s", flush=True)
    method.end_steps()
    return seconds


def _measure(
    model: nn.Module, tasks: Sequence[PromptTask], held_out: dict[str, list[Batch]], options: argparse.Namespace
) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
    """Return accuracy and loss of the answers by task, and the loss by held-out text."""
    answers = {}
    for task in tasks:
        prompts = task.test if options.test else task.validation
        answers[task.name] = measure_answers(model, task, prompts[: options.prompts])
    return answers, {name: measure_loss(model, batches) for name, batches in held_out.items()}


def _measure_base(
    model: nn.Module, tasks: Sequence[PromptTask], held_out: dict[str, list[Batch]], options: argparse.Namespace
) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
    """Return the measurements of the base model, which are made once."""
    part = "test" if options.test else "validation"
    path = get_cache_folder() / "smollm2" / f"base-{part}-{options.prompts}-{'-'.join(options.tasks)}.json"
    if path.is_file():
        answers, losses = json.loads(path.read_text(encoding="utf-8"))
        return answers, losses
    found = _measure(model, tasks, held_out, options)
    path.write_text(json.dumps(found), encoding="utf-8")
    return found


def _sample_once(model: nn.Module, tokenizer: Any, name: str, *, seed: int, texts: int) -> list[Batch]:
    """Return text that the model samples from itself, from the cache if it is there."""
    path = get_cache_folder() / "smollm2" / f"{name}-{texts}.safetensors"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        sampled = sgp.calibrate(model, tokenizer, texts=texts, batch=texts, seed=seed)[0]
        save_file(sampled, path)
    return split_batches(load_file(path))


def name_run(arguments: Sequence[str]) -> str:
    """Return the name of a run's file: its method and every option that is not the default."""
    return _name_options(_make_parser().parse_args(arguments))


def _name_options(options: argparse.Namespace) -> str:
    defaults = vars(_make_parser().parse_args([options.method]))
    parts = [
        f"{name}{'-'.join(value) if isinstance(value, list) else value}"
        for name, value in vars(options).items()
        if value != defaults[name] and name not in ("method", "out", "data", "verbose", "lr", "seed")
    ]
    return "_".join([options.method, f"lr{options.lr:g}", *parts, f"seed{options.seed}"])


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.smollm2", description=__doc__)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", nargs="+", choices=QUESTIONS, default=list(TASKS))
    parser.add_argument("--steps", type=int, default=40, help="steps of each task")
    parser.add_argument("--batch", type=int, default=8, help="texts of a step")
    parser.add_argument("--calibration", type=int, default=64, help="number of calibration texts")
    parser.add_argument("--prompts", type=int, default=500, help="prompts that each task is evaluated on")
    parser.add_argument("--test", action="store_true", help="evaluate on test texts instead of validation texts")
    for field in fields(Settings):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results/smollm2"))
    parser.add_argument("--verbose", action="store_true")
    return parser


if __name__ == "__main__":
    main()
