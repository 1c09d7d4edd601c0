"""Curves of a run: in TensorBoard's files, by tensorboardX, or at Weights & Biases."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from examples.llama3._flags import Flags
from examples.llama3._packages import needed
from examples.llama3._run import folder_of
from examples.llama3._runtime import is_first_process


class Tracker(Protocol):
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record values of a committed step."""
        ...

    def close(self) -> None: ...


class NoTracker:
    def write(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class TensorBoard:
    """Writes the files that `tensorboard --logdir` reads; a relaunched group adds another."""

    def __init__(self, folder: Path) -> None:
        tensorboard = needed("tensorboardX", by="--tracker tensorboard")
        self._writer: Any = tensorboard.SummaryWriter(str(folder))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One run per group, continued by a relaunched group. WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, flags: Flags, config: Mapping[str, str]) -> None:
        wandb = needed("wandb", by="--tracker wandb")
        folder = folder_of(flags)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project="jaxft-llama3",
            group=flags.job,
            name=flags.group,
            id=f"{flags.job}-{flags.group}",
            resume="allow",
            dir=None if folder is None else str(folder),
            config=dict(config),
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def make_tracker(flags: Flags, config: Mapping[str, str]) -> Tracker:
    """Return what --tracker names.

    Raises:
        SettingsError: its package is not installed.
    """
    match flags.tracker if is_first_process() else None:
        case None:
            return NoTracker()
        case "tensorboard":
            folder = folder_of(flags)
            assert folder is not None
            return TensorBoard(folder / "tensorboard")
        case "wandb":
            return WeightsAndBiases(flags, config)
