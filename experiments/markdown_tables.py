"""Are the tables that a script prints those that its page holds?

Goes in: two Markdown texts. Comes out: every cell that differs. A table is found on the page by its columns, a row by
the cells that are not measured; the page may have more of both. What a script prints besides tables is not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

Row = dict[str, str]
_NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class Table:
    """A Markdown table.

    Attributes:
        heads: of its columns; of several with the same head all but the first get a number.
        rows: head -> cell. Stars of bold print are left out.
    """

    heads: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Comparison:
    """What a script prints, beside its page.

    Attributes:
        num_rows: that were printed in tables.
        differences: one line each; none where all that is not measured stands on the page.
        most_apart: the largest ratio between two numbers that are measured, 1 where they are equal or there are none.
    """

    num_rows: int
    differences: tuple[str, ...]
    most_apart: float


def tables(text: str) -> list[Table]:
    r"""The tables of `text`, in their order.

    Raises:
        ValueError: a row has more or fewer cells than there are heads.

    Example:
        >>> tables("words\n| a | b |\n|---|---|\n| 1 | **2** |\n")
        [Table(heads=('a', 'b'), rows=({'a': '1', 'b': '2'},))]
    """
    found, block = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            block.append([cell.strip().replace("**", "") for cell in line.strip().strip("|").split("|")])
        elif block:
            heads, _, *rows = block
            heads = [f"{head} ({n})" if (n := heads[: i + 1].count(head)) > 1 else head for i, head in enumerate(heads)]
            for row in rows:
                if len(row) != len(heads):
                    raise ValueError(f"a row of {len(row)} cells below {len(heads)} heads: {' | '.join(row)}")
            found.append(Table(tuple(heads), tuple(dict(zip(heads, row, strict=True)) for row in rows)))
            block = []
    return found


def compare(printed: str, page: str, *, measured: Collection[str] = ()) -> Comparison:
    """How the tables in `printed` differ from those of `page`.

    Args:
        printed: what a script prints.
        page: of its experiment.
        measured: heads of columns that differ from run to run: their numbers are compared, and no difference of them
            counts.
    """
    standing, differences, apart, num_rows = tables(page), [], [1.0], 0
    for table in tables(printed):
        fixed = [head for head in table.heads if head not in measured]
        candidates = [row for other in standing if set(table.heads) <= set(other.heads) for row in other.rows]
        if not candidates:
            differences.append(f"no table of the page has the columns {' | '.join(table.heads)}")
        for row in table.rows:
            num_rows += 1
            same = [other for other in candidates if all(other[head] == row[head] for head in fixed)]
            if same:
                apart += [min(_apart(row, other, measured) for other in same)]
            elif candidates:
                differences.append(_closest(row, candidates, fixed))
    return Comparison(num_rows, tuple(differences), max(apart))


def _closest(row: Row, candidates: list[Row], fixed: list[str]) -> str:
    """The printed row beside the row of the page that has most of its cells."""
    other = max(candidates, key=lambda other: [other[head] == row[head] for head in fixed].count(True))
    cells = [f"{head}: {row[head]!r}, on the page {other[head]!r}" for head in fixed if other[head] != row[head]]
    return f"{' | '.join(row[head] for head in fixed[:2])}: {'; '.join(cells)}"


def _apart(row: Row, other: Row, measured: Collection[str]) -> float:
    pairs = zip(_numbers(row, measured), _numbers(other, measured), strict=False)
    return max((max(a / b, b / a) for a, b in pairs if a > 0 and b > 0), default=1.0)


def _numbers(row: Row, measured: Collection[str]) -> Iterator[float]:
    for head, cell in row.items():
        if head in measured:
            yield from (float(number.replace(",", "")) for number in _NUMBER.findall(cell))
