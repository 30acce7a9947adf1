"""`--server`, once or several times: which running servers to use, and where each leaves its dumps.

    --server URL [--dump-dir DIR]                       one server
    --server URL=DIR --server URL=DIR ...               several, each with a dump folder of its own

A folder belongs to one server: it holds one status file, and two servers would answer for each other's dumps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .schemas.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """One running server."""

    url: str
    dump_dir: Path | None
    """The folder that it dumps into, on this machine; None: the default one."""

    def __str__(self) -> str:
        """As it is given on the command line."""
        return self.url if self.dump_dir is None else f"{self.url}={self.dump_dir}"


def parse_servers(texts: Sequence[str], dump_dir: Path | None) -> tuple[ServerAddress, ...]:
    """Return the servers that `--server` names; `dump_dir` is the run's `--dump-dir`.

    Raises:
        UsageError: a text is no address, or it is not clear which server dumps where.
    """
    servers = tuple(_parse(text, dump_dir) for text in texts)
    if len(servers) > 1:
        _check_several(servers, dump_dir)
    return servers


def _parse(text: str, dump_dir: Path | None) -> ServerAddress:
    url, is_given, folder = text.partition("=")
    if not url.startswith(("http://", "https://")) or (is_given and not folder):
        raise UsageError(
            f"--server {text!r} is no address", mend="Give http://HOST:PORT, or http://HOST:PORT=DUMPDIR of several"
        )
    if is_given and dump_dir is not None:
        raise UsageError(f"--dump-dir {dump_dir} and --server {text} name two dump folders", mend="Give one of them")
    return ServerAddress(url=url.rstrip("/"), dump_dir=Path(folder) if is_given else dump_dir)


def _check_several(servers: Sequence[ServerAddress], dump_dir: Path | None) -> None:
    folders: dict[Path, str] = {}
    for server in servers:
        if server.dump_dir is None or dump_dir is not None:
            raise UsageError(
                f"--server {server.url} has no dump folder of its own",
                why="Of several servers each dumps into its own folder",
                mend=f"Give it as --server {server.url}=DUMPDIR, with what the server was given as --dump-dir",
            )
        other = folders.setdefault(server.dump_dir.resolve(), server.url)
        if other != server.url:
            raise UsageError(
                f"{other} and {server.url} are given one dump folder, {server.dump_dir}",
                why="Two servers must not write into one folder",
                mend="Start each with a --dump-dir of its own",
            )
    urls = [server.url for server in servers]
    if twice := [url for url in urls if urls.count(url) > 1]:
        raise UsageError(f"--server {twice[0]} is given twice", mend="Give each server once")
