"""Line plots as SVG text, for results that are kept as files."""

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 360, 260, 48, 28, 40
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
Line = Sequence[tuple[float, float]]


def line_plot(panels: Mapping[str, Mapping[str, Line]], *, y_title: str) -> str:
    """Panels side by side, by the title of their x axis; all share their y axis, which begins at 0."""
    everything = [point for lines in panels.values() for line in lines.values() for point in line]
    most_x = max((x for x, _ in everything), default=1.0) or 1.0
    most_y = max((y for _, y in everything), default=1.0) or 1.0
    width = len(panels) * (WIDTH + LEFT) + 90
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{TOP + HEIGHT + BOTTOM}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{TOP + HEIGHT + BOTTOM}" fill="white"/>',
    ]
    for number, (x_title, lines) in enumerate(panels.items()):
        left = LEFT + number * (WIDTH + LEFT)
        parts += _axes(left, x_title, y_title if number == 0 else "", most_x, most_y)
        for colour, (name, line) in zip(COLOURS * len(lines), lines.items(), strict=False):
            points = " ".join(_place(left, x / most_x, y / most_y) for x, y in line)
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}"><title>{escape(name)}</title></polyline>'
            )
    names = next(iter(panels.values()), {})
    for row, (colour, name) in enumerate(zip(COLOURS * len(names), names, strict=False)):
        parts.append(f'<text x="{width - 80}" y="{TOP + 14 * row + 10}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _place(left: int, x: float, y: float) -> str:
    return f"{left + x * WIDTH:.1f},{TOP + (1 - y) * HEIGHT:.1f}"


def _axes(left: int, x_title: str, y_title: str, most_x: float, most_y: float) -> list[str]:
    bottom = TOP + HEIGHT
    parts = [f'<path d="M{left} {TOP}V{bottom}H{left + WIDTH}" fill="none" stroke="black"/>']
    for tick in range(5):
        share = tick / 4
        x, y = left + share * WIDTH, bottom - share * HEIGHT
        parts.append(f'<text x="{x:.0f}" y="{bottom + 14}" text-anchor="middle">{share * most_x:.3g}</text>')
        parts.append(f'<text x="{left - 4}" y="{y + 4:.0f}" text-anchor="end">{share * most_y:.3g}</text>')
    parts.append(f'<text x="{left + WIDTH / 2}" y="{bottom + 32}" text-anchor="middle">{escape(x_title)}, %</text>')
    if y_title:
        parts.append(f'<text x="{left}" y="{TOP - 10}">{escape(y_title)}</text>')
    return parts
