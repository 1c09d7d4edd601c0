"""The batches of a job: the committed step alone determines which samples they hold."""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np

from jaxft._base._numbers import whole
from jaxft._errors import ConfigurationError
from jaxft.data._shuffle import mix, permute_all

# `Batch.index` is an int32, the widest integer that JAX has by default.
_MAX_SAMPLES = 2**31 - 1
# How many samples of a source go into its fingerprint. They are read before training starts.
_FINGERPRINTED = 8


class Source(Protocol):
    """A source with random access: a list, a numpy array, a grain `MapDataset`, or your own class.

    `source[i]` is a sample, a pytree of numpy arrays or numbers, with the same structure, shapes and dtypes for
    every i. It must be the same sample on each access, in every group.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """One shard of one step's batch: a pytree with the same types for every step and shard.

    Attributes:
        samples: the samples, stacked: each leaf has a new first axis, of length `samples_per_shard`.
        weight: float32, (samples_per_shard,): 1 for a sample, 0 for padding.
        index: int32, (samples_per_shard,): the number of each sample in the source, -1 for padding.
    """

    samples: Any
    weight: Any
    index: Any


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """The batches of a job: `batches(step, shard)` is a pure function, as `jaxft.fault_tolerant` needs it.

    Every sample of the source is used once per epoch, whichever group computes it and however often a step is
    retried. A step takes `shards * samples_per_shard` of them. If they do not divide the source, the last step of an
    epoch holds the remainder, padded to full shape so that nothing is compiled again; a shard of it may be all
    padding. Padding repeats a real sample, so that no loss is NaN, and has weight 0. The mean over real samples is
    then a quotient of sums over shards:

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, jaxft
        >>> from jaxft.data import Batches
        >>> batches = Batches(np.linspace(0, 1, 10, dtype=np.float32), shards=2, samples_per_shard=4)
        >>> def train_step(w, batch):
        ...     def total(w):
        ...         return jnp.sum(batch.weight * (w * batch.samples - 1.0) ** 2)
        ...     loss, grads = jax.value_and_grad(total)(w)
        ...     loss, grads, count = jaxft.psum((loss, grads, jnp.sum(batch.weight)))
        ...     return w - 0.1 * grads / count, {"loss": loss / count}
        >>> step = jaxft.fault_tolerant(train_step, manager=None, shards=batches.shards)
        >>> w = jnp.zeros(())
        >>> while step.step < 3 * batches.steps_per_epoch:
        ...     w, metrics = step(w, batches)

    Args:
        source: the samples; see `Source`. Its length is read once.
        shards: the shards of a step, as passed to `jaxft.fault_tolerant`.
        samples_per_shard: how many samples a shard holds.
        seed: determines the order, which differs in each epoch. None takes the samples in the order of the source.
        drop_last: leave out the samples that do not fill a step; if shuffled, different ones in each epoch.

    Raises:
        ConfigurationError: an argument is invalid, or the source has no samples, too few or too many.
    """

    source: Source = dataclasses.field(repr=False)
    _: dataclasses.KW_ONLY
    shards: int
    samples_per_shard: int
    seed: int | None = 0
    drop_last: bool = False
    size: int = dataclasses.field(init=False)
    """How many samples the source has."""

    def __post_init__(self) -> None:
        for name in ("shards", "samples_per_shard"):
            object.__setattr__(self, name, whole(name, getattr(self, name), 1))
        if self.seed is not None:
            object.__setattr__(self, "seed", whole("seed", self.seed))
        if isinstance(self.source, Mapping):
            raise ConfigurationError(
                f"The source is a {type(self.source).__name__}, which has no sample number 0. Batches reads samples "
                "by number, `source[i]`: pass a list with one dict per sample, or a class of your own whose "
                "__getitem__ returns `{name: column[i] for name, column in columns.items()}`."
            )
        if (rows := _rows(self.source)) is not None:
            count = len(self.source)
            raise ConfigurationError(
                f"The source is a tuple of {count} arrays of {rows} rows each, which would be {count} samples. If "
                "they are columns, such as inputs and labels, pass `list(zip(*columns))`: sample i is then row i of "
                "each. If each array is a sample, pass a list of them."
            )
        if not (hasattr(self.source, "__len__") and hasattr(self.source, "__getitem__")):
            raise ConfigurationError(
                f"The source is a {type(self.source).__name__}, which has no length or cannot be indexed. Batches "
                "reads samples in any order and more than once, `source[i]`: pass a list, a numpy array, or a class "
                "of your own with __len__ and __getitem__. For iterators there is jaxft.data.from_iterator."
            )
        object.__setattr__(self, "size", len(self.source))
        if not 1 <= self.size <= _MAX_SAMPLES:
            raise ConfigurationError(
                f"The source has {self.size} samples, but it must have 1 to {_MAX_SAMPLES}. Batches counts epochs "
                "itself, so pass a source that repeats without end as it is before repeating."
            )
        if self.drop_last and self.size < self._samples_per_step:
            raise ConfigurationError(
                f"The source has {self.size} samples, but a step takes {self._samples_per_step} ({self.shards} "
                f"shards x {self.samples_per_shard}), so drop_last would leave nothing. Lower samples_per_shard."
            )

    @property
    def steps_per_epoch(self) -> int:
        """How many steps use every sample once (with `drop_last`, all but those left out)."""
        whole, rest = divmod(self.size, self._samples_per_step)
        return whole if self.drop_last or rest == 0 else whole + 1

    def epoch_of(self, step: int) -> int:
        """The epoch, counted from 0, that a step belongs to."""
        return step // self.steps_per_epoch

    @property
    def fingerprint(self) -> str:
        """A text that is the same in all groups with the same data.

        It contains the length, the sizes, the seed, and a digest of a few samples from all over the source. Passed as
        `jaxft.Manager(..., settings={"data": batches.fingerprint})`, it keeps out a group with different data.
        """
        digest = hashlib.sha256()
        for number in sorted({(self.size - 1) * k // (_FINGERPRINTED - 1) for k in range(_FINGERPRINTED)}):
            sample = _read(self.source, number)
            digest.update(f"{number} {sample.types}".encode())
            for leaf in sample.leaves:
                digest.update(leaf.tobytes())
        order = "in order" if self.seed is None else f"seed {self.seed}"
        last = ", drop_last" if self.drop_last else ""
        return (
            f"{self.size} samples, {self.shards} shards x {self.samples_per_shard}, {order}{last}, "
            f"content {digest.hexdigest()[:16]}"
        )

    def __call__(self, step: int, shard: int) -> Batch:
        """Return a shard of a step's batch, as numpy arrays.

        Raises:
            ConfigurationError: there is no such step or shard, or samples differ in structure, shape or dtype.
        """
        index = self._index(step, shard)
        real = index[index >= 0]
        filler = real[0] if len(real) else self._index(step, 0)[0]
        numbers = np.where(index >= 0, index, filler)
        return Batch(
            samples=self._stacked(numbers),
            weight=(index >= 0).astype(np.float32),
            index=index.astype(np.int32),
        )

    def samples_only(self) -> "Samples":
        """Return the same batches without weight and index: for a step that takes the stacked samples alone.

        Raises:
            ConfigurationError: the last step of an epoch has padding, which differs from samples only in its weight.
        """
        if not self.drop_last and self.size % self._samples_per_step:
            raise ConfigurationError(
                f"{self.size} samples do not fill steps of {self._samples_per_step}, so batches need their weight: "
                "pass drop_last=True, or use `batch.samples` and `batch.weight` in the step."
            )
        return Samples(self)

    @property
    def _samples_per_step(self) -> int:
        return self.shards * self.samples_per_shard

    def _index(self, step: int, shard: int) -> np.ndarray:
        """The numbers of a shard's samples, int64, with -1 for padding, which is always at the end."""
        step, shard = whole("step", step), whole("shard", shard)
        if step < 0 or not 0 <= shard < self.shards:
            raise ConfigurationError(
                f"There is no shard {shard} of step {step}: steps count from 0, and these batches have {self.shards} "
                "shards. Pass the same number to jaxft.fault_tolerant: `shards=batches.shards`."
            )
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        first = step_of_epoch * self._samples_per_step + shard * self.samples_per_shard
        index = np.full(self.samples_per_shard, -1, np.int64)
        positions = np.arange(first, min(first + self.samples_per_shard, self.size))
        if self.seed is not None and len(positions):
            positions = permute_all(positions, size=self.size, key=mix(self.seed, epoch))
        index[: len(positions)] = positions
        return index

    def _stacked(self, numbers: np.ndarray) -> Any:
        first = _read(self.source, int(numbers[0]))
        if isinstance(self.source, np.ndarray):
            return self.source[numbers]
        stacks = [np.empty((len(numbers), *leaf.shape), leaf.dtype) for leaf in first.leaves]
        last = -1
        for place, number in enumerate(numbers.tolist()):
            if number == last:  # padding
                for stack in stacks:
                    stack[place] = stack[place - 1]
                continue
            last = number
            leaves, tree = jax.tree.flatten(self.source[number])
            arrays = list(map(np.asarray, leaves))
            if tree != first.tree or any(map(_differ, arrays, first.leaves)):
                raise self._uneven(number, first)
            for stack, array in zip(stacks, arrays, strict=True):
                stack[place] = array
        return jax.tree.unflatten(first.tree, stacks)

    def _uneven(self, number: int, first: "_Sample") -> ConfigurationError:
        sample = _read(self.source, number)
        return ConfigurationError(
            f"Sample {number} of the source is {sample.types}, but sample {first.number} is {first.types}. All "
            "need the same containers, shapes and dtypes: pad, crop or convert them in the source."
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """The batches of `Batches.samples_only`: `samples(step, shard)` are the stacked samples."""

    batches: Batches

    @property
    def shards(self) -> int:
        return self.batches.shards

    @property
    def steps_per_epoch(self) -> int:
        return self.batches.steps_per_epoch

    @property
    def fingerprint(self) -> str:
        return self.batches.fingerprint

    def __call__(self, step: int, shard: int) -> Any:
        """Return the samples of a shard of a step, stacked along a new first axis of length `samples_per_shard`."""
        return self.batches(step, shard).samples


@dataclasses.dataclass(frozen=True, slots=True)
class _Sample:
    number: int
    tree: Any
    types: str  # of the leaves, with their paths
    leaves: list[np.ndarray]


def _rows(source: Any) -> int | None:
    """How many rows each array has in a tuple of arrays that may be columns; None if it is no such tuple."""
    if not isinstance(source, tuple):
        return None
    shapes: set[Any] = {getattr(entry, "shape", ())[:1] for entry in source}
    return shapes.pop()[0] if len(shapes) == 1 and () not in shapes else None


def _differ(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape != other.shape or one.dtype != other.dtype


def _read(source: Source, number: int) -> _Sample:
    sample = source[number]
    paths_and_leaves, tree = jax.tree_util.tree_flatten_with_path(sample)
    leaves = [np.asarray(leaf) for _, leaf in paths_and_leaves]
    if not leaves or any(leaf.dtype.kind in "OSUMm" for leaf in leaves):
        raise ConfigurationError(
            f"Sample {number} of the source, a {type(sample).__name__}, is not a pytree of arrays and numbers. "
            "Convert it in the source (tokenize text, decode images)."
        )
    labels = (jax.tree_util.keystr(path) for path, _ in paths_and_leaves)
    types = (f"{label} {leaf.dtype}{list(leaf.shape)}" for label, leaf in zip(labels, leaves, strict=True))
    return _Sample(number=number, tree=tree, types=", ".join(types).strip(), leaves=leaves)
