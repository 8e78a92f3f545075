"""The catalogue is what the registries and configs say now, and draws every orchestra."""

from __future__ import annotations

from docs.writers import catalogue, options
from rollout.orchestras import ORCHESTRAS
from tests.support.shipped import TEAMS

PAGE = catalogue.pages()[catalogue.CATALOGUE]


def test_the_page_is_up_to_date() -> None:
    assert catalogue.CATALOGUE.read_text(encoding="utf-8") == PAGE, (
        "run python -m docs.writers catalogue"
    )


def test_the_page_of_options_is_what_the_signatures_say() -> None:
    assert options.pages()[options.OPTIONS] == options.OPTIONS.read_text(), (
        "run python -m docs.writers options"
    )


def test_every_option_is_described() -> None:
    rows = [
        line.split(" | ")
        for line in options.OPTIONS.read_text().splitlines()
        if line.startswith("| `")
    ]
    assert len(rows) > 200
    assert not [cells[:2] for cells in rows if cells[1] != "none" and cells[-1].strip(" |") == ""]


def test_every_orchestra_has_a_flow() -> None:
    assert set(catalogue.FLOWS) | {"graph"} == set(ORCHESTRAS)


def test_a_graph_is_its_own_flow() -> None:
    edges = list(catalogue.flow("graph", TEAMS["graph"]))
    assert edges[0] == "task --> verify"
    assert 'verify["verify: verifier"]' in edges
    assert "search --> verify" in edges
    assert "verify -->|\"verify == 'yes' or verify.runs >= 4\"| conclude" in edges


def test_a_section_names_roles_rewards_configs_and_source() -> None:
    text = PAGE.split("## solver_verifier\n")[1].split("\n## ")[0]
    assert "| `verifier` | `verifier` | `approve` or `reject`, None unless" in text
    assert "- environment `math`, reward `shared_outcome`, penalty `invalid` (" in text
    rows = PAGE.split("## Environments and rewards\n")[1].splitlines()
    assert [row.split("|")[1].strip() for row in rows if "|" in row].count("`math`") == 1
    assert "| `invalid` | Return -coef if the role's parser refused the reply" in "\n".join(rows)
    assert (
        "[solver_verifier](../configs/team/solver_verifier.yaml), with `sharing` shared or separate\n"
        in text
    )
    assert "[rollout/orchestras/sequential.py](../rollout/orchestras/sequential.py)" in text
    assert "    verifier -->|reject| solver\n" in text
    partly = PAGE.split("## chain\n")[1].split("\n## ")[0]
    assert (
        "`sharing` shared, separate or partly (`writer` for generator, refiner; `verifier` for verifier)\n"
        in partly
    )
