"""Check a source distribution and a wheel before they are uploaded.

python .ci/dist.py DIRECTORY
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from readme_renderer.markdown import render

#: What a packager needs of the source distribution to build and test it.
NEEDED = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "SECURITY.md", "tox.ini", "docs/conf.py"}
NEEDED |= {"tests/conftest.py", "examples/shop.py", "celery_idempotent/py.typed"}
RELATIVE = re.compile(r"\]\((?!https://|#)[^)]*\)")


def main(folder: Path) -> None:
    [source], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
    for command in (["twine", "check", "--strict", source, wheel], ["check_wheel_contents", wheel]):
        subprocess.run([sys.executable, "-m", *map(str, command)], check=True)

    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= NEEDED, f"the source distribution lacks {sorted(NEEDED - names)}"
    unwanted = sorted(name for name in names if "__pycache__" in name or name.startswith((".git/", ".tox", ".venv")))
    assert not unwanted, f"the source distribution has {unwanted[:5]}"

    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
    description = text.partition("\n\n")[2]
    assert "pip install celery-idempotent" in description, "the description is not README.md"
    relative = RELATIVE.findall(description)
    assert not relative, f"the description links to {relative}, which lead nowhere outside of the repository"
    html = render(description)
    assert html is not None, "the index cannot render the description"
    assert html.count("<img") == description.count("!["), "a picture of the description is not shown"
    print(f"dist: {source.name} with {len(names)} entries, {wheel.name}; README has absolute links alone")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
