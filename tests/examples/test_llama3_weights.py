"""Weights as Hugging Face keeps them: out and back bit for bit, on any mesh; another model's are refused."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy
from llama3_cases import OPTIMIZER, params_of, tiny

from examples.llama3 import _weights
from examples.llama3._config import ModelConfig, RopeScaling, SettingsError
from examples.llama3._sharding import make_mesh, state_shardings
from examples.llama3._state import init_state
from examples.llama3._weights import load_weights, save_weights

OWN_HEAD = tiny()
TIED = tiny(tied_embeddings=True, rope_scaling=RopeScaling(factor=32.0))


def loaded(folder: Path, model: ModelConfig, mesh_shape: tuple[int, int] = (1, 1)) -> Any:
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params_of(model))
    return load_weights(folder, model, abstract, state_shardings(abstract, make_mesh(*mesh_shape)))


def assert_same(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert left.dtype == right.dtype
        assert np.array_equal(left, right)


@pytest.mark.parametrize(
    ("model", "mesh_shape"), [(OWN_HEAD, (2, 2)), (TIED, (1, 1))], ids=["own head", "tied"]
)
def test_weights_come_back_with_the_same_bits(
    tmp_path: Path, model: ModelConfig, mesh_shape: tuple[int, int]
) -> None:
    save_weights(params_of(model), model, tmp_path / "out", dtype="float32")
    assert_same(loaded(tmp_path / "out", model, mesh_shape), params_of(model))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_the_files_have_the_names_and_shapes_of_hugging_face(tmp_path: Path) -> None:
    save_weights(params_of(OWN_HEAD), OWN_HEAD, tmp_path / "out", dtype="float32")
    tensors = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert len(tensors) == 3 + 9 * OWN_HEAD.layers
    assert tensors["model.embed_tokens.weight"].shape == (320, 32)
    assert tensors["lm_head.weight"].shape == (320, 32)
    assert tensors["model.layers.1.self_attn.k_proj.weight"].shape == (16, 32)
    assert tensors["model.layers.1.mlp.down_proj.weight"].shape == (32, 64)
    ours = params_of(OWN_HEAD)["blocks"]["attention"]["key"]
    # Head 1, dimension 3, of layer 1.
    assert np.array_equal(tensors["model.layers.1.self_attn.k_proj.weight"][8 + 3], ours[1, :, 1, 3])


def test_bfloat16_files_round_once_and_are_read_as_float32(tmp_path: Path) -> None:
    save_weights(params_of(OWN_HEAD), OWN_HEAD, tmp_path / "out")
    rounded = jax.tree.map(lambda leaf: leaf.astype("bfloat16").astype(np.float32), params_of(OWN_HEAD))
    assert_same(loaded(tmp_path / "out", OWN_HEAD), rounded)


def test_large_weights_take_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_weights, "SHARD_BYTES", 50_000)
    save_weights(params_of(OWN_HEAD), OWN_HEAD, tmp_path / "out", dtype="float32")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == 4 * sum(
        leaf.size for leaf in jax.tree.leaves(params_of(OWN_HEAD))
    )
    assert all((tmp_path / "out" / file).stat().st_size < 60_000 for file in files)
    assert_same(loaded(tmp_path / "out", OWN_HEAD), params_of(OWN_HEAD))


def test_the_groups_of_a_job_may_write_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, params = _weights._write, params_of(OWN_HEAD)

    def slowly(*arguments: Any) -> None:
        """While this group writes, another does, and then is done."""
        monkeypatch.setattr(_weights, "_write", write)
        save_weights(params, OWN_HEAD, tmp_path / "out", dtype="float32")
        write(*arguments)

    monkeypatch.setattr(_weights, "_write", slowly)
    for _ in range(2):
        save_weights(params, OWN_HEAD, tmp_path / "out", dtype="float32")
        assert_same(loaded(tmp_path / "out", OWN_HEAD), params)
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_each_device_reads_only_its_own_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_weights(params_of(OWN_HEAD), OWN_HEAD, tmp_path / "out", dtype="float32")
    read: list[int] = []
    whole = _weights.Tensor.read

    def counted(self: Any, file_slice: Any, index: Any) -> np.ndarray:
        part = whole(self, file_slice, index)
        read.append(part.size)
        return part

    monkeypatch.setattr(_weights.Tensor, "read", counted)
    loaded(tmp_path / "out", OWN_HEAD, (2, 2))
    count = sum(leaf.size for leaf in jax.tree.leaves(params_of(OWN_HEAD)))
    # Norm scales are sharded over the first axis only.
    assert sum(read) <= 2 * 5 * 32 + count
    assert max(read) == 320 * 32 // 4


def test_training_may_start_from_weights(tmp_path: Path) -> None:
    save_weights(params_of(OWN_HEAD), OWN_HEAD, tmp_path / "out", dtype="float32")
    state = init_state(OWN_HEAD, OPTIMIZER, make_mesh(2, 1), seed=0, weights=tmp_path / "out")
    assert_same(state.params, params_of(OWN_HEAD))
    assert (int(state.step), len({leaf.sharding.mesh for leaf in jax.tree.leaves(state.params)})) == (0, 1)


# Errors.


def test_weights_of_another_model_are_refused_by_what_differs(tmp_path: Path) -> None:
    save_weights(params_of(OWN_HEAD), OWN_HEAD, tmp_path / "out")
    with pytest.raises(SettingsError, match=r"of another model than this --size:") as refused:
        loaded(tmp_path / "out", TIED)
    assert "\n  tie_word_embeddings: there False, here True" in str(refused.value)
    assert "\n  rope_scaling: there {" in str(refused.value)
    assert "hidden_size" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, r"have no tensor 'model\.norm\.weight'"),
        (
            {"model.norm.weight": np.ones(33, np.float32)},
            r"has the shape \(33,\), but this --size needs \(32,\)",
        ),
    ],
)
def test_a_missing_or_misshapen_tensor_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    save_weights(params_of(OWN_HEAD), OWN_HEAD, tmp_path / "out", dtype="float32")
    file = tmp_path / "out" / "model.safetensors"
    tensors = {**safetensors.numpy.load_file(file), **change}
    safetensors.numpy.save_file({name: t for name, t in tensors.items() if t is not None}, file)
    with pytest.raises(SettingsError, match=message):
        loaded(tmp_path / "out", OWN_HEAD)
