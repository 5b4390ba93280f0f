"""Builds the images of deploy/Dockerfile, for ``make images``.

docker builds them where its daemon answers. Elsewhere root needs no daemon and no registry of images: mmdebstrap makes
the base of Debian's packages, and buildah runs the Dockerfile on it. buildah keeps the images in ``build/images``.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from .commands import ROOT, project_version

FOLDER = ROOT / "build" / "images"
TARGETS = ("server", "worker", "etcd")
TOOLS = ("mmdebstrap", "buildah")
BASE = "sparserow-debian"
# As in Debian's own image: no manuals, no texts in other languages, no perl beside the one that dpkg needs, and nothing
# that apt keeps for another time.
LEFT_OUT = ("man", "info", "locale", "doc")
KEEP_NOTHING = 'APT::Keep-Downloaded-Packages "false"; Dir::Cache::pkgcache ""; Dir::Cache::srcpkgcache "";'
PACKAGES = "/opt/sparserow"
_WHERE = ("global", "install", ":env:")  # of pip's settings; a later one counts more


def run(*command: str | Path) -> str:
    """Runs a command and returns what it prints; what it says on standard error passes through.

    Raises:
        SystemExit: the command fails.
    """
    done = subprocess.run([str(part) for part in command], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout}sparserow: {' '.join(map(str, command[:1]))} failed with {done.returncode}")
    return done.stdout.strip()


def has_docker() -> bool:
    """Returns whether a daemon of Docker answers."""
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


class Docker:
    """Images that Docker builds and keeps."""

    def build(self, target: str, name: str) -> None:
        """Builds a target of the Dockerfile."""
        run("docker", "build", "-q", "-f", "deploy/Dockerfile", "--target", target, "-t", name, ".")

    def sizes(self, name: str) -> tuple[int, int]:
        """Returns the bytes of all files of an image, and of those below ``PACKAGES``."""
        entry = ("docker", "run", "--rm", "--user=0", "--network=none", "--entrypoint=du", name)
        return _counted(run(*entry, "-sxb", "/")), _counted(run(*entry, "-sbc", PACKAGES))


class Buildah:
    """Images that buildah builds as root and keeps in a folder.

    Args:
        folder: the folder of the images.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._buildah = ("buildah", "--root", folder / "storage", "--runroot", folder / "run")

    def build(self, target: str, name: str) -> None:
        """Builds a target of the Dockerfile, with the settings that pip has outside."""
        if not run(*self._buildah, "images", "--noheading", "--filter", f"reference=localhost/{BASE}"):
            self._make_base()
        settings = [part for mount in self.pip_mounts() for part in ("--volume", mount)]
        isolated = ("--isolation", "chroot", "--layers", "--pull=never", "--quiet")
        arguments = ("--build-arg", f"DEBIAN=localhost/{BASE}", "--ignorefile", "deploy/Dockerfile.dockerignore")
        run(*self._buildah, "bud", *isolated, *settings, *arguments,
            "-f", "deploy/Dockerfile", "--target", target, "-t", name, ".")  # fmt: skip

    def sizes(self, name: str) -> tuple[int, int]:
        """Returns the bytes of all files of an image, and of those below ``PACKAGES``."""
        with self.mounted(name) as root:
            packages = root / PACKAGES.lstrip("/")
            return _counted(run("du", "-sb", root)), _counted(run("du", "-sb", packages)) if packages.exists() else 0

    @contextmanager
    def container(self, name: str) -> Iterator[str]:
        """Has a new container of an image, whose id it yields; the container is removed after the block."""
        container = run(*self._buildah, "from", "--pull=never", f"localhost/{name}")
        try:
            yield container
        finally:
            run(*self._buildah, "rm", container)

    @contextmanager
    def mounted(self, name: str) -> Iterator[Path]:
        """Yields the root folder of a new container of an image."""
        with self.container(name) as container:
            yield Path(run(*self._buildah, "mount", container))

    def run_command(self, container: str, volume: str, *command: str) -> list[str | Path]:
        """Returns the command line that runs a command in a container, with a volume, as a process of this machine."""
        return [*self._buildah, "run", "--isolation", "chroot", "--volume", volume, container, "--", *command]

    def _make_base(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        archive = self._folder / "debian.tar"
        excluded = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in LEFT_OUT]
        kept = "--dpkgopt=path-include=/usr/share/doc/*/copyright"
        # usrmerge would come otherwise, which needs perl.
        merged = ("--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr", "--include=usr-is-merged")
        # As a hook, because mmdebstrap itself needs what it downloads.
        hook = f"echo '{KEEP_NOTHING}' > $1/etc/apt/apt.conf.d/keep-nothing; rm $1/var/cache/apt/*.bin"
        options = (*excluded, kept, *merged, f"--customize-hook={hook}")
        run("mmdebstrap", "--quiet", "--variant=minbase", *options, "bookworm", archive)
        container = run(*self._buildah, "from", "scratch")
        run(*self._buildah, "add", container, archive, "/")
        run(*self._buildah, "commit", "--quiet", "--rm", container, BASE)
        archive.unlink()

    def pip_mounts(self) -> list[str]:
        """Returns what to mount so that pip finds packages as it does here: its settings, and the files they name."""
        lines = (line.split("=", 1) for line in run(sys.executable, "-m", "pip", "config", "list").splitlines())
        found = [(*name.rsplit(".", 1), " ".join(ast.literal_eval(value).split())) for name, value in lines]
        settings = {name: value for where in _WHERE for at, name, value in found if at == where}
        # Certificates that pip takes without a setting of its own.
        for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
            if name in os.environ:
                settings.setdefault("cert", os.environ[name])
        mounts: dict[Path, str] = {}
        for name, value in settings.items():
            settings[name] = " ".join(_place_inside(place, mounts) for place in value.split())
        file = self._folder / "pip.conf"
        file.write_text("\n".join(["[global]", *(f"{name} = {value}" for name, value in settings.items())]) + "\n")
        return [*(f"{path}:{inside}:ro" for path, inside in mounts.items()), f"{file}:/etc/pip.conf:ro"]


def _place_inside(place: str, mounts: dict[Path, str]) -> str:
    """Returns a word of pip's settings for a build, whose files and folders get places there.

    Mount points stay in an image, as empty folders, so the places do not show those of this machine.
    """
    # The files of an index lie beside the folder of its pages.
    path = Path(urlsplit(place).path).parent if place.startswith("file:") else Path(place)
    if not path.is_absolute() or not path.exists():
        return place
    return place.replace(str(path), mounts.setdefault(path, f"/mnt/pip/{len(mounts)}"))


def _counted(line: str) -> int:
    return int(line.split()[0])


def builder() -> Docker | Buildah:
    """Returns what builds images here.

    Raises:
        SystemExit: nothing does; the text says what to install.
    """
    if has_docker():
        return Docker()
    if os.geteuid() != 0 or any(shutil.which(tool) is None for tool in TOOLS):
        raise SystemExit(f"sparserow: images need Docker, or root with the Debian packages {' and '.join(TOOLS)}")
    return Buildah(FOLDER)


def main() -> None:
    """Builds the images, and prints the name and the sizes of each."""
    chosen = sys.argv[1:] or TARGETS
    by = builder()
    for target in chosen:
        name = f"sparserow-{target}:{project_version()}"
        print(f"sparserow: building {name}", flush=True)
        by.build(target, name)
        whole, packages = by.sizes(name)
        print(f"{name}: {whole / 1e6:.0f} MB, of which {packages / 1e6:.0f} MB are Python packages", flush=True)


if __name__ == "__main__":
    main()
