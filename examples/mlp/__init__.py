"""The smallest whole training with jaxft: plain JAX and optax. Start with `train.py`."""
