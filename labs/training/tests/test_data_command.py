"""`data prepare`, `data inspect`, `data verify`: what they say is so, and wrong input is one line."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
from tiny import TINY

from training_lab import cli
from training_lab.data.synthetic import synthetic_document

PACKS = ["batch.layout=packs", "batch.packs=4", "model.max_positions=64", "data.tokenizer=gpt2"]


def data(command: str, *arguments: str, settings: list[str] | None = None) -> tuple[int, str, str]:
    """Exit code, output and errors of a `data` command on the tiny config."""
    words = ["data", command, "--config", str(TINY), *arguments]
    for setting in settings or []:
        words += ["--set", setting]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = cli.main(words)
    return code, out.getvalue(), err.getvalue()


def prepared(settings: list[str], *arguments: str) -> dict[str, dict[str, object]]:
    code, out, err = data("prepare", "--json", *arguments, settings=settings)
    assert (code, err) == (0, "")
    read: dict[str, dict[str, object]] = json.loads(out)
    return read


def test_prepare_says_what_the_manifest_and_the_figures_say() -> None:
    facts = prepared(PACKS)
    code, out, _ = data("prepare", settings=PACKS)
    assert code == 0
    lines = dict(line.strip().split(maxsplit=1) for line in out.splitlines()[1:])
    stats = facts["stats"]
    assert lines["documents"].startswith(f"{stats['documents']:,}, ")
    assert lines["tokens"].startswith(f"{stats['tokens']:,} of the tokenizer gpt2")
    assert f"{stats['packing']['fill']:.2%} full" in lines["packs"]  # type: ignore[index]
    assert str(facts["manifest"]["plan"]["identity"])[:16] in lines["plan"]  # type: ignore[index]
    assert Path(lines["cache"].split(",")[0]).is_dir()


def test_prepare_gives_the_same_for_any_number_of_workers() -> None:
    one, four = (prepared([*PACKS, f"data.cache_dir=cache-{n}"], "--workers", str(n)) for n in (1, 4))
    assert one == four
    assert [p.read_bytes() for p in sorted(Path("cache-1/tokens").glob("*/*"))] == [
        p.read_bytes() for p in sorted(Path("cache-4/tokens").glob("*/*"))
    ]


def test_inspect_shows_every_piece_with_its_text_and_its_labels() -> None:
    code, out, _ = data("inspect", "--rows", "4", "--characters", "100000", settings=PACKS)
    assert code == 0
    rows = [line for line in out.splitlines() if line.startswith("row ")]
    pieces = [line for line in out.splitlines() if line.startswith("  piece ")]
    assert len(rows) == 4
    assert len(pieces) == sum(int(row.split(" pieces")[0].rpartition(" ")[2]) for row in rows)
    text = "".join(line.removeprefix("  │ ") + "\n" for line in out.splitlines() if line.startswith("  │ "))
    first = pieces[0].split(": ")[1].split(",")[0]
    whole = synthetic_document(int(first.removeprefix("synthetic-"))).text
    assert "<|endoftext|>" in text
    assert whole[:20] in text or "tokens 0 to" not in pieces[0]
    labels = [line for line in out.splitlines() if line.startswith("  labels: ")]
    assert len(labels) == len(pieces)
    assert all(line.endswith("no label") for line in labels)


@pytest.mark.parametrize(
    "layout", [PACKS, ["batch.layout=token_budget"], ["batch.layout=windows", "batch.block_size=16"]]
)
@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG"), (".svg", b"<svg")])
def test_inspect_draws_a_picture_for_every_layout(layout: list[str], suffix: str, begins: bytes) -> None:
    code, out, _ = data("inspect", "--rows", "0", "--picture", f"그림/a{suffix}", settings=layout)
    assert code == 0
    assert Path(f"그림/a{suffix}").read_bytes().startswith(begins)
    assert out.rstrip().endswith(f"그림/a{suffix}")


def test_inspect_changes_nothing_and_control_characters_in_a_text_do_nothing_to_the_terminal() -> None:
    Path("a.txt").write_text("\x1b[31mred\x07 \u202eright to left\n" * 30)
    Path("b.txt").write_text("plain\n" * 30)
    settings = ["data.source=files", 'data.paths=["*.txt"]', "data.val_fraction=0.5", "data.tokenizer=byte"]
    for salt in "abcdefgh":  # until one file is on either side
        code, out, _ = data("inspect", settings=[*settings, f"data.split_salt={salt}"])
        assert "\x1b" not in out
        assert "\x07" not in out
        assert code in (0, 2)


def test_a_window_over_very_many_documents_is_shown_with_every_end_of_text() -> None:
    Path("a.txt").write_text("".join(f"{number}\n\n" for number in range(9000)))
    settings = [
        "data.source=files", 'data.paths=["a.txt"]', "data.documents=paragraph", "data.tokenizer=gpt2",
        "batch.layout=windows", "batch.block_size=4096", "batch.batch_size=1", "model.max_positions=4096",
    ]  # fmt: skip
    code, out, _ = data("inspect", "--rows", "1", "--characters", "1000000", settings=settings)
    assert code == 0
    assert out.count("<|endoftext|>") > 1000


def test_verify_finds_one_flipped_byte_and_names_its_file() -> None:
    prepared(PACKS)
    code, out, _ = data("verify", settings=PACKS)
    assert code == 0
    assert out.splitlines()[-1] == "data of tiny: as recorded"
    for path in sorted(Path(".cache/tokens").glob("*/*")):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        code, out, err = data("verify", settings=PACKS)
        assert code == 1, path
        assert f"BAD  cache: {path}: damaged" in out
        assert err == ""
        path.write_bytes(content)
    assert data("verify", settings=PACKS)[0] == 0


@pytest.mark.parametrize(
    ("command", "arguments", "settings", "expected"),
    [
        ("prepare", ["--workers", "-1"], [], "--workers -1: must be 0"),
        ("prepare", ["--fast"], ["data.tokenizer=byte"], "--fast: is for data.tokenizer gpt2"),
        ("inspect", ["--update", "99999"], [], "--update 99999: the config has"),
        ("inspect", ["--update", "0"], [], "--update 0: must be at least 1"),
        ("inspect", ["--row", "4"], PACKS, "--row 4: update 1 has rows 0 to 3"),
        ("inspect", ["--row", "-1"], PACKS, "--row -1: update 1 has rows 0 to 3"),
        ("inspect", ["--rows", "-1"], [], "--rows -1: must be at least 0"),
        ("inspect", ["--picture", "a.gif"], [], "--picture a.gif: must end in .png or .svg"),
        ("prepare", [], ["data.source=files", 'data.paths=["nowhere"]'], "data.paths: nowhere: no such file"),
        ("verify", [], ["data.sourc=files"], "--set: data.sourc: unknown key; the nearest is data.source"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    command: str, arguments: list[str], settings: list[str], expected: str
) -> None:
    code, _, err = data(command, *arguments, settings=settings)
    assert code == 2
    assert err.startswith(f"error: {expected}")
    assert len(err.splitlines()) == 1
