"""The house rules that a machine can check: which way imports point, how long things are, what opens a folder."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("schemas", "extraction", "builder", "cards", "eaglehs")
MAY_IMPORT = {
    "schemas": set(),
    "extraction": {"schemas"},
    "builder": {"schemas"},
    "cards": {"schemas"},
    "eaglehs": {"schemas", "extraction", "builder", "cards"},
}
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_LONG_SHARE = 0.02
NAMES_OF_NO_SUBJECT = {"utils.py", "helpers.py", "common.py", "misc.py"}
PACKAGE_FACTS = {"eaglehs", "eaglehs.__version__", "eaglehs.__file__"}
"""Names of the package itself; they belong to no folder."""


def folder_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def imported_modules(path: Path) -> Iterator[str]:
    """Yield absolute names, as `eaglehs.<folder>...` for our own."""
    package = ["eaglehs", *path.relative_to(ROOT).parts[:-1]]
    if package[1] == "eaglehs":
        package.pop(1)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way_only(path: Path):
    folder = folder_of(path)
    for module in imported_modules(path):
        parts = module.split(".")
        if parts[0] == "eaglehs" and module not in PACKAGE_FACTS:
            target = parts[1] if parts[1] in FOLDERS else "eaglehs"
            assert target in MAY_IMPORT[folder] | {folder}, f"{path.name} imports {module}"


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if folder_of(p) == "schemas"], ids=lambda path: str(path.relative_to(ROOT))
)
def test_schemas_import_the_standard_library_only(path: Path):
    tops = {module.split(".")[0] for module in imported_modules(path)} - {"eaglehs", ""}
    assert tops <= set(sys.stdlib_module_names), f"{path.name} imports {tops}"


def guest_files() -> list[Path]:
    """The plugin and all of `extraction` that it imports, however deep."""
    found, unread = set(), {ROOT / "extraction" / "plugin.py"}
    while unread:
        path = unread.pop()
        found.add(path)
        for module in imported_modules(path):
            if module.startswith("eaglehs.extraction."):
                imported = ROOT / "extraction" / f"{module.split('.')[2]}.py"
                if imported.exists() and imported not in found:
                    unread.add(imported)
    return sorted(found)


@pytest.mark.parametrize("path", guest_files(), ids=lambda path: path.name)
def test_what_runs_inside_sglang_imports_only_torch_and_schemas(path: Path):
    for module in imported_modules(path):
        is_known = module.split(".")[0] in {*sys.stdlib_module_names, "torch", "sglang"} or module in PACKAGE_FACTS
        is_ours = module.startswith(("eaglehs.schemas", "eaglehs.extraction"))
        assert is_known or is_ours, f"{path.name} imports {module}"


def test_no_file_is_longer_than_a_reader_can_hold():
    everything = [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]
    long = {str(p.relative_to(ROOT)): n for p in everything if (n := len(p.read_text().splitlines())) > MAX_FILE_LINES}
    assert not long


def test_no_file_is_named_after_no_subject():
    assert not [path for path in ROOT.rglob("*.py") if path.name in NAMES_OF_NO_SUBJECT and ".venv" not in path.parts]


def test_functions_fit_a_screen():
    lengths = {
        f"{path.relative_to(ROOT)}:{node.name}": _body_lines(node)
        for path in SOURCES
        if "commands" not in path.parts  # a command's signature is its list of options
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    long = {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES}
    assert len(long) <= MAX_LONG_SHARE * len(lengths), long


def _body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_tests_of_real_sglang_say_so_in_the_name_of_their_file():
    """By the name they are kept in one process; see tests/conftest.py."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        if "mark.sglang" in path.read_text() and path != Path(__file__):
            assert "sglang" in path.name, path


COUNTED_NOUNS = (
    "bytes|chunks|dumps|faults|files|ids|layers|messages|nodes|offsets|processors|prompts|ranks|records|replicas|requests|"
    "rows|samples|servers|shards|states|tensors|threads|tokens|tries|values"
)
A_COUNT_AND_ITS_NOUN = re.compile(rf"\x00 (?:[a-z-]+ )?(?:{COUNTED_NOUNS})\b(?!/)")
IN_A_TEMPLATE = re.compile(rf"\}}\}} (?:[a-z-]+ )?(?:{COUNTED_NOUNS})\b")
NO_COUNTS = {"{found.name} values", "{', '.join(_FILE_SUFFIXES)} files", "{root} lacks shards"}
"""What only looks like a count and its noun."""


def text_of(node: ast.JoinedStr) -> str:
    """An f-string with a NUL for each value, and what eaglehs.schemas.counts.counted gives left out."""
    return "".join(
        part.value if isinstance(part, ast.Constant) else "" if "counted(" in ast.unparse(part) else "\x00"
        for part in node.values
    )


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_count_has_its_noun_from_counted(path: Path):
    """Written beside the count, the noun is a plural also of one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr) and A_COUNT_AND_ITS_NOUN.search(text_of(node)):
            told = ast.unparse(node)
            assert any(known in told for known in NO_COUNTS), f"{path.name}:{node.lineno}: {told}"


@pytest.mark.parametrize("name", ["card.md", "report.html"])
def test_a_count_in_a_template_has_its_noun_from_counted(name: str):
    assert not IN_A_TEMPLATE.findall((ROOT / "cards" / name).read_text())


def test_every_folder_opens_with_its_story():
    for folder in ("schemas", "extraction", "builder", "cards", "tests", "bench"):
        readme = ROOT / folder / "README.md"
        assert readme.exists(), f"{folder} has no README.md"
        assert len(readme.read_text().splitlines()) <= 80, f"{readme} is longer than a page"


def test_the_changelog_has_an_unreleased_part():
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()
