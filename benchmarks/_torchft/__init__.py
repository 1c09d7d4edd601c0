"""Workers of TorchFT's side.

They run under the interpreter of TorchFT's environment, and import nothing of ours but `_worker`.
"""
