"""Says which installed packages have known vulnerabilities, for ``make audit``.

pip-audit asks PyPI's index of advisories (https://pypi.org/project/pip-audit). What it could not ask about is named,
since it would look like what has no vulnerability. Exit code: 0: none of the packages has one that is known. 1: some
have. 2: the index cannot be reached, or does not know a package.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path("build/audit")


def summary(report: dict[str, Any]) -> tuple[int, list[str]]:
    """Returns the exit code and the lines for a report of pip-audit in JSON."""
    packages = report["dependencies"]
    unasked = [each["name"] for each in packages if "skip_reason" in each]
    lines = [
        f"audit: {each['name']} {each['version']}: {found['id']}: fixed in {', '.join(found['fix_versions']) or 'none'}"
        for each in packages
        for found in each.get("vulns", ())
    ]
    asked = len(packages) - len(unasked)
    code = 1 if lines else 0
    if not asked:
        lines.append("audit: NOT DONE: no index of advisories can be reached")
    else:
        lines.append(f"audit: {asked} packages asked about, {len(lines)} known vulnerabilities")
        if unasked:
            lines.append(f"audit: NOT ASKED about {len(unasked)}: {', '.join(unasked)}")
    return code or (2 if unasked or not asked else 0), lines


def main() -> int:
    """Audits the packages of the Python that runs this file; returns the exit code."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    listed, report = FOLDER / "installed.txt", FOLDER / "report.json"
    report.unlink(missing_ok=True)
    freeze = [sys.executable, "-m", "pip", "list", "--format=freeze", "--exclude=sparserow"]
    listed.write_text(subprocess.run(freeze, check=True, capture_output=True, text=True).stdout)
    program = FOLDER / "bin" / "pip-audit"
    arguments = ["--disable-pip", "--no-deps", "--format=json", f"--output={report}", f"--requirement={listed}"]
    if program.exists():
        subprocess.run([program, *arguments], check=False, capture_output=True)
    if not report.exists():
        print("audit: NOT DONE: pip-audit cannot be installed, or has failed")
        return 2
    code, lines = summary(json.loads(report.read_text()))
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
