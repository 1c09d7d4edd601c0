"""Llama 3 in flax NNX, trained fault-tolerantly with jaxft. Start with `train.py`."""
