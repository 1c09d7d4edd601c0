"""Against transformers' LlamaForCausalLM, in float32: logits, loss and gradients of the same weights.

It needs torch and transformers, which only the dependency group `parity` installs: `make parity`.
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from llama3_cases import batch_of, params_of, tiny

from examples.llama3._config import ModelConfig, RopeScaling
from examples.llama3._model import Llama
from examples.llama3._sharding import make_mesh, state_shardings
from examples.llama3._weights import load_weights, save_weights, tensors_of
from examples.llama3.train import make_loss

torch: Any = pytest.importorskip("torch", reason="torch is not installed: make parity")
transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed: make parity")

# A context of 64, so that the scaled frequencies matter within a short sequence.
SCALED = RopeScaling(factor=8.0, original_context=64)
CASES = {
    "multi-head": tiny(kv_heads=4, rope_scaling=None),
    "grouped": tiny(rope_scaling=None),
    "tied": tiny(tied_embeddings=True, rope_scaling=None),
    "Llama 3.1's positions": tiny(rope_scaling=SCALED),
    "tied, Llama 3.2's positions": tiny(tied_embeddings=True, rope_scaling=RopeScaling(factor=32.0)),
}


def tokens_of(model: ModelConfig, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, model.vocab_size, (2, length + 1)).astype(np.int32)


def theirs(folder: Path) -> Any:
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def relative(ours: Any, reference: Any) -> float:
    ours, reference = np.asarray(ours), np.asarray(reference)
    return float(np.abs(ours - reference).max() / np.abs(reference).max())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("length", [48, 160], ids=["within the context", "beyond it"])
@pytest.mark.parametrize("model", CASES.values(), ids=CASES.keys())
def test_logits_loss_and_gradients_are_those_of_transformers(
    tmp_path: Path, model: ModelConfig, length: int, record_property: Any
) -> None:
    params, tokens = params_of(model), tokens_of(model, length)
    save_weights(params, model, tmp_path / "out", dtype="float32")
    reference = theirs(tmp_path / "out")
    inputs, targets = (torch.from_numpy(part.astype(np.int64)) for part in (tokens[:, :-1], tokens[:, 1:]))
    their_logits = reference(input_ids=inputs).logits
    their_loss = torch.nn.functional.cross_entropy(their_logits.flatten(0, 1), targets.flatten())
    their_loss.backward()
    gradients = {name: tensor.grad.numpy() for name, tensor in reference.named_parameters()}

    graph = nnx.graphdef(nnx.eval_shape(lambda: Llama(model, rngs=nnx.Rngs(0))))
    logits = jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens))(params, tokens[:, :-1])
    loss, grads = jax.jit(jax.value_and_grad(make_loss(model)))(params, batch_of(tokens))

    differences = {
        "logits": relative(logits, their_logits.detach()),
        "loss": abs(float(loss) - float(their_loss)) / float(their_loss),
    }
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        name = str(path[-1].key)
        written = [
            tensor.write(np.asarray(leaf if tensor.shape == leaf.shape else leaf[layer]))
            for layer, tensor in enumerate(tensors_of(name, leaf.shape))
        ]
        reference_leaf = [gradients[tensor.name] for tensor in tensors_of(name, leaf.shape)]
        differences[f"gradient of {name}"] = relative(np.stack(written), np.stack(reference_leaf))
    for name, difference in differences.items():
        record_property(name, difference)
    worst = max(differences, key=differences.__getitem__)
    # transformers takes cosines of angles in float32, which far positions and scaled frequencies show.
    assert differences[worst] < (1e-5 if length == 48 else 5e-5), (worst, differences[worst])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "model", [CASES["grouped"], CASES["tied, Llama 3.2's positions"]], ids=["grouped", "tied"]
)
def test_weights_saved_by_transformers_are_read(tmp_path: Path, model: ModelConfig) -> None:
    save_weights(params_of(model), model, tmp_path / "ours", dtype="float32")
    theirs(tmp_path / "ours").save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["model_type"] == "llama"
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params_of(model))
    read = load_weights(tmp_path / "theirs", model, abstract, state_shardings(abstract, make_mesh(1, 1)))
    for one, other in zip(jax.tree.leaves(read), jax.tree.leaves(params_of(model)), strict=True):
        assert np.array_equal(one, other)
