"""One group that runs a port: `python port_group.py --group ... --coordinator ... --port gan.py --steps 30`."""

import argparse
import logging
import os
import runpy
import sys
from pathlib import Path

from tests.processes.worker import KillAt

parser = argparse.ArgumentParser()
parser.add_argument("--coordinator")
parser.add_argument("--group")
parser.add_argument("--events", type=Path, help="a port writes none")
parser.add_argument("--port", type=Path)
parser.add_argument("--steps")
parser.add_argument("--die", default="", help="kill -9 this process at the first such message of the library")
arguments = parser.parse_args()
if arguments.coordinator:
    os.environ |= {"JAXFT_COORDINATOR": arguments.coordinator, "JAXFT_GROUP": arguments.group}
logging.basicConfig(level=logging.INFO)
logging.getLogger("jaxft").setLevel(logging.DEBUG)
logging.getLogger("jaxft").addHandler(KillAt(arguments.die, os.getpid()))
sys.argv = [str(arguments.port), arguments.steps]
runpy.run_path(str(arguments.port), run_name="__main__")
