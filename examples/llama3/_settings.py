"""The checked values of the flags, and which of them must be the same in all groups."""

import dataclasses
import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh

from examples.llama3._config import (
    BYTE_VOCAB_SIZE,
    MODEL_SIZES,
    ModelConfig,
    SettingsError,
    check_mesh,
    check_positive,
    check_seed,
)
from examples.llama3._corpus import load_corpus
from examples.llama3._data import Batches
from examples.llama3._flags import OWN_TO_A_GROUP, Flags, with_recipe
from examples.llama3._optimizer import OptimizerConfig
from examples.llama3._runtime import processes_of_group
from examples.llama3._sharding import make_mesh
from examples.llama3._tokenizer import Tokenizer, load_tokenizer
from examples.llama3._weights import check_weights

logger = logging.getLogger("llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The checked values of the flags.

    Attributes:
        accumulate: the batches over which each shard accumulates its gradients.
    """

    model: ModelConfig
    optimizer: OptimizerConfig
    batches: Batches
    accumulate: int

    @property
    def tokens_per_step(self) -> int:
        return self.batches.shards * self.batches.batch_per_shard * self.batches.seq_len


def check_settings(flags: Flags) -> Settings:
    """Read the corpora and check everything that can be checked without a device.

    Raises:
        SettingsError: a flag is invalid; the message names it and valid values.
    """
    flags = with_recipe(flags)
    check_positive(
        failure_timeout_s=flags.failure_timeout_s, log_every=flags.log_every, eval_batches=flags.eval_batches
    )
    for name in (
        "fsdp",
        "tp",
        "pipeline",
        "context",
        "microbatches",
        "cpu_devices",
        "eval_every",
        "diloco_every",
    ):
        if (value := getattr(flags, name)) is not None:
            check_positive(**{name: value})
    check_seed(flags.seed)
    _check_together(flags)
    _check_events(flags.events)
    assert flags.learning_rate is not None
    assert flags.warmup_steps is not None
    assert flags.final_fraction is not None
    optimizer = OptimizerConfig(
        learning_rate=flags.learning_rate,
        warmup_steps=flags.warmup_steps,
        total_steps=flags.steps * (flags.diloco_every or 1),
        weight_decay=flags.weight_decay,
        clip_norm=flags.clip_norm,
        schedule=flags.schedule,
        final_fraction=flags.final_fraction,
        beta1=flags.beta1,
        beta2=flags.beta2,
        epsilon=flags.epsilon,
        decayed=flags.decayed,
        any_mesh=flags.other_meshes,
    )
    accumulate = _accumulate(flags)
    tokenizer = load_tokenizer(flags.tokenizer)
    model = with_vocabulary(model_config(flags), tokenizer)
    if flags.initial_weights is not None:
        check_weights(flags.initial_weights, model)
    corpora = [
        load_corpus(
            source,
            tokenizer=tokenizer,
            cache=flags.corpus_cache,
            limit_bytes=flags.corpus_bytes,
            field=flags.text_field,
        )
        for source in flags.corpus or (None,)
    ]
    batches = Batches(
        corpora=corpora,
        weights=flags.corpus_weights or None,
        seq_len=flags.seq_len,
        batch_per_shard=flags.batch_per_shard * accumulate,
        shards=flags.shards,
        vocab_size=model.vocab_size,
        held_out=0.0 if flags.eval_every is None else flags.held_out,
        seed=flags.seed,
    )
    return Settings(model=model, optimizer=optimizer, batches=batches, accumulate=accumulate)


def model_config(flags: Flags) -> ModelConfig:
    """Return the model of the chosen size, computed as the flags say."""
    return dataclasses.replace(
        MODEL_SIZES[flags.size],
        attention=flags.attention,
        remat=flags.remat,
        microbatches=flags.microbatches,
    )


def with_vocabulary(model: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """Return a model with room for a tokenizer's ids: debug and 50m take any, the others only theirs."""
    if model.vocab_size == BYTE_VOCAB_SIZE:
        rounded = -(-tokenizer.vocab_size // 64) * 64
        return dataclasses.replace(model, vocab_size=rounded)
    if tokenizer.vocab_size > model.vocab_size:
        raise SettingsError(
            f"The tokenizer has {tokenizer.vocab_size} token ids, but this --size has {model.vocab_size}. Choose "
            "the model's own tokenizer."
        )
    return model


def choose_mesh(flags: Flags) -> Mesh:
    """Return this group's mesh over JAX's devices.

    Raises:
        SettingsError: the mesh needs more devices than there are, or does not divide the model or the batch.
    """
    model, device_count = model_config(flags), jax.device_count()
    left = max(1, device_count // (flags.tp * flags.pipeline * flags.context))
    divides_both = math.gcd(left, flags.batch_per_shard // flags.microbatches, model.dim)
    fsdp = divides_both if flags.fsdp is None else flags.fsdp
    check_mesh(
        model,
        fsdp=fsdp,
        tp=flags.tp,
        pipeline=flags.pipeline,
        context=flags.context,
        batch_per_shard=flags.batch_per_shard,
        seq_len=flags.seq_len,
        device_count=device_count,
    )
    mesh = make_mesh(fsdp, flags.tp, pipeline=flags.pipeline, context=flags.context)
    if mesh.size < device_count:
        logger.warning(
            "%d of %d devices are not used: the mesh is %s. fsdp x --microbatches must divide the %d sequences of "
            "--batch-per-shard, and fsdp must divide the model width %d. Or give each group its own devices.",
            *(device_count - mesh.size, device_count, mesh_text(mesh), flags.batch_per_shard, model.dim),
        )
    return mesh


def mesh_text(mesh: Mesh) -> str:
    """Return the axes of a mesh and their sizes, as text: fsdp, tp, and what else divides something."""
    shown = ((axis, size) for axis, size in mesh.shape.items() if size > 1 or axis in ("fsdp", "tp"))
    return " x ".join(f"{axis} {size}" for axis, size in shown)


def job_settings(flags: Flags, settings: Settings, mesh: Mesh) -> dict[str, str]:
    """Return the settings that must be the same in all groups and over all restarts, by the names of their flags."""
    flags = with_recipe(flags)
    names = (field.name for field in dataclasses.fields(flags) if field.name not in OWN_TO_A_GROUP)
    chosen = {name: str(getattr(flags, name)) for name in names}
    return chosen | {
        "corpus": settings.batches.fingerprint,
        "batch_tokens": str(settings.tokens_per_step if settings.accumulate > 1 else None),
        "held_out": str(settings.batches.held_out),
        # In place of the mesh: checkpoints of versions without this flag do not have it.
        **({"other_meshes": "True"} if flags.other_meshes else _sizes(mesh)),
    }


def _sizes(mesh: Mesh) -> dict[str, str]:
    return {axis: str(size) for axis, size in mesh.shape.items()}


def _check_together(flags: Flags) -> None:
    """Check flags that need one another."""
    needs = (
        ("--checkpoints", flags.checkpoints is not None, "--coordinator", flags.coordinator is not None),
        ("--spare", flags.spare, "--coordinator", flags.coordinator is not None),
        ("--changed", bool(flags.changed), "--checkpoints or --run", bool(flags.checkpoints or flags.run)),
        ("--tracker tensorboard", flags.tracker == "tensorboard", "--run", flags.run is not None),
        ("--profile", flags.profile is not None, "--run", flags.run is not None),
    )
    for flag, given, other, fulfilled in needs:
        if given and not fulfilled:
            raise SettingsError(f"{flag} needs {other}, which was not given.")
    if flags.profile is not None and not 1 <= flags.profile[0] <= flags.profile[1]:
        raise SettingsError(
            f"--profile takes the first and the last step to trace, not {flags.profile[0]} and {flags.profile[1]}."
        )
    if flags.export_weights is not None and (nproc := processes_of_group()) > 1:
        raise SettingsError(
            f"--export-weights takes groups of one process, but this one has {nproc} (--nproc). Leave it out and "
            "save --checkpoints, which one process can read (docs/checkpoints.md)."
        )
    if flags.coordinator is None:  # of a job, another group may have written it when this one starts again
        check_export(flags)


def check_export(flags: Flags) -> None:
    """Check that the weights at the end are not to be written over others.

    Raises:
        SettingsError: their folder exists.
    """
    if flags.export_weights is not None and flags.export_weights.exists():
        raise SettingsError(
            f"--export-weights must be a new folder, but {str(flags.export_weights)!r} exists."
        )


def _check_events(path: Path | None) -> None:
    """Check that the event file can be written, without making it."""
    if path is None:
        return
    if path.is_dir():
        raise SettingsError(f"--events must be a file, but {str(path)!r} is a folder. Name a file in it.")
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if existing != path and not existing.is_dir():
        raise SettingsError(f"--events {str(path)!r} cannot be written: {str(existing)!r} is not a folder.")
    if not os.access(existing, os.W_OK):
        raise SettingsError(f"--events {str(path)!r} cannot be written: {str(existing)!r} is read-only.")


def _accumulate(flags: Flags) -> int:
    """How many batches each shard accumulates."""
    if flags.batch_tokens is None:
        return 1
    check_positive(seq_len=flags.seq_len, batch_per_shard=flags.batch_per_shard, shards=flags.shards)
    at_once = flags.shards * flags.batch_per_shard * flags.seq_len
    if flags.batch_tokens < 1 or flags.batch_tokens % at_once != 0:
        raise SettingsError(
            f"--batch-tokens must be a multiple of {at_once:,} ({flags.shards} shards x {flags.batch_per_shard} "
            f"sequences x {flags.seq_len} tokens), not {flags.batch_tokens:,}."
        )
    return flags.batch_tokens // at_once
