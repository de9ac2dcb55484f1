"""All layouts of miniImageNet give the same images in the same order."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.written import SMALL_MINI, WORDNET_IDS, are_equal, dump, picture, write_class_folders, write_picture

from sgp.benchmarks.datasets import miniimagenet
from sgp.benchmarks.datasets.images import DamagedData, MissingData

pytest.importorskip("PIL", reason="of the extra 'benchmarks'")

NAMES = sorted(WORDNET_IDS)
ORDER = np.random.RandomState(1234).permutation(7)


def write_split_folders(root: Path) -> None:
    for name in WORDNET_IDS:
        for place, number in enumerate(ORDER):
            part = "train" if place < 5 else "test"
            write_picture(root / part / name / f"{name}{number:08d}.jpg", picture(name, number))


def write_listed_images(root: Path, *, lists: str = ".") -> None:
    (root / lists).mkdir(parents=True, exist_ok=True)
    for name, file in zip(WORDNET_IDS, ("train", "val", "test"), strict=True):
        with (root / lists / f"{file}.csv").open("w", newline="") as opened:
            writer = csv.writer(opened)
            writer.writerow(["filename", "label"])
            for number in (3, 1, 2, 0, 6, 5, 4):
                writer.writerow([f"{name}{number:08d}.jpg", name])
                write_picture(root / "images" / f"{name}{number:08d}.jpg", picture(name, number))


def write_few_shot_pickles(root: Path, *, validation: str = "val", protocol: int = 2) -> None:
    for name, part in zip(WORDNET_IDS, ("train", validation, "test"), strict=True):
        pixels = np.stack([picture(name, number) for number in range(7)])
        content = {"image_data": pixels, "class_dict": {name: list(range(7))}}
        dump(root / f"mini-imagenet-cache-{part}.pkl", content, protocol)


def write_few_shot_folders(root: Path) -> None:
    for name, part in zip(WORDNET_IDS, ("train", "val", "test"), strict=True):
        write_class_folders(root / part, [name])


LAYOUTS = {
    "divided folders": write_split_folders,
    "class folders": write_class_folders,
    "few-shot folders": write_few_shot_folders,
    "lists": write_listed_images,
    "lists in splits": lambda root: write_listed_images(root, lists="splits"),
    "pickles": write_few_shot_pickles,
    "pickles of learn2learn": lambda root: write_few_shot_pickles(root, validation="validation", protocol=4),
}


@pytest.mark.parametrize("folder", ["miniimagenet", "mini-imagenet", "."])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_images_in_the_same_order(tmp_path: Path, layout: str, folder: str) -> None:
    LAYOUTS[layout](tmp_path / folder)
    images = miniimagenet.read(tmp_path, SMALL_MINI)
    assert images.classes == NAMES
    assert images.train.shape == (15, 3, 84, 84)
    assert images.train_labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert images.test_labels.tolist() == [0] * 2 + [1] * 2 + [2] * 2
    expected = [picture(name, number) for name in NAMES for number in sorted(ORDER[:5])]
    np.testing.assert_array_equal(images.train.permute(0, 2, 3, 1).numpy(), np.stack(expected))
    held = [picture(name, number) for name in NAMES for number in sorted(ORDER[5:])]
    np.testing.assert_array_equal(images.test.permute(0, 2, 3, 1).numpy(), np.stack(held))
    # From the cache, and from the files in spite of it.
    assert are_equal(miniimagenet.read(tmp_path, SMALL_MINI), images)
    assert are_equal(miniimagenet.decode(tmp_path, SMALL_MINI), images)


@pytest.mark.parametrize("as_list", [False, True], ids=["array", "list"])
def test_acls_pickle_is_split_as_by_its_script(tmp_path: Path, as_list: bool) -> None:
    numbers = np.random.default_rng(0).permutation(np.arange(3).repeat(7))
    pixels = np.stack([picture("n1", row) for row in range(21)])
    dump(
        tmp_path / "miniimagenet" / "data.pkl",
        {"images": list(pixels) if as_list else pixels, "labels": numbers.tolist()},
    )
    images = miniimagenet.read(tmp_path, SMALL_MINI)
    generator = np.random.RandomState(1234)
    for label in range(3):
        rows = list(np.flatnonzero(numbers == label))
        generator.shuffle(rows)
        expected = pixels[sorted(rows[5:])].transpose(0, 3, 1, 2)
        np.testing.assert_array_equal(images.test[2 * label : 2 * label + 2].numpy(), expected)
    assert images.classes == ["0", "1", "2"]


def test_images_of_another_size_or_mode_are_converted(tmp_path: Path) -> None:
    from PIL import Image

    write_class_folders(tmp_path)
    large = picture("n1", 0, side=120)
    for number, pixels in ((0, large), (1, large[..., 0])):
        write_picture(tmp_path / NAMES[0] / f"{NAMES[0]}{number:08d}.jpg", pixels)
    images = miniimagenet.read(tmp_path, SMALL_MINI)
    both = {tuple(row.flatten().tolist()) for row in torch.cat([images.train, images.test])}
    for pixels in (large, np.stack([large[..., 0]] * 3, axis=-1)):
        resized = Image.fromarray(pixels).resize((84, 84), Image.Resampling.BILINEAR)
        assert tuple(np.asarray(resized).transpose(2, 0, 1).flatten().tolist()) in both


def test_a_truncated_image_is_named_in_the_error(tmp_path: Path) -> None:
    from PIL import Image

    write_class_folders(tmp_path)
    path = tmp_path / NAMES[1] / f"{NAMES[1]}{2:08d}.jpg"
    Image.fromarray(picture("n1", 1)).save(path, format="JPEG")
    whole = path.read_bytes()
    for size in (len(whole) // 2, 100, 0):
        path.write_bytes(whole[:size])
        with pytest.raises(DamagedData, match=f"{path.name}' is truncated or not an image"):
            miniimagenet.read(tmp_path, SMALL_MINI)


def test_a_missing_data_set_is_reported_with_its_layouts(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match=r"WNID/\*.jpg"):
        miniimagenet.read(tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_missing_image_or_class_raises_an_error(tmp_path: Path, layout: str) -> None:
    LAYOUTS[layout](tmp_path)
    with pytest.raises(DamagedData, match=r"(class|has) .*should have"):
        miniimagenet.read(tmp_path, replace(SMALL_MINI, train_each=6))
    with pytest.raises(DamagedData, match="3 classes and should have 4"):
        miniimagenet.read(tmp_path, replace(SMALL_MINI, classes=4))
    with pytest.raises(DamagedData, match="not those of miniImageNet"):
        miniimagenet.read(tmp_path, replace(SMALL_MINI, names="0" * 64))
    digest = miniimagenet.digest_names(NAMES)
    assert miniimagenet.read(tmp_path, replace(SMALL_MINI, names=digest)).classes == NAMES


def test_an_image_in_both_parts_raises_an_error(tmp_path: Path) -> None:
    write_split_folders(tmp_path)
    name = f"{NAMES[0]}{ORDER[0]:08d}.jpg"
    (tmp_path / "test" / NAMES[0] / f"{NAMES[0]}{ORDER[5]:08d}.jpg").unlink()
    write_picture(tmp_path / "test" / NAMES[0] / name, picture(NAMES[0], int(ORDER[0])))
    with pytest.raises(DamagedData, match=f"{name}.* both a training and a test image"):
        miniimagenet.read(tmp_path, SMALL_MINI)


def test_folders_without_test_images_raise_an_error(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "train")
    with pytest.raises(DamagedData, match="no folder test with images beside it"):
        miniimagenet.read(tmp_path, SMALL_MINI)


def test_a_listed_image_that_is_missing_is_named_in_the_error(tmp_path: Path) -> None:
    write_listed_images(tmp_path)
    path = tmp_path / "images" / f"{NAMES[2]}{4:08d}.jpg"
    path.unlink()
    with pytest.raises(DamagedData, match=path.name):
        miniimagenet.read(tmp_path, SMALL_MINI)
    (tmp_path / "train.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DamagedData, match=r"train.csv' is not a list"):
        miniimagenet.read(tmp_path, SMALL_MINI)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("mini-imagenet-cache-train.pkl", {"image_data": [1]}),
        (
            "mini-imagenet-cache-train.pkl",
            {"image_data": np.zeros((2, 84, 84, 3), np.uint8), "class_dict": {"n1": [2]}},
        ),
        ("data.pkl", {"images": np.zeros((2, 32, 32, 3), np.uint8), "labels": [0, 1]}),
        ("data.pkl", {"images": [np.zeros(2), np.zeros(3)], "labels": [0, 1]}),
        ("data.pkl", {}),
    ],
    ids=["few-shot", "rows", "size", "ragged", "empty"],
)
def test_a_pickle_of_something_else_raises_an_error(tmp_path: Path, file: str, content: dict[str, object]) -> None:
    dump(tmp_path / "miniimagenet" / file, content)
    with pytest.raises(DamagedData, match=file):
        miniimagenet.read(tmp_path, SMALL_MINI)
