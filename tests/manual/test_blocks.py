"""Every command in the docs holds: the flags exist, the targets, the extras, the modules."""

import pytest

from deploy.render import HELM
from tests.manual.blocks import Block, Wrong, blocks, check, check_shell

BLOCKS = blocks()
CHECKED = [block for block in BLOCKS if not block.why_not]
# Blocks that cannot be checked here, each with a reason. Think before you raise this.
NOT_CHECKED = 2


@pytest.mark.parametrize("block", CHECKED, ids=str)
def test_a_block_holds(block: Block) -> None:
    if "helm" in block.text and not HELM.exists():
        pytest.skip(f"needs helm: make {HELM}")
    try:
        check(block)
    except Wrong as error:
        pytest.fail(f"{block}: {error}")


def test_few_blocks_are_not_checked_and_each_says_why() -> None:
    left = [block for block in BLOCKS if block.why_not]
    assert len(left) == NOT_CHECKED, "\n".join(f"{block}: {block.why_not}" for block in left)
    assert len(CHECKED) > 25


@pytest.mark.parametrize(
    "text",
    [
        "jaxft launch --grups 3 -- python train.py",
        "jaxft launch --groups 3 -- python -m examples.mlp.train --no-such-flag",
        "TOKEN=$(jaxft-coordinator token --tokenfile x my-run)",
        "true && jaxft-coordinator --bnd localhost:1 &",
        "make no-such-target",
        "make demo NUMBER=7",
        "make chaos ARGS='--no-such-flag'",
        "python -m lab chaos --kils 7",
        "python -m tests.simulation --seeds x",
        "pip install './coordinator[no-such-extra]'",
        "python -m lab.nothing",
        "unknown-command",
    ],
)
def test_a_mistake_in_a_command_is_found(text: str) -> None:
    with pytest.raises(Wrong):
        check_shell(text)
