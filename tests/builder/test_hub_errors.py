"""Every fault that the Hub and its clients have a name for becomes a message that says what to do, without a token."""

import pytest
from eaglehs.builder.hub_client import HubClient
from eaglehs.builder.hub_errors import (
    HubConflictError,
    HubError,
    HubPlace,
    MissingFileError,
    explain,
    is_passing,
    without_tokens,
)
from eaglehs.builder.hub_retry import HubRetryPolicy
from huggingface_hub import HfApi
from huggingface_hub import errors as hub_errors

from tests.factories.published import HASTY, REPO, TOKENS, WRITER
from tests.fakes.hub import start_hub
from tests.fakes.range_server import start_range_server

PLACE = HubPlace(repo=REPO, endpoint="http://127.0.0.1:9")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    hub = start_hub(tmp_path_factory.mktemp("hub"), TOKENS)
    HfApi(endpoint=hub.url, token=WRITER).create_repo(REPO, repo_type="dataset")
    yield hub
    hub.stop()


@pytest.mark.parametrize(
    ("answer", "why", "mend"),
    [
        ({"status": 401, "message": "Invalid username or password."}, "401: ", "hf auth login"),
        ({"status": 401, "message": "Invalid credentials in Authorization header"}, "401: ", "wrong or has expired"),
        ({"status": 401, "code": "RepoNotFound"}, "There is no dataset", "Check the name"),
        ({"status": 404, "code": "RepoNotFound"}, "does not tell which", "Check the name"),
        ({"status": 403, "code": "GatedRepo"}, "is gated", "Ask for access"),
        ({"status": 403, "message": "Forbidden: you must use a write token"}, "a write token", "needs write rights"),
        ({"status": 404, "code": "RevisionNotFound"}, "no such branch", "See what there is"),
        ({"status": 404, "code": "EntryNotFound"}, "no such file", "run eaglehs push again"),
        ({"status": 400, "message": "bad tree"}, "400: bad tree", "see its answer"),
        ({"status": 409, "message": "exists"}, "409: exists", "Another name"),
        ({"status": 412, "message": "A commit has happened"}, "somebody else", "Run the same command again"),
        ({"status": 413, "message": "too large"}, "413: too large", "over the account's limit"),
        ({"status": 429, "message": "slow down", "headers": {"Retry-After": "9999"}}, "429: ", "rate limit"),
    ],
)
def test_an_answer_is_told_with_the_servers_words_and_what_to_do(server, answer, why, mend):
    server.faults[:] = [{"path": "/revision/|/refs|/auth-check", "times": 99, **answer}]
    client = HubClient(REPO, api=HfApi(endpoint=server.url, token=WRITER), policy=HASTY)
    with pytest.raises(HubError) as error:
        client.check_write()
    server.faults.clear()
    assert error.value.exit_code == 4
    assert why in str(error.value)
    assert mend in error.value.mend
    assert WRITER not in str(error.value)
    assert isinstance(error.value, HubConflictError) == (answer["status"] == 412)


@pytest.mark.parametrize(
    ("fault", "mend", "passes"),
    [
        (hub_errors.LocalTokenNotFoundError("no token"), "hf auth login", False),
        (hub_errors.OfflineModeIsEnabled("offline"), "Unset HF_HUB_OFFLINE", False),
        (hub_errors.HFValidationError("Repo id must"), "org/name", False),
        (ValueError("Invalid metadata in README.md.\n- bad"), "eaglehs card", False),
        (ConnectionError("Network error: HTTP status client error (403 Forbidden), domain: x"), "write rights", False),
        (ConnectionError("HTTP status client error (404 Not Found), domain: x"), "HF_HUB_DISABLE_XET=1", False),
        (ConnectionError("HTTP status server error (503 Service Unavailable)"), "same command goes on", True),
        (ConnectionError("connection refused"), "HF_ENDPOINT", True),
        (TimeoutError("timed out"), "HF_ENDPOINT", True),
        (PermissionError(13, "Permission denied", "/data/x.tar"), "disk", False),
    ],
)
def test_a_fault_without_an_answer_is_told_by_its_kind(fault, mend, passes):
    error = explain(fault, "sending x", PLACE)
    assert mend in error.mend
    assert str(error).startswith("sending x failed.")
    assert is_passing(fault) == passes


def test_an_upload_error_is_unwrapped_to_its_cause():
    wrapped = RuntimeError("Error while uploading 'x' to the Hub.")
    wrapped.__cause__ = ConnectionError("(413 Payload Too Large)")
    error = explain(wrapped, "sending x", PLACE)
    assert (error.status, "limit" in error.mend) == (413, True)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"status": 503}, "The Hub answered 503"),
        ({"status": 429, "headers": {"Retry-After": "9999"}}, "Wait for the rate limit"),
        ({"status": 403, "message": "storage is off"}, "The Hub answered 403: storage is off"),
        ({"status": 404, "code": "EntryNotFound"}, "has no such file"),
    ],
)
def test_a_file_that_can_not_be_fetched_is_missing_only_where_the_hub_says_so(
    server, tmp_path, monkeypatch, answer, message
):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    server.faults[:] = [{"path": "/resolve/", "times": 99, **answer}]
    client = HubClient(REPO, api=HfApi(endpoint=server.url, token=WRITER), policy=HASTY)
    with pytest.raises(HubError) as error:
        client.fetch("manifest.json", "main")
    server.faults.clear()
    assert message in str(error.value)
    assert isinstance(error.value, MissingFileError) == (answer["status"] == 404)


def test_a_fetch_that_is_refused_for_a_moment_is_tried_again(server, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    server.faults[:] = [{"path": "/resolve/", "status": 503, "times": 8}]  # the client library asks six times, or once
    client = HubClient(
        REPO, api=HfApi(endpoint=server.url, token=WRITER), policy=HubRetryPolicy(attempts=12, first_wait_s=0.01)
    )
    assert client.fetch(".gitattributes", "main").is_file()


def test_whether_xet_is_there_is_found_out_before_threads_ask(monkeypatch):
    """huggingface_hub 2.0.0 says no to a thread that asks while another one finds out, and its file goes by LFS."""
    asked: list[str] = []
    monkeypatch.setattr("eaglehs.builder.hub_client.is_package_available", asked.append)
    HubClient(REPO)
    assert asked == ["hf_xet"]


def test_a_server_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    client = HubClient(REPO, api=HfApi(endpoint="http://127.0.0.1:9", token=WRITER), policy=HASTY)
    with pytest.raises(HubError, match=r"No answer from http://127\.0\.0\.1:9.*Check the network and HF_ENDPOINT"):
        client.check_write()


def test_a_server_that_is_no_hub_is_named(tmp_path):
    """A proxy's login page, or HF_ENDPOINT with a wrong address: 200 and HTML."""
    (tmp_path / "api").mkdir()
    (tmp_path / "api" / "whoami-v2").write_text("<html>Log in</html>")
    server = start_range_server(tmp_path)
    client = HubClient(REPO, api=HfApi(endpoint=server.url, token=WRITER), policy=HASTY)
    with pytest.raises(HubError, match=r"No JSON from http://127\.0\.0\.1:\d+: .*Check the network and HF_ENDPOINT"):
        client.account()
    server.stop()


def test_a_bug_of_ours_stays_a_bug():
    client = HubClient(REPO, policy=HASTY)
    client.api.auth_check = lambda *arguments, **options: int("no number")  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="invalid literal"):
        client.check_write()


def test_tokens_are_taken_out_wherever_they_stand(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "odd-token")
    text = without_tokens("Bearer abc.def and hf_AbCdEf123 and odd-token and hf_oauth_eyJh.b-C_d")
    assert text == "*** and *** and *** and ***"


def test_the_signature_of_a_stores_address_is_not_shown(server, tmp_path, monkeypatch):
    """A store answers in XML, so what is told is the client's own text, which has the whole address."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    place = f"{server.url}/_cdn/{'0' * 64}?X-Amz-Credential=AKIA&X-Amz-Signature=5e1f"
    server.faults[:] = [{"path": "/resolve/", "times": 99, "status": 302, "headers": {"Location": place}}]
    server.faults.append({"path": "/_cdn/", "times": 99, "status": 403, "message": ""})
    client = HubClient(REPO, api=HfApi(endpoint=server.url, token=WRITER), policy=HASTY)
    with pytest.raises(HubError, match="403") as error:
        client.sha256_of(".gitattributes", "main", lambda count: None)
    server.faults.clear()
    assert "X-Amz" not in str(error.value)
    assert "_cdn" in str(error.value)
