"""The code blocks of the docs, and the checks that need not run them.

A block that cannot be checked has a comment before it: <!-- not checked: REASON -->.
"""

import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
import yaml
from jaxft_coordinator._arguments import Arguments, TokenArguments

from deploy.render import HELM
from examples.llama3._flags import Flags as LlamaFlags
from examples.mlp.train import Flags as MlpFlags
from jaxft_launch.check._check import CHECKS
from jaxft_launch.check._doctor import DoctorOptions
from jaxft_launch.client._drain import DrainOptions
from jaxft_launch.client._status import StatusOptions
from jaxft_launch.plan.plan import PlanOptions
from jaxft_launch.storm.chaos import ChaosOptions
from jaxft_launch.supervise._options import LaunchOptions
from lab.chaos import LabChaosOptions
from lab.demo import DemoOptions
from tests.simulation import __main__ as simulation

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("coordinator", "protocol")),
    *sorted(ROOT.glob("examples/*/README.md")),
]
BLOCK = re.compile(
    r"(?:<!-- not checked: (?P<why>[^>]+) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)
SHELLS = ("sh", "bash", "console")
# Commands of others, not checked beyond their names.
FOREIGN = set("kubectl export cd head base64 umask srun scontrol sbatch apt rm . [ python3".split())
# Distributions of others that a page has its reader install.
OTHERS = {"ray"}
OTHER_MODULES = {"my.train", "pytest"}
PARSERS: dict[tuple[str, ...], Any] = {
    ("jaxft", "launch"): LaunchOptions,
    ("jaxft", "chaos"): ChaosOptions,
    ("jaxft", "status"): StatusOptions,
    ("jaxft", "doctor"): DoctorOptions,
    ("jaxft", "drain"): DrainOptions,
    ("jaxft", "plan"): PlanOptions,
    **{("jaxft", "check", name): options for name, options in CHECKS.items()},
    ("jaxft-coordinator", "token"): TokenArguments,
    ("jaxft-coordinator",): Arguments,
    ("python", "-m", "examples.mlp.train"): MlpFlags,
    ("python", "-m", "examples.llama3.train"): LlamaFlags,
    ("python", "-m", "lab", "chaos"): LabChaosOptions,
    ("python", "-m", "lab", "demo"): DemoOptions,
}


class Wrong(AssertionError):
    """A block has a mistake."""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    kind: str
    text: str
    why_not: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks() -> list[Block]:
    """All code blocks of all pages, without text, diffs and directives."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            line = text[: match.start("kind")].count("\n") + 1
            found.append(Block(page, line, match["kind"], match["text"], match["why"] or ""))
    return [block for block in found if block.kind not in ("text", "diff")]


def check(block: Block) -> None:
    """Raise Wrong if the block has a mistake."""
    checks: dict[str, Callable[[str], None]] = {
        **dict.fromkeys(SHELLS, check_shell),
        "python": lambda text: compile(text, "docs", "exec"),  # test_snippets.py runs it
        "yaml": lambda text: yaml.safe_load(text),
    }
    if block.kind not in checks:
        raise Wrong(f"no check is known for a block of {block.kind!r}")
    checks[block.kind](block.text)


def check_shell(text: str) -> None:
    for words in commands(text):
        check_command(words)


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a script, as words, also within $(...), without redirections and assignments."""
    text = re.sub(r"\\\n\s*", " ", text)
    for line in text.splitlines():
        line = line.removeprefix("$ ")
        if re.search(r"(^|\s)#", line):
            line = re.sub(r"(^|\s)#.*", "", line)
        for inner in re.findall(r"\$\(([^()]+)\)", line):
            yield from commands(inner)
        line = re.sub(r"\$\([^()]+\)", "SUBSTITUTED", line)
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split = True
        lexer.commenters = ""
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("();|&"):
                yield from filter(None, [_bare(words)])
                words = []
            else:
                words.append(word)


def _bare(words: list[str]) -> list[str]:
    while words and re.match(r"[A-Za-z_]+=", words[0]):
        words = words[1:]
    if ">" in words:
        words = words[: words.index(">")]
    return words[: words.index("<")] if "<" in words else words


def check_command(words: list[str]) -> None:
    """Raise Wrong if a command, a flag, a target, an extra or a chart's value does not exist."""
    for prefix, options in PARSERS.items():
        if tuple(words[: len(prefix)]) == prefix:
            _check_flags(options, words, len(prefix))
            return
    if words[0] in FOREIGN:
        return
    if words[0] not in _CHECKS:
        raise Wrong(f"no check is known for {shlex.join(words)}")
    _CHECKS[words[0]](words[1:])


def _check_flags(options: Any, words: list[str], named: int) -> None:
    own, program = words[named:], []
    if "--" in own:
        own, program = own[: own.index("--")], own[own.index("--") + 1 :]
    try:
        tyro.cli(options, args=own, console_outputs=False)
    except SystemExit as error:
        raise Wrong(f"{shlex.join(words)}: its parser refuses the flags") from error
    if program:
        check_command(program)


def _check_helm(words: list[str]) -> None:
    command, name, chart, *flags = words
    if not (ROOT / chart / "Chart.yaml").exists():
        raise Wrong(f"helm {shlex.join(words)}: there is no chart {chart}")
    if command == "install":
        template = [HELM, "template", name, chart, *flags]
        done = subprocess.run(template, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Wrong(f"helm {shlex.join(words)}: {done.stderr}")


def _check_python(words: list[str]) -> None:
    """A module exists; a script is the reader's own."""
    if words[:2] == ["-m", "tests.simulation"]:
        try:
            simulation._options(words[2:])
        except SystemExit as error:
            raise Wrong(f"python {shlex.join(words)}: its parser refuses the flags") from error
    elif words[0] == "-m":
        path = ROOT / words[1].replace(".", "/")
        known = path.with_suffix(".py").exists() or (path / "__main__.py").exists()
        if not known and words[1] not in OTHER_MODULES:
            raise Wrong(f"there is no module {words[1]}")


def _check_make(words: list[str]) -> None:
    """The targets exist, they use the variables, and their programs accept the flags in ARGS."""
    recipes = {
        target: recipe
        for target, recipe in re.findall(
            r"^([a-z-]+):.*\n((?:\t.*\n)*)", (ROOT / "Makefile").read_text(), re.M
        )
    }
    given = dict(word.split("=", 1) for word in words if "=" in word)
    targets = [word for word in words if "=" not in word]
    for target in targets:
        if target not in recipes:
            raise Wrong(f"make has no target {target}")
    for name, value in given.items():
        lines = [line for target in targets for line in recipes[target].splitlines() if f"({name})" in line]
        if not lines and name not in ("PYTHON", "VENV"):
            raise Wrong(f"make {shlex.join(targets)} does not use {name}")
        for line in lines:
            if name == "ARGS" and line.startswith("\t$(BIN)/python -m "):
                check_command(shlex.split(line.replace("$(BIN)/", "").replace("$(ARGS)", value)))


def _check_pip(words: list[str]) -> None:
    """What `install` names are folders of the clone or distributions of ours, with their extras."""
    folders = {"jaxft": ".", "jaxft-launch": "./launcher"}
    folders |= {f"jaxft-{name}": f"./{name}" for name in ("coordinator", "protocol")}
    for requirement in (word for word in words[words.index("install") + 1 :] if not word.startswith("-")):
        match = re.fullmatch(r"([\w./-]+?)/?(?:\[([\w,-]+)\])?", requirement)
        if match is None:
            raise Wrong(f"pip would not understand {requirement}")
        if match[1] in OTHERS:
            continue
        file = ROOT / folders.get(match[1], match[1]) / "pyproject.toml"
        project = tomllib.loads(file.read_text())["project"]
        for extra in filter(None, (match[2] or "").split(",")):
            if extra not in project["optional-dependencies"]:
                raise Wrong(f"{project['name']} has no extra {extra}")


def _check_pytest(words: list[str]) -> None:
    for path in (word for word in words if word.startswith("tests")):
        if not (ROOT / path).exists():
            raise Wrong(f"there are no tests {path}")


_CHECKS: dict[str, Callable[[list[str]], None]] = {
    ".venv/bin/pytest": _check_pytest,
    "make": _check_make,
    "pip": _check_pip,
    "uv": _check_pip,
    "helm": _check_helm,
    "python": _check_python,
}
