"""In place of clu: scalars are printed."""

import sys
from types import SimpleNamespace


class _Writer:
    def write_scalars(self, step, scalars):
        sys.stdout.write(f"{step} { {name: float(value) for name, value in scalars.items()} }\n")

    def flush(self):
        pass


metric_writers = SimpleNamespace(create_default_writer=lambda **_: _Writer())
periodic_actions = SimpleNamespace()
