"""`python -m scripts.pictures` writes the drawings of docs/pictures.

With `--check` it writes nothing, and exits with 1 if one would change.
"""

from __future__ import annotations

import sys
from pathlib import Path

from scripts.pictures.growth import lists, memory
from scripts.pictures.house import house
from scripts.pictures.sequence import sequence

DOCS = Path(__file__).parents[2] / "docs"


def pictures() -> dict[Path, str]:
    """Each drawing, and where it is."""
    architecture, benchmarks = ((DOCS / f"{name}.md").read_text() for name in ("architecture", "benchmarks"))
    made = {"house": house(architecture), "growth-lists": lists(benchmarks), "growth-memory": memory(benchmarks)}
    made |= {source.stem: sequence(source.read_text()) for source in (DOCS / "pictures").glob("*.txt")}
    return {DOCS / "pictures" / f"{name}.svg": text for name, text in made.items()}


def main() -> None:
    changed = [file for file, text in pictures().items() if not file.exists() or file.read_text() != text]
    if "--check" in sys.argv:
        sys.exit("\n".join(f"{file.name} is out of date: run python -m scripts.pictures" for file in changed))
    for file in changed:
        file.write_text(pictures()[file])
        print(file.name)


if __name__ == "__main__":
    main()
