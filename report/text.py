"""Names and messages from outside are data: nothing in them may steer a terminal or a spreadsheet."""

import unicodedata

# Spreadsheets take a cell that begins so for a formula.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def clean(text: str) -> str:
    """One line without control and direction characters and halves of pairs, which are replaced by a visible mark."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") else c for c in text
    )


def clean_lines(text: str) -> str:
    """As `clean`, line by line."""
    return "\n".join(clean(line) for line in text.split("\n"))


def defused(text: str) -> str:
    """For a cell of a CSV file: formulas become text; blanks before one, and its wide form, do not hide it."""
    first = unicodedata.normalize("NFKC", text.lstrip()[:1]) or text[:1]
    return f"'{text}" if first in _FORMULA_STARTS or text.startswith(_FORMULA_STARTS) else text
