"""`lookup --explain`: every record that could serve, what it differs in, and what becomes of it."""

import dataclasses
import json
from collections.abc import Callable

import pytest
from served import H200, a_case, a_machine, a_plan, a_record

from tilewright import cli
from tilewright.kernel_templates.families import load_family
from tilewright.runtime import lookup
from tilewright.runtime.explain import candidates
from tilewright.runtime.layers import Layer
from tilewright.runtime.machine import Machine, machine_of
from tilewright.runtime.quarantine import Failed, hold

Serve = Callable[..., None]


def explained(machine: Machine, **options: bool) -> list[tuple[str, str, str]]:
    """Case, grade and use of each candidate for b4s512."""
    found = candidates(lookup(a_case(), machine, **options), machine)
    return [(one.found.record.case_name, one.found.grade.value, one.use) for one in found]


def test_candidates_come_in_the_order_of_use(serve: Serve) -> None:
    older = dataclasses.replace(H200, triton="3.5.0")
    serve(a_record(a_case(4, 500)), a_record(a_case(), environment=older), layer=Layer.USER)
    serve(
        a_record(a_case()), a_record(a_case(), environment=dataclasses.replace(H200, sm_count=60)), layer=Layer.SHIPPED
    )
    assert explained(a_machine()) == [
        ("b4s512", "exact", "served"),
        ("b4s500", "transferred", "next best"),
        (
            "b4s512",
            "stale",
            "not served without --allow-stale or TILEWRIGHT_ALLOW_STALE=1, and then only after a check",
        ),
        ("b4s512", "foreign", "never served here: it was tuned on another card"),
    ]


def test_an_allowed_stale_record_is_served_after_a_check(serve: Serve) -> None:
    serve(a_record(a_case(), environment=dataclasses.replace(H200, triton="3.5.0")))
    assert explained(a_machine(), allow_stale=True) == [("b4s512", "stale", "served after a check")]


def test_what_forbids_a_record_is_said(serve: Serve) -> None:
    serve(a_record(a_case()), a_record(a_case(4, 500), plan=[{"template": "old", "values": {}}]))
    hold(Failed.of(a_case(), a_plan(), load_family("gqa_attention").registry, H200), "it crashed")
    uses = {name: use for name, _, use in explained(a_machine())}
    assert uses["b4s512"] == "not served: in quarantine: it crashed"


@pytest.mark.parametrize(
    ("there", "here", "difference"),
    [
        ({"triton": "3.9.0"}, {"triton": "3.10.0"}, "triton 3.9.0 there, 3.10.0 here (older)"),
        ({"triton": "3.10.0+git1"}, {"triton": "3.9.0"}, "triton 3.10.0 there, 3.9.0 here (newer)"),
        ({"torch": "2.9.1"}, {"torch": "2.11.0+cu130"}, "torch 2.9.1 there, 2.11.0+cu130 here (older)"),
        ({"torch": "2.11.0"}, {"torch": "2.11.0+cu130"}, "torch 2.11.0 there, 2.11.0+cu130 here"),
        ({"cuda": "12.9"}, {"cuda": "12.10"}, "cuda 12.9 there, 12.10 here (older)"),
        ({"driver": "580.95.05"}, {"driver": "580.9"}, "driver 580.95.05 there, 580.9 here (newer)"),
    ],
)
def test_versions_are_ordered_as_versions(
    serve: Serve, there: dict[str, str], here: dict[str, str], difference: str
) -> None:
    serve(a_record(a_case(), environment=dataclasses.replace(H200, **there)))
    [one] = candidates(lookup(a_case(), a_machine(**here)), a_machine(**here))
    assert one.found.differences == (difference,)


def test_the_command_lists_candidates_as_json_and_in_words(
    serve: Serve, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(a_record(a_case(), environment=dataclasses.replace(machine_of("interpret").environment, triton="3.5.0")))
    ask = ["lookup", "--case", "b4s512", "--device", "interpret", "--explain"]
    assert cli.run([*ask, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["grade"], document["candidates"][0]["grade"]) == ("default", "stale")
    assert cli.run([*ask, "--allow-stale"]) == 0
    assert "served after a check" in capsys.readouterr().out
    monkeypatch.setenv("TILEWRIGHT_ALLOW_STALE", "1")
    assert cli.run([*ask, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["grade"] == "stale"
