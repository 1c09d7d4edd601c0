"""Helpers of the tests of examples/llama3: a model that compiles fast, and a corpus that needs no file."""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from flax import nnx

from examples.llama3._config import ModelConfig
from examples.llama3._corpus import Corpus
from examples.llama3._model import Llama
from examples.llama3._optimizer import OptimizerConfig
from examples.llama3._tokenizer import Bytes

TINY = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=64, vocab_size=320, compute_dtype="float32")

OPTIMIZER = OptimizerConfig(
    learning_rate=1e-2, warmup_steps=5, total_steps=50, weight_decay=0.1, clip_norm=1.0
)


def tiny(**changes: Any) -> ModelConfig:
    return dataclasses.replace(TINY, **changes)


def corpus_of(token_count: int) -> Corpus:
    """Token i is i modulo 256, so that a batch shows which positions it was cut from."""
    tokens = (np.arange(token_count) % 256).astype(np.uint16)
    return Corpus(tokens=tokens, documents=1, fingerprint="", bos=Bytes.bos, eos=Bytes.eos)


def batch_of(tokens: Any) -> dict[str, Any]:
    """A batch of whole documents: tokens (batch, seq_len + 1)."""
    rows, columns = tokens.shape
    positions = np.broadcast_to(np.arange(columns - 1, dtype=np.int32), (rows, columns - 1))
    return {"tokens": tokens, "segment_ids": np.zeros_like(positions), "positions": positions}


def abstract_params(config: ModelConfig) -> Any:
    """The parameters' shapes, without making one."""
    return jax.eval_shape(lambda: nnx.to_pure_dict(nnx.state(Llama(config, rngs=nnx.Rngs(0)))))


@functools.cache
def params_of(config: ModelConfig, seed: int = 0) -> Any:
    """Parameters by numpy, large enough that every part of the model matters; nothing to compile."""
    rng = np.random.default_rng(seed)

    def draw(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        scale = 1.0 / math.sqrt(leaf.shape[-2] if len(leaf.shape) > 1 else 1)
        return (scale * rng.standard_normal(leaf.shape)).astype(leaf.dtype)

    return jax.tree.map(draw, abstract_params(config))


@functools.cache
def logits_function(config: ModelConfig) -> Any:
    """Return (params, tokens) -> logits, jitted once for each config."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    return jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens))


@functools.cache
def documents_function(config: ModelConfig) -> Any:
    """Return (params, tokens, segment_ids, positions) -> logits, jitted once for each config."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    return jax.jit(lambda params, *batch: nnx.merge(graph, params)(*batch))


def products_of(jaxpr: Any) -> list[tuple[str, str, str]]:
    """Return the dtypes (left, right, result) of every matrix product in a program, loops' bodies once."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found.append(tuple(str(v.aval.dtype) for v in (*equation.invars, *equation.outvars)))
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found += products_of(inner)
    return found
