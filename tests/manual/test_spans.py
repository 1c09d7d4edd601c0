"""The commands and flags that the text of the docs names in passing, such as `jaxft launch --http`, exist."""

import dataclasses
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.manual.blocks import PAGES, PARSERS, ROOT, Wrong, check_command

SPAN = re.compile(r"`([^`\n]+)`")
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
# Of Slurm, XLA, helm, etcd and uv; and of our commands without a parser here: tests.loops, tests.simulation.
OTHERS = set(
    "--partition --gpus-per-node --nodes --time --signal --nodelist --set --name --help --auto-compaction-retention "
    "--max-request-bytes --compile-bytecode --xla_gpu_deterministic_ops --xla_gpu_exclude_nondeterministic_ops "
    "--xla_gpu_ftz --python --write --resume".split()
)
OWN = {
    prefix: {"--" + each.name.replace("_", "-") for each in dataclasses.fields(options)}
    for prefix, options in PARSERS.items()
}


def problems(text: str) -> Iterator[str]:
    """The commands, flags and modules in a page's spans of code that do not exist."""
    for span in SPAN.findall(FENCED.sub("", text)):
        try:
            words = shlex.split(span) or [""]
        except ValueError:  # half of a quotation
            words = [span]
        yield from (
            f"{span}: {flag} does not exist" for flag in FLAG.findall(span) if not _exists(flag, words)
        )
        try:
            # In the spans of other commands some words stand for the reader's own.
            if words[0] in ("make", "pip") and len(words) > 1:
                check_command([word for word in words if word != "wandb"])
            elif words[:2] == ["python", "-m"] and "." in span:
                check_command(words[:3])
        except Wrong as error:
            yield f"{span}: {error}"
        if words[0] == "jaxft" and not {tuple(words[:2]), tuple(words)} & {
            ("jaxft",),
            *(key[:2] for key in OWN),
        }:
            yield f"{span}: jaxft has no command {words[1]}"


def _exists(flag: str, words: list[str]) -> bool:
    if words[:3] == ["python", "-m", "benchmarks"] and len(words) > 3:
        options = importlib.import_module(f"benchmarks.{words[3]}").Options
        known = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(options)}
    else:
        commands = [prefix for prefix in OWN if tuple(words[: len(prefix)]) == prefix]
        known = OTHERS.union(*(OWN[prefix] for prefix in commands or OWN))
    return flag in known or flag.replace("--no-", "--", 1) in known


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_what_the_text_names_exists(page: Path) -> None:
    assert list(problems(page.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "text",
    [
        "`jaxft lunch`",
        "`jaxft launch --grups 3`",
        "`jaxft launch --kills`",
        "`--no-such-flag`",
        "`make lnit`",
        "`pip install 'jaxft[no-such-extra]'`",
        "`python -m lab.storse`",
        "`python -m benchmarks spare --round 6`",
    ],
)
def test_a_mistake_in_the_text_is_found(text: str) -> None:
    assert len(list(problems(text))) == 1


def test_what_stands_for_the_readers_own_is_no_mistake() -> None:
    assert not list(problems("`jaxft launch --nproc N -- PROGRAM`, `--no-warm`, `python -m MODULE`, `'a`"))
