"""Images as rows of patches: scikit-learn's digits, which come with its wheel, or any image dataset of `datasets`."""

import logging
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np


if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)
DIGITS = "digits"
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tiff")


def choose_images(name: str | None) -> str:
    """The dataset of --dataset, or the digits if it has no images: it may be meant for another experiment."""
    if not name or name == DIGITS:
        return DIGITS
    if Path(name).is_dir():
        if any(path.suffix.lower() in SUFFIXES for path in Path(name).rglob("*")):
            return str(Path(name).resolve())
    else:
        from datasets import Image, load_dataset_builder

        try:
            features = load_dataset_builder(name).info.features or {}
        except Exception as error:
            raise ValueError(f"dataset {name} cannot be loaded: {str(error).strip().splitlines()[0]}") from error
        if any(isinstance(feature, Image) for feature in features.values()):
            return name
    logger.warning(f"{name} has no images: the digits of scikit-learn are used instead.")
    return DIGITS


@lru_cache(maxsize=2)
def load_images(name: str, size: int, most: int, seed: int = 0) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Train and test split, each images (rows, size, size, channels) between 0 and 1, and classes (rows,).

    Args:
        name: `"digits"`, a folder with a folder of images for each class, or a dataset on the Hub.
        size: Height and width after resizing; the digits keep their 8.
        most: Largest number of rows in the train split; the test split has at most a quarter of it.
        seed: Seed of the order, and of the split if the dataset has no test split.
    """
    if name == DIGITS:
        return split_rows(*digits(), most, seed)
    from datasets import load_dataset

    try:
        found = load_dataset("imagefolder", data_dir=name) if Path(name).is_dir() else load_dataset(name)
    except Exception as error:
        raise ValueError(f"images {name} cannot be loaded: {str(error).strip().splitlines()[0]}") from error
    train = found["train"] if "train" in found else found[next(iter(found))]
    if "test" in found:
        return {
            split: decode(part.shuffle(seed).select(range(min(len(part), limit))), size)
            for split, part, limit in (("train", train, most), ("test", found["test"], most // 4))
        }
    return split_rows(*decode(train.shuffle(seed).select(range(min(len(train), most * 5 // 4))), size), most, seed)


def digits() -> tuple[np.ndarray, np.ndarray]:
    """1797 handwritten digits of 8 x 8 pixels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError(
            "the digits come with scikit-learn, which is not installed: pip install 'hf_rankattn[experiments]', or name an "
            "image dataset with --dataset."
        ) from None
    found = load_digits()
    return found.images[..., None] / 16.0, found.target


def split_rows(images: np.ndarray, classes: np.ndarray, most: int, seed: int) -> dict[str, Any]:
    order = np.random.default_rng(seed).permutation(len(images))
    held_out = min(len(images) // 5, max(1, most // 4))
    test, train = order[:held_out], order[held_out : held_out + most]
    return {"train": (images[train], classes[train]), "test": (images[test], classes[test])}


def decode(rows: "datasets.Dataset", size: int) -> tuple[np.ndarray, np.ndarray]:
    from datasets import ClassLabel, Image

    pictures = [name for name, feature in rows.features.items() if isinstance(feature, Image)]
    labels = [name for name, feature in rows.features.items() if isinstance(feature, ClassLabel)]
    if not pictures or not labels:
        names = ", ".join(rows.features)
        raise ValueError(f"an image dataset needs a column of images and a column of classes; it has {names}.")
    images = [np.asarray(image.convert("RGB").resize((size, size)), np.float64) / 255 for image in rows[pictures[0]]]
    return np.stack(images), np.array(rows[labels[0]])


def patches(images: np.ndarray, patch: int) -> np.ndarray:
    """Images (rows, size, size, channels) as tokens (rows, n, patch * patch * channels), row by row.

    >>> patches(np.arange(16.0).reshape(1, 4, 4, 1), 2)[0, 1].tolist()
    [2.0, 3.0, 6.0, 7.0]
    """
    rows, size, _, channels = images.shape
    if size % patch:
        raise ValueError(f"patches of {patch} pixels do not fill images of {size}: choose a divisor.")
    count = size // patch
    cut = images.reshape(rows, count, patch, count, patch, channels).transpose(0, 1, 3, 2, 4, 5)
    return cut.reshape(rows, count * count, patch * patch * channels)
