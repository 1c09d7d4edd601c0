"""One replica group of TorchFT that trains, and says what each step did: see `benchmarks._job`."""

import time

_BEGAN_S = time.monotonic()  # before anything heavy is imported


def main() -> None:
    from benchmarks._words import Words

    words = Words()
    words.say("interpreter", began_s=_BEGAN_S)
    from benchmarks._torchft._training import train

    words.say("imports")
    train(words, **words.hear("make"))


if __name__ == "__main__":
    main()
