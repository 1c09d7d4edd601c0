"""Every setting of a run: a frozen dataclass that is also the command line."""

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path

import jax
from jax.sharding import Mesh

from examples.llama3._config import (
    MODEL_SIZES,
    Kernel,
    ModelConfig,
    Remat,
    SettingsError,
    Size,
    check_mesh,
    check_positive,
)
from examples.llama3._data import Batches, check_vocabulary, load_corpus
from examples.llama3._optimizer import OptimizerConfig
from examples.llama3._runtime import user_cache
from examples.llama3._sharding import make_mesh


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Every setting of a run. The groups of a job share all but their own names, files and devices."""

    size: Size = "debug"
    """The model. debug and 50m are small and read bytes; the others are the published shapes."""
    steps: int = 200
    """Train until the job has committed this many steps."""
    shards: int = 4
    """Slices of a step's global batch, fixed for the life of the job. The groups that are up divide them."""
    batch_per_shard: int = 2
    """Sequences in a shard."""
    seq_len: int = 128
    """Tokens in a sequence."""

    corpus: Path | None = None
    """A text file, or a folder of them. None reads the source of Python's standard library."""
    corpus_bytes: int = 8 * 2**20
    """Read at most this much of the corpus."""
    seed: int = 0
    """Determines the initial parameters and the order of the samples."""

    learning_rate: float = 1e-3
    """The peak, after the warm-up; a cosine then decays to a tenth of it at the last step."""
    warmup_steps: int = 10
    """Committed steps over which the learning rate rises to its peak, before the cosine."""
    weight_decay: float = 0.1
    """AdamW's decay of the matrices. Norm scales do not decay."""
    clip_norm: float = 1.0
    """Scale gradients down to this global norm."""

    fsdp: int | None = None
    """Devices over which parameters and sequences are sharded. None uses as many as `tp` leaves and divide both."""
    tp: int = 1
    """Devices over which heads, feed-forward width and vocabulary are sharded."""
    pipeline: int = 1
    """Stages, each of which holds an equal part of the layers."""
    microbatches: int = 1
    """How many parts of a shard follow each other through the stages. Stages wait less with more parts."""
    context: int = 1
    """Devices over which the positions of a sequence are sharded: ring attention, for long sequences."""
    attention: Kernel = "auto"
    """auto is cudnn on CUDA, transformer-engine on ROCm if it is installed, and chunked elsewhere."""
    remat: Remat = "full"
    """What the backward pass of a layer computes again: none, selective (all but attention), or full."""
    cpu_devices: int | None = None
    """Simulate this many devices on the CPU. None uses the machine's own devices."""
    compilation_cache: Path | None = field(default_factory=user_cache)
    """Keep compiled programs in this folder, so that a relaunched group starts at once. None keeps none."""

    coordinator: str | None = None
    """The coordinator's HOST:PORT. None trains alone, with the same results."""
    group: str = "group-0"
    """This replica group's permanent name within the job."""
    job: str = "llama3"
    """The job's name at the coordinator."""
    host: str | None = None
    """The HOST or HOST:PORT at which the other groups reach this one. None detects it."""
    failure_timeout_s: float = 60.0
    """How long recovery from one failure may take before this group gives up. Long steps do not count."""

    spare: bool = False
    """Stand by, and replace a group that is lost."""
    checkpoints: Path | None = None
    """Save checkpoints in this folder, which all groups share, in case all groups die at once. None saves none."""
    checkpoint_every: int = 100
    """Committed steps between two checkpoints."""
    keep_checkpoints: int = 3
    """How many checkpoints to keep."""
    changed: tuple[str, ...] = ()
    """Settings that were changed on purpose since the checkpoint was saved, such as learning_rate, shards, job."""

    log_every: int = 10
    """Committed steps between two log lines."""
    events: Path | None = None
    """Append one JSON object per committed step to this file."""
    digest_at_end: bool = False
    """Report a digest of the final state. Equal digests mean equal bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The checked values of the flags."""

    model: ModelConfig
    optimizer: OptimizerConfig
    batches: Batches


def check_settings(flags: Flags) -> Settings:
    """Read the corpus and check everything that can be checked without a device.

    Raises:
        SettingsError: the message says which flag is invalid, and what would be valid.
    """
    check_positive(
        fsdp=1 if flags.fsdp is None else flags.fsdp,
        tp=flags.tp,
        cpu_devices=1 if flags.cpu_devices is None else flags.cpu_devices,
        failure_timeout_s=flags.failure_timeout_s,
        log_every=flags.log_every,
    )
    if flags.events is not None and flags.events.is_dir():
        raise SettingsError(
            f"--events must be a file, but {str(flags.events)!r} is a folder. Name a file in it."
        )
    model = model_config(flags)
    check_vocabulary(model.vocab_size)
    optimizer = OptimizerConfig(
        learning_rate=flags.learning_rate,
        warmup_steps=flags.warmup_steps,
        total_steps=flags.steps,
        weight_decay=flags.weight_decay,
        clip_norm=flags.clip_norm,
    )
    batches = Batches(
        corpus=load_corpus(flags.corpus, limit_bytes=flags.corpus_bytes),
        seq_len=flags.seq_len,
        batch_per_shard=flags.batch_per_shard,
        shards=flags.shards,
        seed=flags.seed,
    )
    return Settings(model=model, optimizer=optimizer, batches=batches)


def choose_mesh(flags: Flags) -> Mesh:
    """Return this group's mesh over JAX's devices.

    Raises:
        SettingsError: the mesh needs more devices than there are, or does not divide the model or the batch.
    """
    model, device_count = model_config(flags), jax.device_count()
    others = max(1, flags.tp * flags.pipeline * flags.context)
    left = max(1, device_count // others)
    divides_both = math.gcd(left, flags.batch_per_shard // max(1, flags.microbatches), model.dim)
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
    return make_mesh(fsdp, flags.tp, pipeline=flags.pipeline, context=flags.context)


def model_config(flags: Flags) -> ModelConfig:
    """Return the model of the chosen size, computed as the flags say."""
    return dataclasses.replace(
        MODEL_SIZES[flags.size],
        attention=flags.attention,
        remat=flags.remat,
        microbatches=flags.microbatches,
    )
