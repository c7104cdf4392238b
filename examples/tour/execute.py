"""Execute the notebooks of the tour from top to bottom, and store what they print and draw.

    python examples/tour/execute.py [--write] [NOTEBOOK ...]

Each notebook gets a kernel of its own; the first cell that raises ends it, with exit code 1, but for cells
with the tag `raises-exception`. Without --write the files stay as they are. Needs the extra `notebook`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager

TOUR = Path(__file__).parent
TIMEOUT_S = 120


def execute(path: Path, *, write: bool) -> None:
    """Raises ``RuntimeError`` with the traceback of a cell that fails."""
    notebook = json.loads(path.read_text())
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(TOUR))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=TIMEOUT_S)
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for number, cell in enumerate(cells, start=1):
            outputs: list[dict[str, Any]] = []
            source = "".join(cell["source"])
            reply = client.execute_interactive(source, timeout=TIMEOUT_S, output_hook=collector(outputs))
            cell |= {"execution_count": number, "outputs": outputs}
            may_raise = "raises-exception" in cell["metadata"].get("tags", [])
            if reply["content"]["status"] != "ok" and not may_raise:
                said = "\n".join(line for output in outputs for line in output.get("text", []))
                raise RuntimeError(f"{path.name}, cell {number}:\n{source}\n{said}\n{reply['content']}")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    if write:
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def collector(outputs: list[dict[str, Any]]) -> Any:
    """A hook that turns a kernel's messages into the outputs of a cell."""

    def hook(message: dict[str, Any]) -> None:
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            if outputs and outputs[-1].get("name") == content["name"]:
                text = "".join(outputs[-1]["text"]) + content["text"]
            else:
                outputs.append({"output_type": "stream", "name": content["name"]})
                text = content["text"]
            outputs[-1]["text"] = text.splitlines(keepends=True)
        elif kind in ("display_data", "execute_result"):
            data = {name: value for name, value in content["data"].items() if name != "text/html"}
            output = {"output_type": kind, "data": data, "metadata": {}}
            outputs.append(output | ({"execution_count": None} if kind == "execute_result" else {}))
        elif kind == "error":
            outputs.append({"output_type": "error", **content})

    return hook


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("notebooks", nargs="*", type=Path, help="by default all of the tour")
    parser.add_argument("--write", action="store_true", help="store the outputs")
    args = parser.parse_args()
    for path in args.notebooks or sorted(TOUR.glob("*.ipynb")):
        try:
            execute(path, write=args.write)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
        print(f"{path.name}: done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
