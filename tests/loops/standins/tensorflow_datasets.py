"""Synthetic data in place of tensorflow_datasets: the calls of the loops, with the shapes of the real sets."""

import os
from types import SimpleNamespace

import jax
import numpy as np

SAMPLES = int(os.environ.get("STANDIN_SAMPLES", "2048"))
SHAPES = {
    "mnist": (28, 28, 1),
    "fashion_mnist": (28, 28, 1),
    "binarized_mnist": (28, 28, 1),
    "cifar10": (32, 32, 3),
}


class _Source:
    def __init__(self, name, split):
        self._shape = SHAPES[name]
        self._seed = len(split)
        features = {"image": SimpleNamespace(shape=self._shape), "label": SimpleNamespace(num_classes=10)}
        self.dataset_info = SimpleNamespace(features=features)
        self._binary = name.startswith("binarized")

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        """A dark image with one bright row, whose place is the label."""
        label = index * 7 % 10
        image = np.random.default_rng([self._seed, index]).integers(0, 64, self._shape)
        image[2 * label] += 191
        image = (image > 32) if self._binary else image
        return {"image": image.astype(np.uint8), "label": np.int64(label)}


class _Dataset:
    """A chain of generators, as tf.data has them."""

    def __init__(self, stream):
        self._stream = stream

    def __iter__(self):
        return iter(self._stream())

    as_numpy_iterator = __iter__

    def cache(self):
        return self

    def prefetch(self, *_, **__):
        return self

    def map(self, function, **_):
        return _Dataset(lambda: map(function, self))

    def shuffle(self, *_, seed=None, **__):
        def stream():
            samples = list(self)
            order = np.random.default_rng(seed).permutation(len(samples))
            return (samples[i] for i in order)

        return _Dataset(stream)

    def repeat(self):
        def stream():
            while True:
                yield from self

        return _Dataset(stream)

    def batch(self, size, *_, **__):
        def stream():
            held = []
            for sample in self:
                held.append(sample)
                if len(held) == size:
                    yield jax.tree.map(lambda *leaves: np.stack(leaves), *held)
                    held = []

        return _Dataset(stream)


class _Text:
    """Sentences in place of lm1b."""

    def __init__(self, split):
        self._first = 0 if split == "train" else SAMPLES

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        number = self._first + int(index)
        return {"text": f"{number} times {number} is {number * number}."}


def data_source(name, split):
    if name == "lm1b":
        return _Text(split)
    return [_Source(name, each) for each in split] if isinstance(split, list) else _Source(name, split)


def load(name, split=None, *, with_info=False, **_):
    if split is None:
        return {each: load(name, each) for each in ("train", "test")}
    kind, _, percent = split.partition("[")
    source = _Source(name.split(":")[0], kind)
    first, last = (int(part.rstrip("]%") or 0) for part in (percent or "0:100").split(":"))
    numbers = range(first * len(source) // 100, last * len(source) // 100)
    data = _Dataset(lambda: (source[i] for i in numbers))
    info = SimpleNamespace(splits={split: SimpleNamespace(num_examples=len(numbers))})
    return (data, info) if with_info else data


def split_for_jax_process(split, **_):
    return split


def as_numpy(data):
    return data
