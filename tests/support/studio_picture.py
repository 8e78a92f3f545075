"""Screenshots of the studio for the documents, of a run in a folder of results.

python -m tests.support.studio_picture --results results --run demo_math
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.support.browser import Browser
from tests.support.studio import serve_studio

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
# by tab of the studio, the file of its picture
FILES = {"curves": "studio.png", "trajectories": "studio_trajectories.png"}
_SIZE = {"width": 1300, "height": 770, "deviceScaleFactor": 1, "mobile": False}


def take_pictures(results: Path, run: str, folder: Path) -> None:
    """Write a screenshot of each tab of a run's page in the studio.

    Args:
        results: folder with the run.
        run: name of the run.
        folder: folder for the PNG files.
    """
    for tab, file in FILES.items():
        with (
            tempfile.TemporaryDirectory() as profile,
            serve_studio(results) as url,
            Browser(f"{url}/#{run}/{tab}", Path(profile)) as browser,
        ):
            browser.send("Emulation.setDeviceMetricsOverride", **_SIZE)
            browser.until("document.getElementById('facts').textContent")
            wait = "new Promise(resolve => setTimeout(resolve, 8000))"  # until all is drawn
            browser.value(wait)
            browser.picture(folder / file)


def main() -> None:
    """Take the pictures that the documents show."""
    parser = argparse.ArgumentParser("python -m tests.support.studio_picture")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--run", default="demo_math")
    arguments = parser.parse_args()
    take_pictures(arguments.results, arguments.run, PICTURES)


if __name__ == "__main__":
    main()
