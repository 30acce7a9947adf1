"""What a server is started with, and what is never shown of it."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from eaglehs.extraction.profile import Profile, ProfileError, load_profile, shipped_profiles
from eaglehs.extraction.redaction import is_secret_name, secret_values
from eaglehs.extraction.server_command import ContradictingArgumentError, ServerCommand, ServerSettings, build_command


def make_settings(**changes: Any) -> ServerSettings:
    defaults = {"model": "org/model", "layers": (3, 31, 59), "dump_dir": Path("/dumps"), "sglang_python": "python3"}
    return ServerSettings(**(defaults | changes))


def make_command(*, version: tuple[int, ...] | None = (0, 5, 23), **changes: Any) -> ServerCommand:
    return build_command(make_settings(**changes), port=30000, version=version)


def test_the_command_has_all_that_capture_needs():
    command = make_command(revision="abc", trust_remote_code=True, rid_prefix="eh-run1-")
    assert command.argv == (
        *("python3", "-m", "sglang.launch_server", "--model-path", "org/model", "--revision", "abc"),
        *("--trust-remote-code", "--host", "127.0.0.1", "--port", "30000"),
        *("--skip-tokenizer-init", "--disable-radix-cache"),
        *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
        *("--enforce-disable-flashinfer-allreduce-fusion", "--skip-server-warmup"),
    )
    assert command.environment == {
        "SGLANG_HS_DUMP_DIR": "/dumps",
        "SGLANG_HS_LAYERS": "3,31,59",
        "SGLANG_HS_RID_PREFIX": "eh-run1-",
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
    }


def test_older_versions_get_the_graph_switches_that_they_know():
    argv = make_command(version=(0, 5, 11)).argv
    assert argv[-4:-2] == ("--disable-cuda-graph", "--disable-piecewise-cuda-graph")


def test_the_users_arguments_come_last_and_so_win_over_the_profiles():
    argv = make_command(profile=load_profile("kimi-k25"), extra_args=("--tp-size", "4")).argv
    assert argv.index("8") < argv.index("4")
    assert argv[-2:] == ("--tp-size", "4")


def test_the_kimi_profile_is_the_reference_run():
    profile = load_profile("kimi-k25")
    assert profile.layers == (3, 31, 59)
    assert str(profile.dump_dir).startswith("/dev/shm/")
    command = make_command(profile=profile)
    assert shlex.join(command.argv).endswith(
        "--tp-size 8 --mem-fraction-static 0.85 --attention-backend triton --disable-custom-all-reduce"
    )
    assert {name: value for name, value in command.environment.items() if name.startswith("NCCL")} == {
        "NCCL_PROTO": "LL",
        "NCCL_ALGO": "Ring",
        "NCCL_P2P_LEVEL": "SYS",
        "NCCL_MAX_NCHANNELS": "16",
        "NCCL_BUFFSIZE": "16777216",
        "NCCL_NTHREADS": "512",
    }


@pytest.mark.parametrize("name", shipped_profiles())
def test_every_shipped_profile_makes_a_command(name: str):
    profile = load_profile(name)
    assert profile.description
    assert make_command(profile=profile).argv


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--speculative-algorithm", "EAGLE3"),
            r"--speculative-algorithm EAGLE3 \(speculative decoding\) can't be used",
        ),
        (("--pp-size=2",), "Only the last stage could be captured"),
        (("--model-path", "other"), "--model-path can't be given to SGLang directly.*Use --model instead"),
        (("--port", "1"), "Use --port instead"),
    ],
)
def test_contradicting_arguments_are_refused_with_the_reason(arguments: tuple[str, ...], message: str):
    with pytest.raises(ContradictingArgumentError, match=message):
        make_command(extra_args=arguments)


def test_a_profile_is_held_to_the_same_rules():
    profile = Profile(server=Profile().server.__class__(args=("--enable-dp-attention",)))
    with pytest.raises(ContradictingArgumentError, match="data-parallel attention"):
        make_command(profile=profile)


def test_a_plugin_list_of_the_users_gets_ours_added(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "mine, other")
    assert make_command().environment["SGLANG_PLUGINS"] == "mine, other,eaglehs"
    monkeypatch.setenv("SGLANG_PLUGINS", "eaglehs")
    assert "SGLANG_PLUGINS" not in make_command().environment


def test_the_plugin_site_comes_first_on_the_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    command = build_command(make_settings(), port=1, plugin_site=Path("/site"))
    assert command.environment["PYTHONPATH"] == "/site:/mine"


def test_secrets_are_used_but_never_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_inherited")
    profile = Profile(environment={"HF_TOKEN": "hf_given", "TOKENIZERS_PARALLELISM": "false"})
    command = make_command(profile=profile, extra_args=("--api-key", "sk-1", "--admin-api-key=sk-2", "--tp-size", "2"))
    shown = command.shell_line()
    assert command.api_key == "sk-1"
    assert command.full_environment["HF_TOKEN"] == "hf_given"
    assert "--api-key '***' '--admin-api-key=***' --tp-size 2" in shown
    assert "HF_TOKEN='***' " in shown
    assert "TOKENIZERS_PARALLELISM=false" in shown
    for secret in ("sk-1", "sk-2", "hf_given"):
        assert secret not in shown
        assert secret in command.secrets


def test_secrets_come_longest_first_so_that_none_is_left_as_part_of_another():
    secrets = secret_values(["--api-key", "abcd"], {"HF_TOKEN": "abcdef", "MY_SECRET": "x", "PATH": "/bin"})
    assert secrets == ("abcdef", "abcd")


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        ("HF_TOKEN", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("WANDB_API_KEY", True),
        ("PGPASSWORD", True),
        ("DB_PASSWORD", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("NCCL_PROTO", False),
        ("KEYBOARD", False),
    ],
)
def test_secret_variables_are_known_by_their_words(name: str, is_secret: bool):
    assert is_secret_name(name) == is_secret


def test_a_shown_command_can_be_pasted_into_a_shell():
    line = make_command(model="my model", extra_args=("--x", "a'b")).shell_line()
    words = shlex.split(line)
    assert words[0] == "env"
    assert words[words.index("--model-path") + 1] == "my model"
    assert words[-1] == "a'b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp_size = 8", r"unknown key 'tp_size'; known keys: .*server"),
        ("[server]\ntp = 8", r"server: unknown key 'tp'; known keys: .*tp_size"),
        ("[server]\ntp_size = 'eight'", "server: tp_size: expected int, found 'eight'"),
        ("[server]\ntp_size = 0", "server.tp_size is 0"),
        ("[server]\nmem_fraction_static = 85", "mem_fraction_static is 85.0, expected 0 to 1"),
        ("[environment]\nNCCL_NTHREADS = 512", "environment.NCCL_NTHREADS: expected str"),
        ("[environment]\nSGLANG_HS_LAYERS = '1'", "environment.SGLANG_HS_LAYERS can't be set by a profile"),
        ("layers = [", "is not TOML"),
    ],
)
def test_a_profile_that_says_something_unknown_is_refused_by_name(tmp_path: Path, text: str, message: str):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ProfileError, match=message):
        load_profile(str(path))


def test_an_unknown_profile_names_those_there_are():
    with pytest.raises(ProfileError, match=r"no profile 'kimi'.*cpu, kimi-k25"):
        load_profile("kimi")


def test_a_profile_of_the_users_is_loaded_by_path(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text("layers = [1, 2]\n[server]\nmem_fraction_static = 0.5\nargs = ['--log-level', 'warning']\n")
    profile = load_profile(str(path))
    assert profile.layers == (1, 2)
    assert profile.server.arguments() == ("--mem-fraction-static", "0.5", "--log-level", "warning")
