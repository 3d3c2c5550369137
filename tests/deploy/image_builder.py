"""The Dockerfile built by buildah, without a registry and without an engine.

The base image is a Debian root of the same release made by debootstrap, for python:3.11-slim is one too. Everything
lives in one folder, and every command has its own mounts and processes, so nothing is left behind whatever happens.
"""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .tools import REPOSITORY, missing, run, tool

_BASE_IMAGE = "localhost/python-stand-in"
_DEBIAN_PACKAGES = "ca-certificates,python3,python3-venv"
_PIP_SECTIONS = {"global", "install", ":env:"}
_LOOPBACK_UP = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


class ImageBuilder:
    def __init__(self, folder: Path, root: Path) -> None:
        self._folder = folder
        self._root = root
        self._buildah = [tool("buildah"), f"--root={folder / 'storage'}", f"--runroot={folder / 'run'}"]
        self._buildah.append(f"--storage-driver={_storage_driver(self._buildah)}")

    def make_base(self, suite: str) -> None:
        with _only_one(self._root):
            if not self._root.exists():
                self._bootstrap(suite)
            container = self._run([*self._buildah, "from", "scratch"]).strip()
            self._run([*self._buildah, "add", "--quiet", container, self._root, "/"])
        self._run([*self._buildah, "commit", "--quiet", "--rm", container, _BASE_IMAGE])

    def _bootstrap(self, suite: str) -> None:
        root = self._folder / "base"
        mirror = debian_mirror(suite)
        bootstrap = [tool("debootstrap"), "--variant=minbase", f"--include={_DEBIAN_PACKAGES}", suite, root]
        self._run([*bootstrap, *([mirror] if mirror else [])])
        (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        packed = self._folder / "base.tar"
        self._run(["tar", "--create", f"--file={packed}", f"--directory={root}", "."])
        shutil.rmtree(root)
        shutil.move(packed, self._root)

    def build(self, target: str, arguments: Mapping[str, str]) -> str:
        """The image's name."""
        image = f"localhost/lighthouse-ft:{target}"
        given = {"PYTHON_IMAGE": _BASE_IMAGE, **arguments}
        self._run(
            [
                *self._buildah,
                "build",
                "--isolation=chroot",
                "--pull-never",
                "--format=docker",
                "--layers=false",
                f"--target={target}",
                f"--tag={image}",
                *(f"--build-arg={name}={value}" for name, value in given.items()),
                *(f"--volume={volume}" for volume in pip_volumes(self._folder / "pip.conf")),
                REPOSITORY,
            ]
        )
        return image

    def container(self, image: str) -> "Container":
        config = json.loads(self._run([*self._buildah, "inspect", "--type=image", image]))["Docker"]["config"]
        name = self._run([*self._buildah, "from", "--pull-never", image]).strip()
        return Container([*self._buildah, "run", "--isolation=chroot"], name, config)

    @staticmethod
    def _run(command: Sequence[str | Path]) -> str:
        result = run([*_alone(), *command])
        assert result.returncode == 0, f"{command} ended with {result.returncode}:\n{result.stdout}\n{result.stderr}"
        return result.stdout


class Container:
    """`config` is the image's as Docker keeps it: User, Env, Cmd, Healthcheck ..."""

    def __init__(self, buildah_run: Sequence[str], name: str, config: dict[str, Any]) -> None:
        self._buildah_run = buildah_run
        self._name = name
        self.config = config

    def run(self, *command: str, input: str | None = None) -> subprocess.CompletedProcess[str]:
        """As the image's user, in a network of its own that has the loopback only."""
        alone = [*_alone("--net"), *_LOOPBACK_UP]
        return run([*alone, *self._buildah_run, self._name, "--", *command], input=input, timeout=300)


@contextmanager
def image_builder(root: Path) -> Iterator[ImageBuilder]:
    """`root`: a file for the root of the base, which the first of several that build at the same time makes for all."""
    if os.geteuid() != 0:
        missing("building images takes root here")
    tool("ip")
    with tempfile.TemporaryDirectory(prefix="lighthouse-image-") as folder:
        try:
            yield ImageBuilder(Path(folder), root)
        finally:
            with _only_one(root):
                root.unlink(missing_ok=True)


@contextmanager
def _only_one(root: Path) -> Iterator[None]:
    """At a time, of those that build."""
    with root.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _storage_driver(buildah: Sequence[str]) -> str:
    """The one that copies nothing, where the kernel and this file system have it."""
    works = run([*_alone(), *buildah, "--storage-driver=overlay", "info"]).returncode == 0
    return "overlay" if works else "vfs"


def _alone(*more: str) -> list[str]:
    """In front of a command: its mounts end with it, and its processes with whoever waits for it."""
    return [tool("unshare"), "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *more]


def debian_mirror(suite: str) -> str | None:
    """Where this machine's apt takes `suite` from; None: let debootstrap choose."""
    if shutil.which("apt-get") is None:
        return None
    targets = run(["apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI)"])
    found = [line.split()[1] for line in targets.stdout.splitlines() if line.startswith(f"{suite} ")]
    return found[0] if found else None


def pip_volumes(configuration: Path) -> list[str]:
    """Volumes that make pip inside look where pip outside looks: its settings and the local files these name."""
    settings = pip_settings()
    lines = [f"{name} = {value}" for name, value in settings.items()]
    configuration.write_text("\n".join(["[global]", *lines, ""]))
    local = {path for name, value in settings.items() for path in _local_paths(name, value)}
    return [f"{configuration}:/etc/pip.conf:ro", *(f"{path}:{path}:ro" for path in sorted(local))]


def _local_paths(setting: str, value: str) -> Iterator[Path]:
    """A local index's pages may lead to files beside it, so its parent is what counts."""
    for word in value.split():
        path = Path(word.removeprefix("file://"))
        if path.is_absolute() and path.exists():
            has_neighbours = setting.endswith("index-url") and path.parent != Path("/")
            yield path.parent if has_neighbours else path


def pip_settings() -> dict[str, str]:
    """What `pip config list` shows, the environment's settings last, and the certificates that this machine trusts."""
    show = [sys.executable, "-m", "pip", "config", "list"]
    listed = re.findall(r"^(\S+?)\.([\w-]+)='(.*)'$", run(show).stdout, flags=re.MULTILINE)
    by_rank = sorted(listed, key=lambda entry: entry[0] == ":env:")
    settings = {name: value.replace("\\n", " ") for section, name, value in by_rank if section in _PIP_SECTIONS}
    bundles = (os.environ.get(name) for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"))
    trusted = next((bundle for bundle in bundles if bundle), None)
    return settings if trusted is None else {"cert": trusted, **settings}
