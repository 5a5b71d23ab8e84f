"""A lookup in words."""

from typing import Any

from tilewright.report.lookups import lookup_text


def a_document(**changes: Any) -> dict[str, Any]:
    return {
        "schema": 1, "case": "b4s512", "key": "the|key", "grade": "default", "layer": "default", "source": "",
        "reason": "no record", "differences": [], "label": "gemm", "record_case": None, "median_us": None,
        "plan": [{"template": "gemm", "values": {"BLOCK_M": 64, "num_warps": 4}}],
        "passed_over": [{"layer": "user", "source": "a.sqlite", "grade": "stale", "differences": ["triton 3.6 there"]}],
        **changes,
    }  # fmt: skip


def test_it_says_what_is_served_and_why() -> None:
    text = lookup_text(a_document(grade="exact", layer="user", median_us=600.04))
    assert text.splitlines()[0] == "b4s512: exact (user)"
    assert "gemm BLOCK_M=64 num_warps=4" in text
    assert "600.0 us" in text


def test_explaining_lists_each_candidate_its_use_and_the_fields_that_differ() -> None:
    candidate = {
        "case": "b4s512", "grade": "stale", "layer": "user", "source": "a.sqlite", "gpu": "NVIDIA H200",
        "triton": "3.6.0", "label": "gemm", "median_us": 600.0, "differences": ["triton 3.6 there"],
        "use": "not served",
    }  # fmt: skip
    document = a_document(candidates=[candidate])
    short, long = lookup_text(document), lookup_text(document, explain=True)
    assert "stale" not in short
    assert "  stale record of b4s512 on NVIDIA H200, Triton 3.6.0, 600.0 us there\n    not served\n" in long
    assert "    differs: triton 3.6 there" in long


def test_control_characters_in_stored_names_are_shown_not_obeyed() -> None:
    assert "\x1b" not in lookup_text(a_document(differences=["gpu_name \x1b[2J there"]), explain=True)
