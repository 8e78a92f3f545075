"""The catalogue and the page of options have every registered name, and the catalogue draws every orchestra."""

from __future__ import annotations

from docs.writers import catalogue, options
from rollout.orchestras import ORCHESTRAS
from tests.support.shipped import TEAMS

PAGE = catalogue.pages()[catalogue.CATALOGUE]


def test_every_option_is_described() -> None:
    page = options.pages()[options.OPTIONS]
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 200
    assert not [cells[:2] for cells in rows if cells[1] != "none" and cells[-1].strip(" |") == ""]
    assert all(f"| `{name}` |" in page for name in ORCHESTRAS)


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
    assert '| `verifier` | `verifier` | Return "approve" or "reject" from the only' in text
    assert "- environment `math`, reward `shared_outcome`, penalty `invalid` (" in text
    rows = PAGE.split("## Environments and rewards\n")[1].splitlines()
    assert [row.split("|")[1].strip() for row in rows if "|" in row].count("`math`") == 1
    assert "| `invalid` | Return -coef if the reply is malformed" in "\n".join(rows)
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
