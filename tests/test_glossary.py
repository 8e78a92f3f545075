"""The glossary's page names what is there: each name is defined in its file, and that file says the field's term."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROWS = re.findall(
    r"^\| ([^|`]+) \| `([\w.]+)` \| `([\w/.]+)` \|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE
)


def test_the_page_has_the_fields_words() -> None:
    wanted = {"weight sync", "resharding", "rollout buffer", "worker group", "sequence packing", "bin packing"}
    wanted |= {"reference model", "credit assignment", "multi-turn", "colocation"}
    wanted |= {"loss mask", "on-policy", "off-policy", "gradient accumulation", "value function", "SFT", "RLVR"}
    wanted |= {"partial rollout", "replay buffer", "GRPO", "PPO", "tensor parallelism", "entropy bonus", "whitening"}
    assert not wanted - {term for term, _, _ in ROWS}


@pytest.mark.parametrize(("term", "name", "path"), ROWS, ids=[term for term, _, _ in ROWS])
def test_a_term_is_found_where_the_page_says(term: str, name: str, path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    defined = {
        getattr(node, "name", None) or ast.unparse(getattr(node, "target", None) or node.targets[0])
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign)
    }
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    defined |= {f"{c.name}.{node.name}" for c in classes for node in c.body if isinstance(node, ast.FunctionDef)}
    assert name in defined, f"{path} does not define {name}"
    words = re.sub(r"\s+", " ", text).lower()
    assert term.lower() in words, f"{path} does not say '{term}'"
