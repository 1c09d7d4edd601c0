"""The code blocks of the docs, and what is checked of each without running it.

A block that cannot be checked has a comment before it: <!-- not checked: REASON -->.
"""

import ast
import inspect
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

import jaxft
import jaxft.data
from deploy.render import HELM
from examples.llama3._flags import Flags as LlamaFlags
from examples.mlp.train import Flags as MlpFlags
from jaxft_launch.check._check import CHECKS
from jaxft_launch.check._doctor import DoctorOptions
from jaxft_launch.client._drain import DrainOptions
from jaxft_launch.client._status import StatusOptions
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
# What is not ours, and not checked beyond its name.
FOREIGN = {
    "kubectl",
    "export",
    "cd",
    "head",
    "base64",
    "umask",
    "srun",
    "scontrol",
    "sbatch",
    "apt",
    ".",
    "[",
    "python3",
}
# Distributions of others that a page has its reader install.
OTHERS = {"ray"}
OTHER_MODULES = {"my.train", "pytest"}
PARSERS: dict[tuple[str, ...], Any] = {
    ("jaxft", "launch"): LaunchOptions,
    ("jaxft", "chaos"): ChaosOptions,
    ("jaxft", "status"): StatusOptions,
    ("jaxft", "doctor"): DoctorOptions,
    ("jaxft", "drain"): DrainOptions,
    **{("jaxft", "check", name): options for name, options in CHECKS.items()},
    ("jaxft-coordinator", "token"): TokenArguments,
    ("jaxft-coordinator",): Arguments,
    ("python", "-m", "examples.mlp.train"): MlpFlags,
    ("python", "-m", "examples.llama3.train"): LlamaFlags,
    ("python", "-m", "lab", "chaos"): LabChaosOptions,
    ("python", "-m", "lab", "demo"): DemoOptions,
}


class Wrong(AssertionError):
    """A block says what does not hold."""


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
    """All code blocks of all pages. What a page only shows (text, diff, directives) is none."""
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
        "python": check_python,
        "yaml": lambda text: yaml.safe_load(text),
    }
    if block.kind not in checks:
        raise Wrong(f"no check is known for a block of {block.kind!r}")
    checks[block.kind](block.text)


def check_shell(text: str) -> None:
    for words in commands(text):
        check_command(words)


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a script, as words: also those of $(...), without redirections and assignments."""
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
            own, program = words[len(prefix) :], []
            if "--" in own:
                own, program = own[: own.index("--")], own[own.index("--") + 1 :]
            try:
                tyro.cli(options, args=own, console_outputs=False)
            except SystemExit as error:
                raise Wrong(f"{shlex.join(words)}: its parser refuses the flags") from error
            if program:
                check_command(program)
            return
    match words:
        case ["make", *rest]:
            _check_make(rest)
        case ["pip", "install", *what] | ["uv", "pip", "install", *what]:
            _check_extras([word for word in what if not word.startswith("-")])
        case ["helm", "install", name, chart, *flags]:
            done = subprocess.run(
                [HELM, "template", name, chart, *flags], cwd=ROOT, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise Wrong(f"{shlex.join(words)}: {done.stderr}")
        case ["helm", "upgrade", _, chart, "--reuse-values", *_]:
            if not (ROOT / chart / "Chart.yaml").exists():
                raise Wrong(f"{shlex.join(words)}: there is no chart {chart}")
        case ["python", "-m", "tests.simulation", *flags]:
            _check_simulation(flags)
        case ["python", "-m", module, *_]:
            path = ROOT / module.replace(".", "/")
            if not (
                path.with_suffix(".py").exists() or (path / "__main__.py").exists() or module in OTHER_MODULES
            ):
                raise Wrong(f"there is no module {module}")
        case ["python", script, *_] if script.endswith(".py"):
            pass  # the reader's own
        case [name, *_] if name in FOREIGN:
            pass
        case _:
            raise Wrong(f"no check is known for {shlex.join(words)}")


def _check_make(words: list[str]) -> None:
    """The targets exist, they use the variables, and what they start accepts what is in ARGS."""
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


def _check_simulation(flags: list[str]) -> None:
    try:
        simulation._options(flags)
    except SystemExit as error:
        raise Wrong(
            f"python -m tests.simulation {shlex.join(flags)}: its parser refuses the flags"
        ) from error


def _check_extras(requirements: list[str]) -> None:
    folders = {"jaxft": ".", **{f"jaxft-{name}": f"./{name}" for name in ("coordinator", "protocol")}}
    folders["jaxft-launch"] = "./launcher"
    for requirement in requirements:
        match = re.fullmatch(r"([\w./-]+?)/?(?:\[([\w,-]+)\])?", requirement)
        if match is None:
            raise Wrong(f"pip would not understand {requirement}")
        if match[1] in OTHERS:
            continue
        folder = folders.get(match[1], match[1])
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        for extra in filter(None, (match[2] or "").split(",")):
            if extra not in project["optional-dependencies"]:
                raise Wrong(f"{project['name']} has no extra {extra}")


def check_python(text: str) -> None:
    """Raise Wrong if it is no Python, or names or calls of jaxft are wrong."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise Wrong(str(error)) from error
    direct = {
        alias.name: getattr(jaxft.data, alias.name, None)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "jaxft.data"
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "jaxft":
            if not hasattr(jaxft, node.attr):
                raise Wrong(f"jaxft has no {node.attr}")
        if isinstance(node, ast.Call):
            called = direct.get(getattr(node.func, "id", "")) or _of_jaxft(node.func)
            if called is not None:
                _check_call(node, called)


def _of_jaxft(node: ast.expr) -> Any:
    path = ast.unparse(node).split(".")
    if path[0] != "jaxft":
        return None
    found: Any = jaxft
    for name in path[1:]:
        if not hasattr(found, name):
            raise Wrong(f"{ast.unparse(node)} does not exist")
        found = getattr(found, name)
    return found


def _check_call(node: ast.Call, called: Any) -> None:
    known = inspect.signature(called).parameters
    if any(each.kind is each.VAR_KEYWORD for each in known.values()):
        return
    for keyword in node.keywords:
        if keyword.arg is not None and keyword.arg not in known:
            raise Wrong(f"{ast.unparse(node.func)} takes no argument {keyword.arg}")
