"""Sections are objects that know no format, and a kind names each of its pictures once."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.gate.compare import ReleaseComparison
from pipeline.products import KINDS
from pipeline.products.params import load_params
from pipeline.report.markdown import is_embedded, write_block, write_section
from pipeline.report.sections import Block, Figure, Folded, Quote, Section, Table
from pipeline.settings.base import Product
from tests.paths import ROOT

PRODUCTS = load_params(ROOT / "params.yaml").products


def draw_nothing(compared: ReleaseComparison, path: Path) -> None:
    """Write no file."""


FIGURE = Figure("a.png", "Caption", "Description", draw_nothing)


@pytest.mark.parametrize(
    ("block", "text"),
    [
        pytest.param("A paragraph.", "A paragraph.", id="text"),
        pytest.param(
            Table([["a", "b"], ["---", "---:"], ["1", "2"]]), "| a | b |\n| --- | ---: |\n| 1 | 2 |", id="table"
        ),
        pytest.param(Quote("x\n```\ny"), "````text\nx\n```\ny\n````", id="quote-with-a-fence"),
        pytest.param(FIGURE, "![Description](a.png)", id="figure"),
        pytest.param(
            Folded("More", ["One.", Folded("Most", ["Two."])]),
            "<details><summary>More</summary>\n\nOne.\n\n"
            "<details><summary>Most</summary>\n\nTwo.\n\n</details>\n\n</details>",
            id="folded-twice",
        ),
    ],
)
def test_a_block_is_written_without_a_line_end(block: Block, text: str) -> None:
    assert write_block(block) == text
    assert write_section(Section("Title", [block, "End."])) == f"### Title\n\n{text}\n\nEnd."


def test_a_report_shows_a_picture_that_it_names() -> None:
    assert is_embedded("a.png", write_block(FIGURE)) and not is_embedded("b.png", write_block(FIGURE))


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=list(PRODUCTS))
def test_a_kind_names_each_of_its_pictures_once(product: Product) -> None:
    figures = KINDS[product.kind].get_presenter().list_figures(product)
    names = [figure.name for figure in figures]
    assert names and len(set(names)) == len(names) and "harm.png" not in names
    report = (ROOT / product.reports / "report.md").read_text(encoding="utf-8")
    shown = [name for name in names if is_embedded(name, report)]
    assert all((ROOT / product.reports / name).is_file() for name in shown), "git keeps them beside the report"
