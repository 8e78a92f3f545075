"""Colours of agents: they differ for people with any colour vision, and are legible on the page."""

from __future__ import annotations

import re
from itertools import combinations

import numpy as np
import pytest

from mcore_mas.reports.page_templates import render_page

# Simulations of full protanopia, deuteranopia and tritanopia on linear RGB (Machado, Oliveira and
# Fernandes, 2009).
VISIONS = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
# Björn Ottosson's OKLab: cone responses of linear RGB, and lightness and two hues of their roots.
CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def linear_rgb(colour: str) -> np.ndarray:
    values = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def oklab(rgb: np.ndarray) -> np.ndarray:
    return LAB @ np.cbrt(CONES @ np.clip(rgb, 0, 1))


def contrast(first: str, second: str) -> float:
    """Return the contrast of two colours as WCAG defines it, from 1 to 21."""
    weights = np.array([0.2126, 0.7152, 0.0722])
    low, high = sorted(float(weights @ linear_rgb(colour)) for colour in (first, second))
    return (high + 0.05) / (low + 0.05)


def themes() -> dict[str, dict[str, str]]:
    light, dark = render_page("colours.css.jinja").split("@media (prefers-color-scheme: dark)")
    return {
        name: dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", text))
        for name, text in (("light", light), ("dark", dark))
    }


def test_a_simulation_removes_what_a_protanope_does_not_see() -> None:
    """Black on white has the largest contrast, and red and green have nearly one hue."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert oklab(linear_rgb("#ffffff")) == pytest.approx([1, 0, 0], abs=1e-4)
    red, green = linear_rgb("#c00000"), linear_rgb("#008000")
    hue_distances = {
        vision: float(np.linalg.norm((oklab(matrix @ red) - oklab(matrix @ green))[1:]))
        for vision, matrix in VISIONS.items()
    }
    assert hue_distances["normal"] > 0.25
    assert hue_distances["protanopia"] < 0.05


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("vision", VISIONS)
def test_any_two_agents_have_colours_that_differ(theme: str, vision: str) -> None:
    """A distance of 0.02 in OKLab is just noticed; 0.075 is seen between thin lines."""
    colours = themes()[theme]
    perceived = [oklab(VISIONS[vision] @ linear_rgb(colours[f"c{number}"])) for number in range(8)]
    assert min(float(np.linalg.norm(a - b)) for a, b in combinations(perceived, 2)) > 0.075


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_are_legible_on_the_page(theme: str) -> None:
    colours = themes()[theme]
    for name in ("ink", "soft", "bad", "good"):
        assert contrast(colours[name], colours["page"]) > 4.5, name
    for number in range(8):  # also of names in a large or bold face
        assert contrast(colours[f"c{number}"], colours["page"]) > 3.9, number
