"""A folder for PYTHONPATH that brings the plugin into a Python where eaglehs is not installed.

SGLang may live in an environment or container of its own. The folder holds the package's part that runs there, as
links into this installation, and the metadata by which SGLang finds the plugin:

    eaglehs/                             __init__.py, schemas -> ..., extraction -> ...
    eaglehs-<version>.dist-info/         METADATA, entry_points.txt
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from .. import __file__ as _package_file
from .. import __version__
from ..schemas import __file__ as _schemas_file
from ..schemas.atomic import write_atomically

ENTRY_POINT_GROUP = "sglang.srt.plugins"
ENTRY_POINT = "eaglehs = eaglehs.extraction.plugin:register"


def site_name() -> str:
    """Return a name for the folder that is this installation's own.

    A server reads its plugin when it has loaded for minutes, and its processes do so one by one: another installation
    that starts one meanwhile must not put its own links there.
    """
    place = hashlib.blake2b(str(Path(_schemas_file).resolve()).encode(), digest_size=6).hexdigest()
    return f"{__version__}-{place}"


def make_plugin_site(folder: Path) -> Path:
    """Fill `folder` and return it; put it first on the server's PYTHONPATH. Made anew each time; safe to repeat.

    The links are absolute: a container must see this installation under the same path, or have eaglehs installed.
    """
    package = folder / "eaglehs"
    package.mkdir(parents=True, exist_ok=True)
    # A copy: as a link its folder would be the package's own, whose neighbours are laid out otherwise in a checkout.
    write_atomically(package / "__init__.py", Path(_package_file).read_bytes())
    _link(package / "schemas", Path(_schemas_file).parent)
    _link(package / "extraction", Path(__file__).parent)
    metadata = folder / f"eaglehs-{__version__}.dist-info"
    metadata.mkdir(exist_ok=True)
    write_atomically(metadata / "METADATA", f"Metadata-Version: 2.1\nName: eaglehs\nVersion: {__version__}\n".encode())
    write_atomically(metadata / "entry_points.txt", f"[{ENTRY_POINT_GROUP}]\n{ENTRY_POINT}\n".encode())
    return folder


def _link(link: Path, target: Path) -> None:
    part = link.with_name(f".{link.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    part.symlink_to(target.resolve(), target_is_directory=True)
    part.replace(link)
