"""Imported last by the forkserver, under ``instep run --preload``: the imports at the top of the script.

A process that replaces a lost rank runs the script from its top. Where that imports transformers, say, all
other ranks wait for seconds; what the forkserver has imported, each of its children has at once. Only the
imports before any other statement are made here, as what follows may set what an import depends on. One that
fails is left to the script. A process with threads, or with CUDA initialised, must not be forked.
"""

import ast
import os
import sys
from contextlib import suppress
from pathlib import Path


def leading_imports(source: bytes) -> list[ast.stmt]:
    """The imports before any statement of another kind but a docstring."""
    body = ast.parse(source).body
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    kinds = [isinstance(statement, ast.Import | ast.ImportFrom) for statement in body]
    return body[: kinds.index(False)] if False in kinds else body


def _preload(path: Path) -> None:
    before = len(os.listdir("/proc/self/task"))
    sys.path.insert(0, str(path.parent))  # as when the script runs
    try:
        for statement in leading_imports(path.read_bytes()):
            with suppress(Exception, SystemExit):
                exec(compile(ast.Module([statement], []), str(path), "exec", dont_inherit=True), {})
    finally:
        sys.path.remove(str(path.parent))
    torch = sys.modules.get("torch")
    if len(os.listdir("/proc/self/task")) > before or (torch is not None and torch.cuda.is_initialized()):
        print(
            f"instep run --preload: an import of {path} starts threads or CUDA, and ranks that are forked "
            "afterwards may hang: leave --preload out",
            file=sys.stderr,
            flush=True,
        )


if script := os.environ.pop("INSTEP_PRELOAD", ""):
    with suppress(OSError, SyntaxError, ValueError):  # which the script shows when it runs
        _preload(Path(script))
