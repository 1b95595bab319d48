"""`scripts/release` in a repository of its own: what it refuses, what it makes, and that it makes it twice."""

from __future__ import annotations

import configparser
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.packaging.bill import bill
from scripts.packaging.client import closure
from scripts.packaging.release import RECIPE, SUMS, Clone, Packed, Refused, archive, parsed, prepare, release, sign
from scripts.packaging.version import NUMBERED, ROOT
from scripts.staging.wheel import Environment
from tests.harness.released import VERSION, Copy
from tests.harness.sandboxed import Sandbox

_CLIENT = ROOT / "scripts" / "packaging" / "client"
_FRAGMENT = "changes/+new.feature.md"


@pytest.fixture
def clone(tmp_path: Path) -> Copy:
    """What `--prepare` reads and writes, with one fragment."""
    copy = Copy.of_files(tmp_path / "clone", str(NUMBERED), "CHANGELOG.md", "pyproject.toml", "changes/README.md")
    (copy.root / _FRAGMENT).write_text("A new thing.\n")
    copy.commit()
    return copy


@pytest.mark.parametrize("word", ["1.2", "v1.2.3", "1.2.3-rc.1", "1.02.3", "1.2.3\n", "1.2.3.4", "latest", ""])
def test_words_that_are_no_version(word: str) -> None:
    """A release has three numbers."""
    with pytest.raises(Refused, match="not a version"):
        parsed(word)


def test_the_way_to_a_release(clone: Copy) -> None:
    """`--prepare` writes number and changelog; the commit with them, and no other, can be released."""
    with pytest.raises(Refused, match="--prepare"):
        clone.require_prepared(VERSION)
    prepare(clone, VERSION)
    with pytest.raises(Refused, match=r"Commit.*\n.*CHANGELOG"):
        clone.require_clean()
    clone.commit()
    clone.require_clean()
    clone.require_prepared(VERSION)
    clone.require_new(VERSION)
    section = rf"^## \[{VERSION}\] - \d{{4}}-\d\d-\d\d\n\n### New\n\n- A new thing.$"
    assert re.search(section, clone.changelog, re.MULTILINE)
    assert not (clone.root / _FRAGMENT).exists()
    (clone.root / _FRAGMENT).touch()
    with pytest.raises(Refused, match="--prepare"):
        clone.require_prepared(VERSION)


def test_the_first_release(clone: Copy) -> None:
    """The text that was written by hand follows that of the fragments, below one heading."""
    start = clone.changelog.partition("release notes start -->\n")
    text = f"{''.join(start[:2])}\n## [{VERSION}] - Unreleased\n\n### By hand\n"
    (clone.root / "CHANGELOG.md").write_text(text)
    clone.commit()
    prepare(clone, VERSION)
    assert re.search(r"A new thing\.\n+### By hand$", clone.changelog, re.MULTILINE)
    assert clone.changelog.count(f"## [{VERSION}]") == 1


def _older(clone: Copy) -> None:
    clone.git("tag", "v1.7.0")
    clone.git("tag", "nightly")
    (clone.root / "more").touch()
    clone.commit()


def _elsewhere(clone: Copy) -> None:
    clone.git("checkout", "--quiet", "-b", "other")
    _older(clone)
    clone.git("tag", "--force", "v1.7.0")
    clone.git("checkout", "--quiet", "-")


def _misnamed(clone: Copy) -> None:
    (clone.root / "changes" / "+new.wrong.md").write_text("Of no type.\n")
    clone.commit()


def _later(clone: Copy) -> None:
    hall = clone.root / NUMBERED
    hall.write_text(re.sub('NUMBER = ".*"', 'NUMBER = "1.8.0"', hall.read_text()))
    clone.commit()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_older, "not newer than 1.7.0"),
        (_elsewhere, "the tag of another commit"),
        (_misnamed, "changelog cannot be made"),
        (_later, "older than 1.8.0"),
        (lambda clone: (clone.root / "more").touch(), r"first:\n\?\? more"),
    ],
)
def test_what_is_not_prepared(clone: Copy, change: Callable[[Copy], None], reason: str) -> None:
    """Neither an old version, nor one that another commit has, nor fragments of no type, nor changed files."""
    change(clone)
    with pytest.raises(Refused, match=reason):
        prepare(clone, VERSION)


def test_a_tag_of_the_commit_itself(clone: Copy) -> None:
    """The release can be made before the tag and after it."""
    clone.git("tag", f"v{VERSION}")
    clone.require_new(VERSION)


def test_files_of_another_run(clone: Copy, tmp_path: Path) -> None:
    """They would be in the sums: the directory must be empty."""
    clone.prepare()
    (tmp_path / "file").touch()
    with pytest.raises(Refused, match="has files already"):
        release(clone, VERSION, tmp_path, None)


def test_a_key_that_is_none(tmp_path: Path) -> None:
    """The words of ssh-keygen are in the error."""
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(Refused, match=r"No such file(.|\n)*cannot be signed with /nowhere/key"):
        sign(file, Path("/nowhere/key"))


def test_an_archive_depends_on_its_files_alone(tmp_path: Path) -> None:
    """Their order does not matter, and nothing of this machine is in it."""
    files = [Packed("a/b", b"1", False), Packed("a/a", b"22", True)]
    assert archive(files, 1_000) == archive(reversed(files), 1_000) != archive(files, 1_001)
    (tmp_path / "packed").write_bytes(archive(files, 1_000))
    with tarfile.open(tmp_path / "packed") as tar:
        found = [(each.name, each.size, each.mode, each.mtime, each.uid, each.uname) for each in tar]
    assert found == [("a/a", 2, 0o755, 1_000, 0, ""), ("a/b", 1, 0o644, 1_000, 0, "")]


def test_the_bill_has_the_whole_lock() -> None:
    """Every package of the lock with all its digests, and the wheel's own."""
    lock = (ROOT / "deploy" / "requirements.txt").read_text()
    found = json.loads(bill(VERSION, b"wheel", lock, 0))
    digests = [
        digest["content"]
        for component in found["components"]
        for reference in component["externalReferences"]
        for digest in reference["hashes"]
    ]
    assert digests == re.findall(r"sha256:(\w+)", lock)
    assert [f"{each['name']}=={each['version']}" for each in found["components"]] == re.findall(
        r"^[\w.-]+==[\w.]+", lock, re.MULTILINE
    )
    own = found["metadata"]["component"]
    assert own["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(b"wheel").hexdigest()}]
    assert found["dependencies"] == [
        {"ref": own["bom-ref"], "dependsOn": [each["bom-ref"] for each in found["components"]]}
    ]


def _required(config: Path) -> list[str]:
    parser = configparser.ConfigParser()
    parser.read(config)
    return [line for line in parser["options"]["install_requires"].split("\n") if line and not line.startswith("#")]


def test_the_client_requires_what_it_imports() -> None:
    """Each package that its modules import comes with its requirements, whose bounds are those of the node."""
    required = _required(_CLIENT / "setup.cfg")
    assert set(required) <= set(_required(ROOT / "setup.cfg"))
    come = set()
    todo = [Requirement(line) for line in required]
    while todo:
        one = todo.pop()
        if (name := canonicalize_name(one.name)) in come and not one.extras:
            continue
        come.add(name)
        needs = map(Requirement, importlib.metadata.requires(name) or ())
        extras = [{"extra": extra} for extra in ("", *one.extras)]
        todo += [need for need in needs if need.marker is None or any(map(need.marker.evaluate, extras))]
    _, imported = closure(ROOT)
    homes = importlib.metadata.packages_distributions()
    # Without a build, `node._version` is not there.
    ours = imported - sys.stdlib_module_names - {"node"}
    assert ours >= {"twisted", "treq", "grpc", "google"}
    for package in ours:
        assert come & set(map(canonicalize_name, homes[package])), f"the client imports {package}: add it to {_CLIENT}"


def test_the_client_is_without_the_node() -> None:
    """Its modules are those of a caller: no room of the node beside what both sides share."""
    modules, _ = closure(ROOT)
    rooms = {str(module.parent.relative_to(ROOT)) for module in modules}
    assert rooms == {"node", "node/api", "node/base", "node/client", "node/keys", "protos"}


class Made(NamedTuple):
    """A release, the key that signed it, and the output of `scripts/release`."""

    clone: Clone
    out: Path
    key: Path
    said: str

    @property
    def wheel(self) -> Path:
        return self.out / f"txnode-{VERSION}-py3-none-any.whl"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    place = tmp_path_factory.mktemp("release")
    clone = Copy.of_all(place / "clone")
    clone.prepare()
    key = place / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    return Made(clone, place / "out", key, clone.release(place / "out", "--key", key))


@pytest.mark.slow
def test_twice_the_same_bytes(made: Made, tmp_path: Path) -> None:
    """Another directory, umask, time zone and settings of git, and files with other modes and times, change nothing."""
    again = Copy(tmp_path / "elsewhere")
    shutil.copytree(made.clone.root, again.root, copy_function=shutil.copyfile)
    for path in again.root.rglob("*"):
        path.chmod(0o700)
    again.git("config", "core.fileMode", "false")
    again.git("config", "core.autocrlf", "true")
    again.release(tmp_path / "out", umask=0o077, zone="Asia/Tehran")
    assert (tmp_path / "out" / SUMS).read_text() == (made.out / SUMS).read_text()
    assert made.said.endswith((made.out / SUMS).read_text())
    subprocess.run(["sha256sum", "--quiet", "--check", SUMS], cwd=made.out, check=True)
    assert made.clone.git("status", "--porcelain") == ""


@pytest.mark.slow
def test_every_file_is_signed(made: Made, tmp_path: Path) -> None:
    """The commands of docs/releases.md verify each file, and refuse a changed one and another key."""
    [words] = re.findall(r"^ssh-keygen -Y verify .*$", (ROOT / "docs" / "releases.md").read_text(), re.MULTILINE)
    signed = {path.name.removesuffix(".sig") for path in made.out.glob("*.sig")}
    assert signed == {path.name for path in made.out.iterdir() if path.suffix != ".sig"}
    signers, file = tmp_path / "allowed_signers", tmp_path / "FILE"

    def verified() -> bool:
        return subprocess.run(["bash", "-c", words], cwd=tmp_path, capture_output=True, check=False).returncode == 0

    signers.write_text(f"txnode {made.key.with_suffix('.pub').read_text()}")
    for name in signed:
        shutil.copy(made.out / name, file)
        shutil.copy(made.out / f"{name}.sig", tmp_path / "FILE.sig")
        assert verified(), name
        with file.open("ab") as end:
            end.write(b"\n")
        assert not verified(), name
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    signers.write_text(f"txnode {(tmp_path / 'key.pub').read_text()}")
    shutil.copy(made.out / name, file)
    assert not verified()


@pytest.mark.slow
def test_the_sdist_builds_the_wheel(made: Made, tmp_path: Path) -> None:
    """pip makes the same wheel of it, also inside another project's repository."""
    Copy.of_files(tmp_path / "around", "LICENSE")
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(made.clone.seconds)}
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    sdist = made.out / f"txnode-{VERSION}.tar.gz"
    subprocess.run([*pip, sdist], cwd=tmp_path / "around", env=environment, umask=0o022, check=True)
    [wheel] = (tmp_path / "around").glob("*.whl")
    assert (wheel.name, wheel.read_bytes()) == (made.wheel.name, made.wheel.read_bytes())


@pytest.mark.slow
def test_the_wheel_runs(made: Made, tmp_path: Path) -> None:
    """Installed, it has its version, whatever repository is around it, and the files of a service."""
    Copy.of_files(tmp_path / "around", "LICENSE")
    installed = Environment(tmp_path / "around", made.wheel.read_bytes(), VERSION)
    run = [str(installed.python), "-m", "node.nodectl", "--version"]
    assert subprocess.check_output(run, cwd=tmp_path, env={}, text=True) == f"nodectl {VERSION}\n"
    assert (installed.root / "share" / "txnode" / "node.service").is_file()
    with zipfile.ZipFile(made.wheel) as wheel:
        assert not [name for name in wheel.namelist() if name.startswith(("scripts", "tests"))]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["rest", "grpc"])
def test_the_client_alone(made: Made, tmp_path: Path, transport: str) -> None:
    """In an environment without the node, the program of its page prints a reply, and the error of a call."""
    wheel = made.out / f"txnode_client-{VERSION}-py3-none-any.whl"
    alone = Environment(tmp_path, wheel.read_bytes(), VERSION, "txnode_client")
    assert not (alone.modules / "node" / "tap.py").exists()
    program = tmp_path / "client.py"
    [code] = re.findall(r"^```python\n(.*?)^```$", (_CLIENT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    program.write_text(code)
    # The sandbox's sockets are below this directory, and their paths may have 107 bytes.
    with Sandbox(tmp_path) as node:
        (tmp_path / "key").write_text(node.key)
        port = node.rest_port if transport == "rest" else node.grpc_port
        command = [alone.python, program, transport, node.host, port, tmp_path / "key", node.certificate]
        first, second = subprocess.check_output([*map(str, command)], cwd=tmp_path, env={}, text=True).splitlines()
    assert first.endswith(" stopped")
    assert second == "backend_not_initialized: backend not initialized"


@pytest.mark.slow
def test_the_recipe_of_the_image_is_whole(made: Made) -> None:
    """It has the wheel, and each file that the Containerfile reads outside of the stage that the wheel replaces."""
    with tarfile.open(made.out / f"txnode-image-{VERSION}.tar.gz") as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
        packed = tar.extractfile(f"txnode-image-{VERSION}/wheel/{made.wheel.name}")
        assert packed and packed.read() == made.wheel.read_bytes()
    assert names == {*RECIPE, f"wheel/{made.wheel.name}"}
    stages = re.split(r"^(?=FROM )", (ROOT / "deploy" / "Containerfile").read_text(), flags=re.MULTILINE)
    read = [
        word
        for stage in stages
        if " AS wheel\n" not in stage
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", stage, re.MULTILINE)
        for word in line.split()
    ]
    assert read and set(read) <= names
