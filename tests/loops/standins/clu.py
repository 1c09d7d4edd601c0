"""In place of clu, which imports TensorFlow: scalars are printed."""

import contextlib
import sys
from types import SimpleNamespace


class _Writer:
    def write_scalars(self, step, scalars):
        sys.stdout.write(f"{step} { {name: float(value) for name, value in scalars.items()} }\n")

    def write_hparams(self, hparams):
        sys.stdout.write(f"{hparams}\n")

    def flush(self):
        pass


class _Progress:
    """`ReportProgress`, which measures the parts of a step, and the hook `Profile`."""

    def __init__(self, *_, **__):
        pass

    def __call__(self, step):
        pass

    def timed(self, *_):
        return contextlib.nullcontext()


metric_writers = SimpleNamespace(
    create_default_writer=lambda *_, **__: _Writer(),
    ensure_flushes=lambda *_: contextlib.nullcontext(),
)
periodic_actions = SimpleNamespace(ReportProgress=_Progress, Profile=_Progress)
