"""The smallest complete training run with jaxft: plain JAX and optax. Start with `train.py`."""
