"""The build backend of pyproject.toml: that of setuptools, after the version of the commit is in node/_version.py."""

from pathlib import Path

from setuptools.build_meta import *  # noqa: F403 - all its hooks

from scripts.packaging import version

# A build runs each hook in a process of its own, in the directory of the project.
version.write(Path.cwd())
