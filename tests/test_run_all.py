"""What scripts print is held to their pages, and every experiment of the folder is run."""

import re

import pytest
from experiment_modules import EXPERIMENTS

from experiments.catalogue import CATALOGUE, Experiment, folder, numbers
from experiments.markdown_tables import compare, tables
from experiments.run_all import Outcome, main, run, verdict, what_lacks

PAGE = """
Words | with a bar.

| case | bytes | s a step |
|---|---|---|
| a | **10** | 2.0 |
| b | 20 | 1,000 |

| case | bytes |
|---|---|
| c | 30 |
"""
ROW = "| case | bytes | s a step |\n|---|---|---|\n"


def test_tables_are_read_without_bold_print():
    first, second = tables(PAGE)
    assert first.heads == ("case", "bytes", "s a step")
    assert [row["bytes"] for row in first.rows] == ["10", "20"]
    assert second.rows == ({"case": "c", "bytes": "30"},)


def test_heads_that_come_twice_are_kept_apart():
    (table,) = tables("| GiB | predicted | s | predicted |\n|---|---|---|---|\n| a | 1 | b | 2 |\n")
    assert table.heads == ("GiB", "predicted", "s", "predicted (2)")
    assert list(table.rows[0].values()) == ["a", "1", "b", "2"]


def test_part_of_a_page_in_another_form_is_as_on_the_page():
    found = compare(f"said first\n{ROW}| a | 10 | 2.0 |\n", PAGE)
    assert (found.num_rows, found.differences, found.most_apart) == (1, (), 1.0)


def test_a_column_less_is_as_on_the_page():
    assert compare("| case | bytes |\n|---|---|\n| b | 20 |\n| c | 30 |\n", PAGE).differences == ()


def test_a_figure_that_differs_is_named():
    (said,) = compare(f"{ROW}| b | 21 | 1,000 |\n", PAGE).differences
    assert said == "b | 21: bytes: '21', on the page '20'"


def test_a_measured_figure_may_differ_and_by_how_much_is_said():
    found = compare(f"{ROW}| a | 10 | 3.0 |\n| b | 20 | 800 |\n", PAGE, measured=("s a step",))
    assert found.differences == ()
    assert found.most_apart == pytest.approx(1.5)  # 3.0 / 2.0, where 1,000 / 800 is 1.25
    assert compare(f"{ROW}| a | 11 | 2.0 |\n", PAGE, measured=("s a step",)).differences


def test_a_table_that_the_page_has_not_is_a_difference():
    (said,) = compare("| other |\n|---|\n| 1 |\n", PAGE).differences
    assert said == "no table of the page has the columns other"


@pytest.fixture
def experiments(tmp_path, monkeypatch):
    """A folder with one experiment, 900, whose script prints what `says` has."""
    place = tmp_path / "900_example"
    place.mkdir()
    (place / "README.md").write_text(PAGE)
    monkeypatch.setattr("experiments.catalogue.FOLDER", tmp_path)

    def says(text: str, *, code: int = 0):
        (place / "run.py").write_text(f"import sys\nprint({text!r}, sys.argv[1:])\nsys.exit({code})\n")

    return says


def test_what_is_as_on_the_page_gives_exit_code_0(experiments, capsys):
    experiments(f"{ROW}| a | 10 | 2.0 |\n\n")
    assert main(["--quick", "900"]) == 0
    printed = capsys.readouterr().out
    assert "900_example: 1 rows as on the page" in printed
    assert "all as on the pages" in printed


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        (f"{ROW}| a | 12 | 2.0 |\n\n", 0, "1 of 1 rows differ"),
        ("no table", 0, "prints no table"),
        (f"{ROW}| a | 10 |\n\n", 0, "a table is broken: a row of 2 cells below 3 heads: a | 10"),
        (f"{ROW}| a | 10 | 2.0 |\n\n", 3, "run.py: exit code 3"),
    ],
)
def test_what_is_not_gives_exit_code_1(experiments, capsys, text, code, said):
    experiments(text, code=code)
    assert main(["900"]) == 1
    printed = capsys.readouterr().out
    assert said in printed
    assert "900_example: see above" in printed


def test_scripts_get_quick_and_their_arguments(experiments, monkeypatch):
    experiments("| a |\n|---|\n| 1 |\n\n")
    monkeypatch.setitem(CATALOGUE, "900", Experiment(arguments=("--more",), writes=True))
    seen = []
    monkeypatch.setattr("experiments.run_all.verdict", lambda *given: seen.append(given[1]) or (("said",), True))
    run("900", quick=True)
    run("900", quick=False)
    assert [text.strip().splitlines()[-1].strip() for text in seen] == [
        "['--more', '--quick', '--write']",
        "['--more']",
    ]


def test_compiled_figures_are_compared_with_the_same_jax_alone(monkeypatch):
    experiment, printed = Experiment(compiled=("bytes",)), f"{ROW}| a | 12 | 2.0 |\n"
    for version, good in (("0.10.2", False), ("9.9.9", True)):
        monkeypatch.setattr("experiments.run_all.jax.__version__", version)
        assert verdict(experiment, printed, PAGE)[1] == good


def test_what_lacks_is_said_and_is_no_failure(experiments, monkeypatch):
    experiments("unread")
    monkeypatch.setitem(CATALOGUE, "900", Experiment(needs="gpu-aot"))
    monkeypatch.setattr("experiments.run_all.importlib.util.find_spec", lambda name: None)
    assert what_lacks(CATALOGUE["900"]) == "needs the extra gpu-aot"
    assert run("900", quick=True) == Outcome("900_example", 0.0, ("left out: needs the extra gpu-aot",))


def test_an_unknown_number_is_an_error(experiments, capsys):
    experiments("")
    with pytest.raises(SystemExit):
        main(["123"])
    assert "no experiment 123: one of 900, notebooks" in capsys.readouterr().err


def test_every_folder_has_a_page_and_takes_quick():
    assert len(numbers()) == len(set(numbers())) >= 13
    assert set(CATALOGUE) <= set(numbers())
    for number in numbers():
        assert (folder(number) / "README.md").exists(), number
        script = (folder(number) / "run.py").read_text()
        assert "--quick" in script or "page_parser(" in script, number


FOLDERS = sorted(path.parent for path in EXPERIMENTS.glob("[0-9][0-9][0-9]_*/README.md"))


@pytest.mark.parametrize("place", FOLDERS, ids=lambda place: place.name)
def test_pages_without_scripts_say_where_these_were_and_all_links_lead_to_files(place):
    page = (place / "README.md").read_text()
    said = re.findall(r"^Answered; its scripts are no longer kept \(code: at [0-9a-f]{7}\)\.$", page, re.MULTILINE)
    assert len(said) == (not list(place.glob("*.py")))
    links = re.findall(r"\]\((?!http|#)([^)#\s]+)", page)
    assert [link for link in links if not (place / link).exists()] == []


def test_the_catalogues_columns_stand_on_the_pages():
    for number, experiment in CATALOGUE.items():
        heads = {head for table in tables((folder(number) / "README.md").read_text()) for head in table.heads}
        assert {*experiment.measured, *experiment.compiled} <= heads, number


def test_007_is_as_on_its_page(capsys):
    assert main(["--quick", "007"]) == 0, capsys.readouterr().out
