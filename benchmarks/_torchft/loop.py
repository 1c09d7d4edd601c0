"""One replica group of TorchFT that trains, and says what each step did: see `benchmarks._job`."""

import importlib
import sys
import time

_BEGAN_S = time.monotonic()  # before anything heavy is imported


def main() -> None:
    from benchmarks._forks import serve_forks
    from benchmarks._words import Words

    if len(sys.argv) > 1:
        importlib.import_module("benchmarks._torchft._training")
        serve_forks(int(sys.argv[1]))
    words = Words()
    words.say("interpreter", began_s=_BEGAN_S)
    from benchmarks._torchft._training import train

    words.say("imports")
    train(words, **words.hear("make"))


if __name__ == "__main__":
    main()
