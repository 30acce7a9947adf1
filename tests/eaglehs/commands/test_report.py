"""`eaglehs report` from the command line, and its page in a real browser where one is installed."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import load_dataset
from eaglehs.builder.verify import verify_dataset
from eaglehs.cards.write import write_card
from eaglehs.schemas.errors import MissingPackageError

from eaglehs.commands.report import report
from tests.eaglehs.cli import NOTHING_TYPED
from tests.factories.datasets import SyntheticDataset, make_dataset
from tests.factories.tokenizers import fast_tokenizer, save_model_folder

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)


@pytest.fixture
def dataset(tmp_path: Path) -> SyntheticDataset:
    dataset = make_dataset(tmp_path)
    write_card(dataset.root)
    return dataset


def test_the_page_is_the_one_line_on_stdout_and_the_dataset_stays_good(
    dataset: SyntheticDataset, capsys: pytest.CaptureFixture[str]
):
    report(NOTHING_TYPED, dataset.root)
    page = dataset.root / "plots" / "report.html"
    assert capsys.readouterr().out == f"{page}\n"
    assert page.is_file()
    assert verify_dataset(dataset.root).faults == ()
    assert len(list(load_dataset(str(dataset.root), split="train", streaming=True))) == 3


def test_json_has_the_figures_and_the_files(
    dataset: SyntheticDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    report(NOTHING_TYPED, dataset.root, out=tmp_path / "elsewhere", samples=2, json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["page"] == str(tmp_path / "elsewhere" / "report.html")
    assert (found["statistics"]["num_samples"], found["statistics"]["num_measured"]) == (3, 2)
    assert all(Path(file).is_file() for file in found["files"])
    assert not (dataset.root / "plots").exists()


def test_a_missing_matplotlib_is_told_before_anything_is_read(
    dataset: SyntheticDataset, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    dataset.shards[0].unlink()
    with pytest.raises(MissingPackageError, match="plots"):
        report(NOTHING_TYPED, dataset.root)


def test_a_tokenizer_turns_ids_into_text(dataset: SyntheticDataset, tmp_path: Path):
    tokenizer = fast_tokenizer()
    report(NOTHING_TYPED, dataset.root, tokenizer=str(save_model_folder(tmp_path / "model", tokenizer)))
    page = (dataset.root / "plots" / "report.html").read_text(encoding="utf-8")
    assert 'class="tokens"' in page
    assert "give --tokenizer" not in page
    token = int(dataset.bits("p0")["input_ids"][0, 0])
    assert f'title="0: id {token}">' in page


needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no chromium is installed, so no page can be looked at")


def browse(page: str, profile: Path, *flags: str) -> str:
    """Open a page in headless Chromium, with a fresh profile and without its own network chatter."""
    quiet = ("--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", *quiet]
    command += [f"--user-data-dir={profile}", "--hide-scrollbars", "--window-size=900,1200", *flags, page]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "Uncaught" not in done.stderr
    return done.stdout


@needs_chromium
def test_a_browser_colours_tokens_by_the_norm_that_the_address_names(dataset: SyntheticDataset, tmp_path: Path):
    report(NOTHING_TYPED, dataset.root)
    address = (dataset.root / "plots" / "report.html").as_uri()
    plain = browse(address, tmp_path / "p1", "--dump-dom")
    assert "background: rgba" not in plain
    coloured = browse(f"{address}#final", tmp_path / "p2", "--dump-dom")
    assert coloured.count("background: rgba(var(--heat)") == 5 + 12 + 33
    assert len(re.findall(r"\| norm \d", coloured)) == 5 + 12 + 33


@needs_chromium
@pytest.mark.parametrize(("scheme", "is_dark"), [(1, False), (0, True)])
def test_a_browser_shows_the_page_dark_or_light_as_its_reader_wants(
    dataset: SyntheticDataset, tmp_path: Path, scheme: int, is_dark: bool
):
    image = pytest.importorskip("PIL.Image", reason="Pillow reads the screenshot")
    report(NOTHING_TYPED, dataset.root)
    shot = tmp_path / "shot.png"
    address = (dataset.root / "plots" / "report.html").as_uri()
    browse(address, tmp_path / "p", f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={shot}")
    colours = image.open(shot).convert("RGB")
    assert max(colours.getpixel((2, 2))) < 60 if is_dark else min(colours.getpixel((2, 2))) > 240
    assert len(colours.getcolors(100_000)) > 20  # there is a page, not a blank
