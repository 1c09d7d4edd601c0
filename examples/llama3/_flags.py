"""Every setting of a run: a frozen dataclass that is also the command line."""

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from examples.llama3._config import Kernel, Remat, Size
from examples.llama3._optimizer import Decayed, Schedule
from examples.llama3._recipe import RECIPES
from examples.llama3._runtime import user_cache


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Every setting of a run. The groups of a job share all but their own names, files and devices."""

    size: Size = "debug"
    """The model. debug and 50m are small; the others are the published shapes."""
    steps: int = 200
    """Train until the job has committed this many steps."""
    shards: int = 4
    """Slices of a step's global batch, fixed for the life of the job. The groups that are up divide them."""
    batch_per_shard: int = 2
    """Sequences of a shard that are computed at once."""
    seq_len: int = 128
    """Tokens in a sequence."""
    batch_tokens: int | None = None
    """Tokens in a step. Each shard then accumulates gradients over as many batches as that takes. None: one batch."""

    corpus: tuple[Path, ...] = ()
    """Text, .jsonl or .parquet files, folders of them, or .npy arrays of ids. None: Python's standard library."""
    corpus_weights: tuple[float, ...] = ()
    """How often to draw from each corpus, in their order. None: in proportion to their tokens."""
    corpus_bytes: int | None = None
    """Read at most this much text of each corpus. None: all of it; of the standard library, 8 MiB."""
    corpus_cache: Path = field(default_factory=lambda: user_cache("corpora"))
    """Keep tokenized text in this folder, on a disk with room for it; it is mapped into memory, not read."""
    tokenizer: Path | None = None
    """A Hugging Face tokenizer.json, or a folder with one. None: bytes."""
    text_field: str = "text"
    """The field of a JSONL or Parquet corpus that holds the text."""
    seed: int = 0
    """Determines the initial parameters and the order of the samples."""

    learning_rate: float | None = None
    """The peak, after the warm-up. None: the recipe of the size."""
    warmup_steps: int | None = None
    """Committed steps over which the learning rate rises to its peak. None: the recipe of the size."""
    schedule: Schedule = "cosine"
    """How the learning rate falls from its peak to its end at the last step."""
    final_fraction: float | None = None
    """The learning rate at the last step, as a fraction of the peak. None: the recipe of the size."""
    beta1: float = 0.9
    """Adam's decay of the first moment."""
    beta2: float = 0.95
    """Adam's decay of the second moment."""
    epsilon: float = 1e-8
    """Adam's epsilon."""
    weight_decay: float = 0.1
    """AdamW's decay of weights."""
    decayed: Decayed = "matrices"
    """Which weights decay: all; matrices, all but the norms' scales; blocks, only the matrices of the layers."""
    clip_norm: float = 1.0
    """Scale gradients down to this global norm."""
    grad_dtype: Literal["float32", "bfloat16"] = "float32"
    """The type of the gradients that groups exchange. bfloat16 halves their bytes and rounds them."""
    quantize: Literal["int8"] | None = None
    """The format in which groups exchange large gradients. int8: 3 bytes for each element in place of 8."""
    overlap: int = 1
    """Into how many parts to divide the gradients, to exchange the first while others are computed. Same bits."""

    diloco_every: int | None = None
    """Let each shard take this many steps alone between two exchanges. --steps then counts rounds of them."""
    diloco_carry: Literal["average", "second", "reset"] = "average"
    """With --diloco-every: what a round keeps of Adam's moments. See docs/diloco.md."""

    held_out: float = 0.01
    """With --eval-every: the fraction of each corpus, at its end, that is evaluated and not trained on."""
    eval_every: int | None = None
    """Evaluate after every this many committed steps. None: never, and train on everything."""
    eval_batches: int = 8
    """How many batches of held-out sequences an evaluation takes."""

    fsdp: int | None = None
    """Devices over which parameters and sequences are sharded. None: as many as others leave and divide both."""
    tp: int = 1
    """Devices over which heads, feed-forward width and vocabulary are sharded."""
    pipeline: int = 1
    """Stages, each of which holds an equal part of the layers."""
    microbatches: int = 1
    """How many parts of a shard follow each other through the stages. Stages wait less with more parts."""
    context: int = 1
    """Devices over which the positions of a sequence are sharded: ring attention, for long sequences."""
    attention: Kernel = "auto"
    """auto: cudnn on CUDA, transformer-engine on ROCm if installed; elsewhere plain, and chunked for long texts."""
    remat: Remat = "full"
    """The values that the backward pass of a layer computes again: none, selective (all but attention), or full."""
    cpu_devices: int | None = None
    """Simulate this many devices on the CPU. None uses the machine's own devices."""
    compilation_cache: Path | None = field(default_factory=user_cache)
    """Keep compiled programs in this folder, so that a relaunched group starts at once. None keeps none."""

    coordinator: str | None = field(default_factory=lambda: os.environ.get("JAXFT_COORDINATOR"))
    """The coordinator's HOST:PORT, which `jaxft launch` sets. None trains alone, with the same results."""
    group: str = field(default_factory=lambda: os.environ.get("JAXFT_GROUP", "group-0"))
    """This replica group's permanent name within the job, which `jaxft launch` sets."""
    job: str = "llama3"
    """The job's name at the coordinator."""
    host: str | None = None
    """The HOST or HOST:PORT at which the other groups reach this one. None detects it."""
    failure_timeout_s: float = 60.0
    """How long recovery from one failure may take before this group gives up. Long steps do not count."""

    spare: bool = False
    """Stand by, and replace a group that is lost."""
    other_meshes: bool = field(default_factory=lambda: os.environ.get("JAXFT_OTHER_MESHES") == "1")
    """Groups may have different numbers of devices, and still get equal states. `jaxft launch --rungs` sets it."""
    checkpoints: Path | None = None
    """Save checkpoints in this folder, which all groups share, in case all groups die at once. None saves none."""
    checkpoint_every: int = 100
    """Committed steps between two checkpoints."""
    keep_checkpoints: int = 3
    """How many checkpoints to keep."""
    changed: tuple[str, ...] = ()
    """Settings that were changed on purpose since the run was saved, such as learning_rate, shards, job."""

    initial_weights: Path | None = None
    """Start from the Llama weights in this folder: safetensors, as on Hugging Face. None: random ones."""
    export_weights: Path | None = None
    """At the end, write the weights to this new folder, as Hugging Face keeps them. None: not at all."""

    run: Path | None = None
    """Keep this run's configuration, metrics and traces here, in one folder per group. None keeps none."""
    config: Path | None = None
    """Take every flag that is not given from this file, the config.json of a run."""
    tracker: Literal["tensorboard", "wandb"] | None = None
    """Also write losses and rates for TensorBoard, into --run, or to Weights & Biases."""
    profile: tuple[int, int] | None = None
    """Write a trace of the steps from the first to the second number, both included, into --run."""
    log_every: int = 10
    """Committed steps between two log lines."""
    events: Path | None = None
    """Append one JSON object per committed step to this file."""
    digest_at_end: bool = False
    """Report a digest of the final state. Equal digests mean equal bits."""


# Groups may differ in these, and so may the parts of a run before and after a restart. The corpora are compared by
# the fingerprint of their tokens; jaxft itself compares the job, its shards, whether meshes may differ, and between
# groups the overlap.
OWN_TO_A_GROUP = frozenset(
    {
        *("corpus", "corpus_bytes", "corpus_cache", "tokenizer", "text_field", "shards"),
        *("cpu_devices", "compilation_cache", "overlap"),
        *("coordinator", "group", "job", "host", "failure_timeout_s", "spare", "other_meshes"),
        *("checkpoints", "checkpoint_every", "keep_checkpoints", "changed"),
        *("initial_weights", "export_weights"),
        *("run", "config", "tracker", "profile", "log_every", "events", "digest_at_end"),
        *("eval_every", "eval_batches"),
    }
)


def with_recipe(flags: Flags) -> Flags:
    """Return the flags with the recipe of the size for flags that were not given."""
    recipe = dataclasses.asdict(RECIPES[flags.size])
    missing = {name: value for name, value in recipe.items() if getattr(flags, name) is None}
    return dataclasses.replace(flags, **missing)
