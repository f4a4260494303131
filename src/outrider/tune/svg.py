"""Small plots as SVG text. Colours are CSS variables of the page (--c0 and on, --ink, --grid), which has the themes.

Every plot is an image to those who cannot see it, with a title and a sentence; the page puts the figures beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from html import escape

COLOURS = 6
WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 66, 16, 14, 40
ROW = 30
"""Height of a bar and the space around it."""
SHADES = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0)
"""Speed-ups that part the shades of a map, from --m0 (slow) to --m7."""

Series = Mapping[str, Seq[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Axes:
    """A linear scale in both directions, from 0 or a given start, and what is written at it."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    x_name: str
    y_name: str

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - self.x_low) / ((self.x_high - self.x_low) or 1)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - self.y_low) / ((self.y_high - self.y_low) or 1)

    def drawn(self, xs: Seq[float], ys: Seq[float]) -> Iterator[str]:
        """Ticks, lines and names."""
        for value in ys:
            y = self.y(value)
            yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
        for value in xs:
            yield f'<text x="{self.x(value):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:g}</text>'
        across, down = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
        yield f'<text x="{across}" y="{HEIGHT - 6}" text-anchor="middle">{escape(self.x_name)}</text>'
        yield f'<text transform="rotate(-90)" x="{-down}" y="14" text-anchor="middle">{escape(self.y_name)}</text>'


def picture(name: str, title: str, sentence: str, parts: Iterator[str] | Seq[str], height: float = HEIGHT) -> str:
    """An SVG element; `name` makes its ids."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-labelledby="{name}-t {name}-d">'
        f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(sentence)}</desc>'
        f"{''.join(parts)}</svg>"
    )


def lines(axes: Axes, series: Series, xs: Seq[float], ys: Seq[float], dashed: Series | None = None) -> Iterator[str]:
    """A line with dots for each series, the name at its end; `dashed` ones without dots."""
    yield from axes.drawn(xs, ys)
    for name, points in (dashed or {}).items():
        path = " ".join(f"{axes.x(x):.1f},{axes.y(min(y, axes.y_high)):.1f}" for x, y in points)
        yield f'<polyline class="bound" points="{path}"><title>{escape(name)}</title></polyline>'
    for index, (name, points) in enumerate(series.items()):
        colour = f"var(--c{index % COLOURS})"
        placed = [(axes.x(x), axes.y(y)) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        yield f'<polyline class="line" style="stroke:{colour}" points="{path}"><title>{escape(name)}</title></polyline>'
        for x, y in placed:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" style="fill:{colour}"/>'


def shade(value: float) -> int:
    """The number of the shade of a speed-up."""
    return sum(value >= edge for edge in SHADES)


def heat(
    axes: Axes,
    cells: int,
    value: Callable[[float, float], float],
    points: Seq[tuple[float, float]],
    xs: Seq[float],
    ys: Seq[float],
) -> Iterator[str]:
    """A map of `value(x, y)` in shades, and points on it, numbered from 1."""
    dx, dy = (axes.x_high - axes.x_low) / cells, (axes.y_high - axes.y_low) / cells
    wide, high = axes.x(dx) - axes.x(0), axes.y(0) - axes.y(dy)
    for i in range(cells):
        for j in range(cells):
            x, y = axes.x_low + i * dx, axes.y_low + j * dy
            number = shade(value(x + dx / 2, y + dy / 2))
            yield (
                f'<rect x="{axes.x(x):.1f}" y="{axes.y(y + dy):.1f}" width="{wide + 0.5:.1f}" '
                f'height="{high + 0.5:.1f}" style="fill:var(--m{number})"/>'
            )
    yield from axes.drawn(xs, ys)
    for number, (x, y) in reversed(list(enumerate(points, 1))):
        at, up = axes.x(min(x, axes.x_high)), axes.y(min(y, axes.y_high))
        yield f'<circle class="here" cx="{at:.1f}" cy="{up:.1f}" r="9"/>'
        yield f'<text class="here" x="{at:.1f}" y="{up + 4.5:.1f}" text-anchor="middle">{number}</text>'


def stacked(rows: Mapping[str, Seq[float]], unit: str, mark: float | None = None) -> tuple[list[str], float]:
    """Horizontal bars of parts, in the colours' order, a dashed line at `mark`, and the height that they need."""
    most = max((sum(parts) for parts in rows.values()), default=0.0) or 1.0
    left, right = 150, 90
    drawn = []
    for index, (name, parts) in enumerate(rows.items()):
        y, x = TOP + index * ROW, float(left)
        drawn.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
        for number, part in enumerate(parts):
            wide = (WIDTH - left - right) * part / most
            colour = f"var(--c{number % COLOURS})"
            drawn.append(f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="20" style="fill:{colour}"/>')
            x += wide
        drawn.append(f'<text x="{x + 6:.1f}" y="{y + 15}">{sum(parts):.2f}{escape(unit)}</text>')
    height = TOP + len(rows) * ROW + 6
    if mark is not None and mark <= most:
        x = left + (WIDTH - left - right) * mark / most
        drawn.append(f'<line class="bound" x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{height}"/>')
    return drawn, height


def ticks(high: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to `high`."""
    for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500):
        if high / step <= count:
            return [round(step * i, 6) for i in range(int(high / step + 1e-9) + 1)]
    return [0.0, high]
