"""What is told when a run goes on with another engine than it was begun with."""

from eaglehs.extraction.engine_changes import engine_changes

from tests.factories.records import engine_facts

SERVER = ("python", "-m", "sglang.launch_server", "--model-path", "m", "--port", "31000", "--disable-radix-cache")


def server_facts(*arguments: str, version: str = "0.5.23", device: str = "cuda"):
    return engine_facts(name="sglang", versions={"sglang": version}, command=(*SERVER, *arguments), device=device)


def test_a_first_start_and_the_same_server_again_change_nothing():
    assert not list(engine_changes(engine_facts(versions={}, command=(), device=""), server_facts()))
    assert not list(engine_changes(server_facts(), server_facts("--port", "31001")))
    assert not list(engine_changes(server_facts("--tp-size=8"), server_facts("--tp-size", "8")))


def test_versions_device_and_arguments_are_told_by_value():
    before = server_facts("--quantization", "fp8", "--tp-size", "8", version="0.5.16")
    now = server_facts("--tp-size", "4", "--enable-mixed-chunk", device="cpu")
    assert list(engine_changes(before, now)) == [
        "sglang 0.5.16 then, 0.5.23 now",
        "device cuda then, cpu now",
        "--quantization fp8 then, not now",
        "--tp-size 8 then, not now",
        "--enable-mixed-chunk now, not then",
        "--tp-size 4 now, not then",
    ]


def test_a_server_that_does_not_tell_its_command_is_held_by_the_rest():
    told, untold = server_facts("--tp-size", "8"), engine_facts(versions={"sglang": "0.5.23"}, device="cuda")
    assert not list(engine_changes(told, untold))
    assert not list(engine_changes(untold, told))
