"""Where the records that come with the package lie; the folder may be empty."""

from pathlib import Path

SHIPPED_DIR = Path(__file__).resolve().parents[1] / "runtime" / "records"
