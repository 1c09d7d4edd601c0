"""What workers on TorchFT's side do.

They run under the interpreter of its own environment, and import nothing of ours but `_worker`.
"""
