"""Train on a Ray cluster: the coordinator is an actor, and each replica group is one.

Ray restarts an actor whose process or node dies, and calls the method again that was running. A group heals from the
others then, which train on in the meantime. The coordinator continues from its folder, which all nodes must share.

    python -m examples.ray.train --groups 3 --steps 200
"""

import logging
import os
import runpy
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import tyro

from examples.mlp import train as mlp
from jaxft import ConfigurationError, JaxftError, JobFinished


@dataclass(frozen=True, kw_only=True)
class Options:
    """Where and how to run a job."""

    folder: Path = Path("runs/ray")
    """Folder of the run, which all nodes share."""
    groups: int = 3
    """Replica groups, each an actor."""
    spares: int = 0
    """Further groups that stand by, and take the place of a lost group."""
    job: str = "mlp"
    """The job's name, as in jaxft.Manager(job=...)."""
    port: int = 29510
    """Port of the coordinator on its node."""
    cpus_per_group: float = 1
    """Processors that Ray reserves for each group."""
    gpus_per_group: float = 0
    """Accelerators that Ray reserves for each group."""


@ray.remote(max_restarts=-1, max_task_retries=-1, num_cpus=0)
class Coordinator:
    """The coordinator of the job. It keeps its decisions in the folder."""

    def address(self, port: int) -> str:
        """Return where the groups reach it."""
        return f"{ray.util.get_node_ip_address()}:{port}"

    def serve(self, folder: Path, port: int) -> None:
        """Serve until the actor is killed. As `jaxft-coordinator`, in this process, so that it ends with it."""
        flags = ["--bind", f"[::]:{port}", "--token-file", str(folder / "secret")]
        flags += ["--state", str(folder / "coordinator"), "--events", str(folder / "events.jsonl")]
        sys.argv = ["jaxft-coordinator", *flags]
        runpy.run_module("jaxft_coordinator", run_name="__main__")


@ray.remote(max_restarts=-1, max_task_retries=-1)
class Group:
    """A replica group of one process."""

    def train(self, program: Callable[[], Any], environment: Mapping[str, str]) -> Any:
        """Return the training program's result; None if the job was over before this group was back."""
        os.environ.update(environment)
        try:
            return program()
        except JobFinished:
            return None
        except ConfigurationError:
            raise  # the same program would fail again
        except JaxftError:
            logging.exception("this group ends, and Ray starts it again")
            os._exit(os.EX_TEMPFAIL)  # Ray calls this method again only after a death


def run(program: Callable[[], Any], options: Options) -> list[Any]:
    """Run a training program in all groups; return what each of them returns.

    Args:
        program: called in each group's process. Its `jaxft.Manager` takes coordinator, group and token from the
            environment.
        options: where and how.
    """
    folder = options.folder.absolute()
    secret = folder / "secret"
    if not secret.exists():
        folder.mkdir(parents=True, exist_ok=True)
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_urlsafe(32))
    coordinator = Coordinator.remote()
    address = ray.get(coordinator.address.remote(options.port))
    serving = coordinator.serve.remote(folder, options.port)
    regular = [f"group-{number}" for number in range(options.groups)]
    spares = [f"spare-{number}" for number in range(options.spares)]
    token = token_of(secret, options.job)
    training = []
    for name in (*regular, *spares):
        environment = {"JAXFT_COORDINATOR": address, "JAXFT_GROUP": name, "JAXFT_TOKEN": token}
        if name in spares:
            environment["JAXFT_SPARE"] = "1"
        group = Group.options(
            name=name, num_cpus=options.cpus_per_group, num_gpus=options.gpus_per_group
        ).remote()
        training.append(group.train.remote(program, environment))
    left = [serving, *training]
    while left != [serving]:
        # The coordinator ends only if it cannot start, which `get` raises then.
        done, left = ray.wait(left)
        ray.get(done)
    ray.kill(coordinator)
    return ray.get(training)


def token_of(secret: Path, job: str) -> str:
    """Return the key of a job."""
    command = [sys.executable, "-m", "jaxft_coordinator", "token", "--token-file", str(secret), job]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Flags(Options):
        __doc__ = __doc__
        steps: int = 200
        """Train until the job has committed this many steps."""

    flags = tyro.cli(Flags, prog="python -m examples.ray.train", description=__doc__)

    def program() -> str | None:
        logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
        return mlp.train(
            mlp.Flags(
                steps=flags.steps,
                job=flags.job,
                coordinator=os.environ["JAXFT_COORDINATOR"],
                group=os.environ["JAXFT_GROUP"],
                digest_at_end=True,
            )
        )

    ray.init()
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    logging.info("digests of the groups: %s", run(program, flags))


if __name__ == "__main__":
    main()
