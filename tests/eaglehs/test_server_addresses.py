"""`--server`, once or several times: what is understood, and what is refused because rows could get lost."""

from pathlib import Path

import pytest
from eaglehs.schemas.errors import UsageError

from eaglehs.server_addresses import ServerAddress, parse_servers

ONE, TWO = "http://127.0.0.1:30000", "http://127.0.0.1:30001"


def test_one_server_takes_the_dump_folder_from_either_place():
    assert parse_servers([ONE], None) == (ServerAddress(url=ONE, dump_dir=None),)
    assert parse_servers([f"{ONE}/"], Path("/d")) == (ServerAddress(url=ONE, dump_dir=Path("/d")),)
    assert parse_servers([f"{ONE}=/d"], None) == (ServerAddress(url=ONE, dump_dir=Path("/d")),)


def test_several_servers_have_a_folder_each():
    servers = parse_servers([f"{ONE}=/a", f"{TWO}=/b=c"], None)
    assert [(server.url, server.dump_dir) for server in servers] == [(ONE, Path("/a")), (TWO, Path("/b=c"))]
    assert [str(server) for server in servers] == [f"{ONE}=/a", f"{TWO}=/b=c"]


@pytest.mark.parametrize(
    ("texts", "dump_dir", "words"),
    [
        (["localhost:30000"], None, "'localhost:30000' is no address.*http://HOST:PORT=DUMPDIR"),
        ([f"{ONE}="], None, "is no address"),
        ([f"{ONE}=/a"], "/b", "--dump-dir /b and --server http://127.0.0.1:30000=/a name two dump folders"),
        ([f"{ONE}=/a", TWO], None, "--server http://127.0.0.1:30001 has no dump folder of its own"),
        ([ONE, TWO], "/a", "has no dump folder of its own"),
        ([f"{ONE}=/a", f"{TWO}=/a/../a/"], None, "are given one dump folder"),
        ([f"{ONE}=/a", f"{ONE}/=/b"], None, "is given twice"),
    ],
)
def test_what_would_mix_dumps_is_refused(texts: list[str], dump_dir: str | None, words: str):
    with pytest.raises(UsageError, match=words):
        parse_servers(texts, Path(dump_dir) if dump_dir else None)
