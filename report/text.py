"""Names and messages from outside are data: nothing in them may steer a terminal or a spreadsheet."""

import unicodedata

# Spreadsheets take a cell that begins so for a formula.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def clean(text: str) -> str:
    """One line without control and direction characters, which are replaced by a visible mark."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") else c for c in text
    )


def defused(text: str) -> str:
    """For a cell of a CSV file: formulas become text."""
    return f"'{text}" if text.startswith(_FORMULA_STARTS) else text
