"""Executing a cell in a rank: the value of its last expression, and a traceback without our own frames."""

from __future__ import annotations

import ast
import linecache
import traceback
from typing import Any

from instep.launch.rank_exit import said

VALUE_LIMIT = 1 << 20  # characters of the text of a value


def execute(source: str, name: str, names: dict[str, Any]) -> str:
    """Execute ``source`` in ``names``; the text of its last expression, "" if it has none or ends with ";".

    Tracebacks and ``inspect.getsource`` find the lines under the file name ``name``.
    """
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    body = ast.parse(source, name).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), name, "exec", dont_inherit=True), names)
    if not isinstance(last, ast.Expr):
        return ""
    value = evaluate(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), names)
    if value is None or source.rstrip().endswith(";"):
        return ""
    names["_"] = value
    return repr(value)[:VALUE_LIMIT]


def evaluate(expression: Any, names: dict[str, Any]) -> Any:
    """The value of ``expression``, a text or compiled, in ``names``."""
    return eval(expression, names)


def described(error: BaseException, name: str) -> dict[str, str]:
    """``error`` of the cell ``name``, for the kernel: its type, message, traceback and line in the cell."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != name:
        frames = frames.tb_next
    lines = [line for frame, line in traceback.walk_tb(frames) if frame.f_code.co_filename == name]
    return {
        "type": type(error).__name__,
        "message": said(error),
        "traceback": "".join(traceback.format_exception(type(error), error, frames)),
        "where": f"{name}, line {lines[-1]}" if lines else name,
    }
