"""The command as a whole: quick to help, one help text, errors as text with exit codes, defaults from eaglehs.toml."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from eaglehs import __version__
from eaglehs.commands.registry import COMMANDS
from tests.eaglehs.cli import eaglehs

GOLDEN = Path(__file__).parent.parent / "golden" / "help.txt"
HEAVY = ("torch", "transformers", "datasets", "numpy", "sglang", "pyarrow", "huggingface_hub", "rich.progress")


def help_of_all_commands() -> str:
    texts = [eaglehs("--help").stdout, *(eaglehs(command, "--help").stdout for command in COMMANDS)]
    return "\n".join(texts)


def test_help_is_the_text_that_was_agreed_on():
    assert help_of_all_commands() == GOLDEN.read_text(), "run `make goldens` if the new text is meant"


@pytest.mark.parametrize(
    ("arguments", "flag", "words"),
    [
        (("pack",), "--codec", "'plain', 'planes-zstd'"),
        (("extract", "--model", "m", "--prompts", "p"), "--codec", "'plain', 'planes-zstd'"),
        (("extract", "--model", "m", "--prompts", "p"), "--engine", "'auto', 'sglang', 'transformers'"),
        (("extract", "--model", "m", "--prompts", "p"), "--loss-mask", "'assistant', 'last', 'all'"),
    ],
)
def test_a_word_that_is_no_choice_is_told_in_our_words_alone(arguments, flag, words, tmp_path):
    """Typer puts pydantic's "Value error," before them where the choice is its own; so no option may be one."""
    done = eaglehs(*arguments, flag, "zip", cwd=tmp_path)
    assert done.returncode == 2
    assert f"Error: Invalid value for '{flag}': 'zip' is not one of {words}.\n" in done.stderr


def test_help_needs_no_heavy_module():
    code = (
        "import sys\nsys.argv = ['eaglehs', '--help']\nfrom eaglehs.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_help_comes_at_once():
    """In seconds of a core, so that a busy machine makes no difference."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert eaglehs("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(5)) < 0.3


def test_every_command_shows_two_examples():
    for command in COMMANDS:
        text = eaglehs(command, "--help").stdout
        assert text.count(f"eaglehs {command}") >= 2, command


def test_the_version_is_printed_on_stdout():
    assert eaglehs("--version").stdout == f"eaglehs {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (("verify", "nowhere"), 2, "there is no folder nowhere"),
        (("pack", "nowhere"), 2, "there is no folder nowhere"),
        (("extract", "--model", "nowhere/at/all", "--prompts", "p.jsonl"), 2, "nowhere/at/all"),
        (("extract", "--prompts", "p.jsonl"), 2, "--model"),
        (("pack", "--shard-size", "2XB"), 2, "2XB"),
        (("extract", "--model", "m", "--prompts", "p", "--layers", "a,b"), 2, "'a,b' is not a list of numbers"),
        (("extract", "--model", "m", "--prompts", "p", "stray"), 2, "unexpected argument 'stray'"),
        (("unknown",), 2, "unknown"),
    ],
)
def test_wrong_input_is_told_in_one_message_without_a_traceback(arguments, exit_code, message, tmp_path):
    done = eaglehs(*arguments, cwd=tmp_path)
    assert done.returncode == exit_code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_options_come_from_eaglehs_toml_and_flags_win_over_it(tmp_path):
    (tmp_path / "eaglehs.toml").write_text('[pack]\nshard-size = "2XB"\n')
    assert "'2XB' is not a size" in eaglehs("pack", cwd=tmp_path).stderr
    assert "2XB" not in eaglehs("pack", "--shard-size", "1GB", cwd=tmp_path).stderr


@pytest.mark.parametrize("value", ['"http://a:1"', '["http://a:1"]'])
def test_an_option_that_may_be_given_several_times_is_a_text_or_a_list_in_eaglehs_toml(value, tmp_path):
    (tmp_path / "eaglehs.toml").write_text(f"[extract]\nserver = {value}\n")
    done = eaglehs("extract", "--model", "m", "--prompts", "p", "--engine", "transformers", cwd=tmp_path)
    assert "--server needs the sglang engine" in done.stderr or "http://a:1" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[pack]\nshard_sise = '1GB'\n", r"[pack] has no option 'shard_sise'"),
        ("[pakc]\n", "[pakc] is no command"),
        ("[pack\n", "eaglehs.toml can't be read"),
    ],
)
def test_a_mistake_in_eaglehs_toml_is_named(text, message, tmp_path):
    (tmp_path / "eaglehs.toml").write_text(text)
    done = eaglehs("pack", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_json_is_one_document_on_stdout(tmp_path):
    done = eaglehs("verify", "nowhere", "--json", cwd=tmp_path)
    assert done.stdout == "" or json.loads(done.stdout)
