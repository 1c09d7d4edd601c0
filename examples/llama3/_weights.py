"""Weights in the files of Hugging Face: safetensors, with the names, shapes and layout of `LlamaForCausalLM`.

There a matrix is (outputs, inputs), heads are flattened, and each layer is a tensor; here it is (inputs, outputs),
and layers are stacked. Both ways go leaf by leaf. Loading, each device reads only its own part of each file. Saving,
one tensor at a time is on the host, and a file takes at most `SHARD_BYTES` there.
"""

import json
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from examples.llama3._config import ModelConfig, SettingsError
from examples.llama3._packages import needed
from examples.llama3._sharding import parameter_name

SHARD_BYTES = 4 * 10**9
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# The head dimensions of a matrix here are one dimension there: the name, and whether its inputs or outputs are heads.
_IN_LAYERS = {
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_OUTSIDE = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
# Matrices that are the same way round in both.
_NOT_TRANSPOSED = frozenset({"embedding"})

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a file, and how it becomes an array of ours.

    Attributes:
        name: in the file.
        shape: of ours, for one layer.
    """

    name: str
    leaf: str
    shape: tuple[int, ...]

    @property
    def inputs(self) -> int:
        """How many leading dimensions of ours are the inputs."""
        return 2 if self.leaf == "output" else 1

    @property
    def file_shape(self) -> tuple[int, ...]:
        if len(self.shape) == 1 or self.leaf in _NOT_TRANSPOSED:
            return self.shape
        inputs, outputs = self.shape[: self.inputs], self.shape[self.inputs :]
        return (int(np.prod(outputs)), int(np.prod(inputs)))

    def read(self, file_slice: Any, index: Index) -> np.ndarray:
        """Return the part of ours at an index, of one layer; only that part is read."""
        if len(self.shape) == 1 or self.leaf in _NOT_TRANSPOSED:
            return np.asarray(file_slice[index])
        inputs, outputs = index[: self.inputs], index[self.inputs :]
        rows, row_shape = _flat(self.shape[self.inputs :], outputs)
        columns, column_shape = _flat(self.shape[: self.inputs], inputs)
        return np.asarray(file_slice[rows, columns]).T.reshape(column_shape + row_shape)

    def write(self, ours: np.ndarray) -> np.ndarray:
        """Return the tensor of the file."""
        if self.file_shape == self.shape and (len(self.shape) == 1 or self.leaf in _NOT_TRANSPOSED):
            return ours
        return np.ascontiguousarray(ours.reshape(self.file_shape[::-1]).T)


def tensors_of(leaf: str, shape: tuple[int, ...]) -> list[Tensor]:
    """Return the tensors of a parameter: one, or one for each layer."""
    if leaf in _OUTSIDE:
        return [Tensor(f"{_OUTSIDE[leaf]}.weight", leaf, shape)]
    return [
        Tensor(f"model.layers.{layer}.{_IN_LAYERS[leaf]}.weight", leaf, shape[1:])
        for layer in range(shape[0])
    ]


def load_weights(folder: Path, model: ModelConfig, abstract_params: Any, shardings: Any) -> Any:
    """Read the parameters of a Llama 3, each device its own part; float32 whatever the files have.

    Args:
        folder: with one model.safetensors, or several and their index, and config.json.
        abstract_params: the shapes of the parameters.
        shardings: where each goes.

    Raises:
        SettingsError: the folder has no such weights, or another model's.
    """
    safetensors = needed("safetensors", by="--initial-weights")
    files = check_weights(folder, model)
    opened: dict[Path, Any] = {}

    def slice_of(tensor: Tensor) -> Any:
        if tensor.name not in files:
            raise SettingsError(f"The weights in {str(folder)!r} have no tensor {tensor.name!r}.")
        path = files[tensor.name]
        if path not in opened:
            opened[path] = safetensors.safe_open(path, framework="numpy")
        found = opened[path].get_slice(tensor.name)
        if tuple(found.get_shape()) != tensor.file_shape:
            raise SettingsError(
                f"{tensor.name!r} in {str(path)!r} has the shape {tuple(found.get_shape())}, but this --size needs "
                f"{tensor.file_shape}."
            )
        return found

    def load(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.Array:
        name = parameter_name(path)
        slices = [(tensor, slice_of(tensor)) for tensor in tensors_of(name, leaf.shape)]

        def part(index: Index | None) -> np.ndarray:
            assert index is not None
            index = tuple(slice(*one.indices(extent)) for one, extent in zip(index, leaf.shape, strict=True))
            if name in _OUTSIDE:
                tensor, found = slices[0]
                return tensor.read(found, index).astype(leaf.dtype)
            layers = slices[index[0]]
            return np.stack([tensor.read(found, index[1:]).astype(leaf.dtype) for tensor, found in layers])

        return jax.make_array_from_callback(leaf.shape, sharding, part)

    return jax.tree_util.tree_map_with_path(load, abstract_params, shardings)


def check_weights(folder: Path, model: ModelConfig) -> dict[str, Path]:
    """Check that a folder has the weights of a model, without reading them; return the file of each tensor.

    Raises:
        SettingsError: it has none, or another model's.
    """
    _check_config(folder, model)
    return _files(folder)


def save_weights(params: Any, model: ModelConfig, folder: Path, *, dtype: str = "bfloat16") -> None:
    """Write parameters as a folder that `transformers.LlamaForCausalLM.from_pretrained` reads.

    All groups of a job write the same, so that the weights are there whichever groups die; the first one's stay.

    Args:
        folder: it gets its name when it is complete. If it exists, another group has written it, and nothing is done.
        dtype: of the files, float32 or bfloat16.

    Raises:
        SettingsError: the folder cannot be written.
    """
    if folder.exists():
        return
    safetensors = needed("safetensors", by="--export-weights")
    unfinished = folder.with_name(f"{folder.name}.part-{secrets.token_hex(4)}")
    try:
        unfinished.mkdir(parents=True)
        _write(params, model, unfinished, dtype)
        unfinished.rename(folder)
    except (OSError, safetensors.SafetensorError) as error:
        if not folder.is_dir():
            raise SettingsError(f"--export-weights {str(folder)!r} cannot be written: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write(params: Any, model: ModelConfig, folder: Path, dtype: str) -> None:
    numpy_files = needed("safetensors.numpy", by="--export-weights")
    kept, total_bytes = [], 0
    for shard in _shards(params, np.dtype(getattr(ml_dtypes, dtype, dtype))):
        file = folder / f"{len(kept):05d}.safetensors"
        numpy_files.save_file(shard, file, metadata={"format": "pt"})
        kept.append((file, list(shard)))
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
    if len(kept) == 1:
        kept[0][0].rename(folder / _SINGLE)
    else:
        weight_map = {}
        for number, (file, names) in enumerate(kept, start=1):
            name = f"model-{number:05d}-of-{len(kept):05d}.safetensors"
            file.rename(folder / name)
            weight_map |= dict.fromkeys(names, name)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(json.dumps(config_json(model, dtype=dtype), indent=2))


def config_json(model: ModelConfig, *, dtype: str = "bfloat16") -> dict[str, Any]:
    """Return the config.json of a model."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.dim,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn_dim,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied_embeddings,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_theta,
        "max_position_embeddings": 131_072,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
    }
    if model.rope_scaling is not None:
        scaling = model.rope_scaling
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    return config


def _check_config(folder: Path, model: ModelConfig) -> None:
    path = folder / "config.json"
    if not path.is_file():
        raise SettingsError(
            f"There are no weights in {str(folder)!r}: it has no config.json. Point --initial-weights to a folder "
            "as Hugging Face has it."
        )
    found, expected = json.loads(path.read_text()), config_json(model)
    # Newer transformers write RoPE's theta and its scaling into one entry.
    parameters = found.pop("rope_parameters", None)
    if parameters is not None:
        found["rope_theta"] = parameters.get("rope_theta")
        found["rope_scaling"] = {key: value for key, value in parameters.items() if key != "rope_theta"}
    if found.get("rope_scaling") is None or found["rope_scaling"].get("rope_type") == "default":
        found["rope_scaling"] = None
    compared = set(expected) - {"architectures", "head_dim", "max_position_embeddings", "torch_dtype"}
    differing = [
        f"{name}: there {found.get(name)!r}, here {expected.get(name)!r}"
        for name in sorted(compared | {"rope_scaling"})
        if found.get(name, _DEFAULTS.get(name)) != expected.get(name)
    ]
    if differing:
        raise SettingsError(
            f"The weights in {str(folder)!r} are of another model than this --size:\n  "
            + "\n  ".join(differing)
        )


# What transformers takes for entries that a config.json lacks.
_DEFAULTS = {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}


def _files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
    safetensors = needed("safetensors", by="--initial-weights")
    index = folder / _INDEX
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    single = folder / _SINGLE
    if not single.is_file():
        raise SettingsError(f"There are no weights in {str(folder)!r}: neither {_SINGLE} nor {_INDEX}.")
    with safetensors.safe_open(single, framework="numpy") as file:
        return dict.fromkeys(file.keys(), single)


def _shards(params: Any, dtype: np.dtype) -> Iterator[dict[str, np.ndarray]]:
    """Yield the tensors, as many at once as a file takes."""
    shard: dict[str, np.ndarray] = {}
    size = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = parameter_name(path)
        for layer, tensor in enumerate(tensors_of(name, leaf.shape)):
            ours = np.asarray(leaf if name in _OUTSIDE else leaf[layer])
            made = tensor.write(ours.astype(dtype))
            if shard and size + made.nbytes > SHARD_BYTES:
                yield shard
                shard, size = {}, 0
            shard[tensor.name] = made
            size += made.nbytes
    yield shard


def _flat(shape: tuple[int, ...], index: Index) -> tuple[slice, tuple[int, ...]]:
    """Return an index into dimensions as one into their product, and the shape of what it takes."""
    taken = tuple(len(range(*one.indices(extent))) for one, extent in zip(index, shape, strict=True))
    if len(shape) == 1:
        return index[0], taken
    # Heads are sharded, and head_dim is not: so the part is in one piece.
    heads, head_dim = shape
    assert taken[1] == head_dim
    start, stop, _ = index[0].indices(heads)
    return slice(start * head_dim, stop * head_dim), taken
