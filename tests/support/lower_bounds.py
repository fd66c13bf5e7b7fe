"""Lower bounds of the requirements in pyproject.toml, as constraints for pip: ``name==version`` a line."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement


def lower_bounds(pyproject: str) -> list[str]:
    """Constraints that pin every requirement of a pyproject.toml, those of extras too, to its lowest version.

    Raises:
        ValueError: a requirement has no lower bound, or several.
    """
    project = tomllib.loads(pyproject)["project"]
    groups = (project["dependencies"], *project["optional-dependencies"].values())
    pins: dict[str, str] = {}
    for requirement in (Requirement(text) for group in groups for text in group):
        if requirement.name == project["name"]:
            continue
        bounds = [clause.version for clause in requirement.specifier if clause.operator == ">="]
        if len(bounds) != 1 or pins.setdefault(requirement.name, bounds[0]) != bounds[0]:
            raise ValueError(f"{requirement} must have one lower bound, the same in every extra.")
    return [f"{name}=={version}" for name, version in sorted(pins.items())]


if __name__ == "__main__":
    print("\n".join(lower_bounds((Path(__file__).parents[2] / "pyproject.toml").read_text())))
