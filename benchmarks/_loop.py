"""One replica group that trains and reports each step: `python -m benchmarks._loop SIDE [SOCKET]`.

SIDE is "_ours" or "_torchft"; with SOCKET this process is forked for each incarnation: see `benchmarks._job`.
"""

import importlib
import sys
import time

_BEGAN_S = time.monotonic()  # before anything heavy is imported


def main() -> None:
    from benchmarks._forks import serve_forks
    from benchmarks._words import Words

    module = f"benchmarks.{sys.argv[1]}._training"
    if len(sys.argv) > 2:
        importlib.import_module(module)
        serve_forks(int(sys.argv[2]))
    words = Words()
    words.say("interpreter", began_s=_BEGAN_S)
    training = importlib.import_module(module)
    words.say("imports")
    training.train(words, **words.hear("make"))


if __name__ == "__main__":
    main()
