"""The command line: streams, exit codes, and errors that name what is wrong."""

import json
from pathlib import Path

import pytest

from tilewright import cli


@pytest.fixture(autouse=True)
def _own_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_DB", str(tmp_path / "none.sqlite"))


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["tune", "--case", "b4"], 2, "write bNsN"),
        (["tune", "--case", "b0s128"], 2, "batch_size must be a whole number of at least 1, got 0"),
        (["tune", "--problem", "nothing"], 2, "problem 'nothing' is not known"),
        (["tune", "--device", "tpu"], 2, "device must be auto, cuda, cuda:N or interpret, got 'tpu'"),
        (["tune", "--device", "interpret", "--suite", "full"], 2, "use --suite smoke"),
        (["tune", "--sampler", "magic"], 2, "sampler must be one of auto, tpe"),
        (["tune", "--trials", "0"], 2, "--trials"),
        (["tune", "--budget", "0"], 2, "--budget"),
        (["tune", "--effort", "heroic"], 2, "--effort"),
        (["lookup"], 2, "--case"),
        (["lookup", "--case", "b4s512,hidden_size=3"], 2, "is not understood"),
        (["results", "--json", "--csv"], 2, "exclude each other"),
        (["nonsense"], 2, "No such command"),
    ],
)
def test_bad_usage_is_told_on_stderr(
    arguments: list[str], code: int, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == code
    told = capsys.readouterr()
    assert complaint in told.err
    assert told.out == ""


def test_results_without_records_is_exit_3(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.run(
        ["results", "--problem", "glm_4_5_air_attention", "--gpu", "No Such Card", "--db", str(tmp_path / "x")]
    ) in (3, 5)
    assert "error:" in capsys.readouterr().err


def test_doctor_answers_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor", "--json"]) in (0, 4)
    content = json.loads(capsys.readouterr().out)
    assert content["schema"] == "tilewright.doctor/1"
    assert {"torch", "triton", "gpu", "database"} <= {check["name"] for check in content["checks"]}


def test_space_of_a_card_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["space", "--case", "b4s512", "--capability", "80", "--json"]) == 0
    [report] = json.loads(capsys.readouterr().out)
    assert all("gluon" not in plan for plan in report["plans"])
    for template in report["templates"].values():
        assert template["valid"] + sum(r["count"] for r in template["rejected"].values()) == template["raw"]
    assert cli.run(["space", "--capability", "75"]) == 2
    assert "capability must be one of 80" in capsys.readouterr().err


def test_version_and_help_end_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    assert "tune" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["tune", "bench", "lookup", "results", "doctor", "export", "selftest"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([command, "--help"]) == 0
    assert "Usage: tilewright" in capsys.readouterr().out


def test_documented_commands_exist() -> None:
    """Every `tilewright ...` line of the README parses."""
    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
    lines = [line.split("#")[0].split()[1:] for line in readme.splitlines() if line.startswith("    tilewright ")]
    assert len(lines) >= 8
    for words in lines:
        command: object = cli.cli
        options: set[str] = set()
        for word in words:
            if hasattr(command, "commands") and word in command.commands:
                command = command.commands[word]
        for parameter in getattr(command, "params", []):
            options.update(parameter.opts)
        assert getattr(command, "name", None) in words
        assert {word for word in words if word.startswith("-")} <= options
